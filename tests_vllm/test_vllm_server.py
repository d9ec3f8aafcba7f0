"""``vllm serve`` with the hook paths of hookline: hooks on and off, refusals, files, and steering of one client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_vllm import BEARER, VllmServer, ask_with_hooks
from helpers_waiting import PATIENCE, until

STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def client(server: VllmServer) -> Iterator[httpx.Client]:
    """A client; no hook is left behind."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as found:
        yield found
        for hook in found.get("/hooks").json()["hooks"]:
            found.delete(f"/hooks/{hook['id']}", headers=BEARER)


def complete(client: httpx.Client, prompt: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    """The answer to one prompt, greedy, with the ids of its tokens."""
    headers = options.pop("headers", {})
    body = {
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens(client: httpx.Client, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    """The ids of the first answer."""
    found: list[int] = complete(client, prompt, **options)["choices"][0]["token_ids"]
    return found


def alone(reference: Any, prompt: list[int] = PROMPT, length: int = 6) -> list[int]:
    """What transformers answers."""
    found = reference.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None)
    return [int(each) for each in found[0, len(prompt) :]]


def test_a_hook_goes_on_fires_and_comes_off(client: httpx.Client, reference: Any) -> None:
    """The counts are exact, the metrics are beside vLLM's own, and no token changes."""
    expected = alone(reference)
    assert tokens(client) == expected
    added = client.post("/hooks", json=STATS, headers=BEARER).json()
    assert (added["matched"], added["way"]) == ([f"model.layers.{layer}" for layer in range(4)], "eager")
    assert tokens(client) == expected
    [listed] = client.get("/hooks").json()["hooks"]
    assert (listed["fired"], listed["errors"]) == (4 * 6, 0)
    page = client.get("/hooks/metrics").text
    labels = f'factory="hookline.factories:activation_stats",hook="{added["id"]}",name="stats"'
    assert f"hookline_hook_fired_total{{{labels}}} 24.0" in page
    removed = client.request("DELETE", f"/hooks/{added['id']}", headers=BEARER).json()
    assert removed["fired"] == 24
    assert tokens(client) == expected
    assert client.get("/hooks").json() == {"hooks": []}


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (STATS, {}, 401, "no token"),
        (STATS, {"Authorization": "Bearer guessed"}, 401, "not the server's"),
        ({**STATS, "hook_factory": "os:system"}, BEARER, 403, "os:system"),
        (
            {**STATS, "hook_factory": "hookline.factories:export", "config": {"folder": "/tmp"}},
            BEARER,
            403,
            "export folder",
        ),
        ({**STATS, "target_modules": ["model.layer.#"]}, BEARER, 400, "model.layers"),
        ({**STATS, "config": {"stat": []}}, BEARER, 400, "stat"),
        ({**STATS, "evry": 2}, BEARER, 400, "every"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(
    client: httpx.Client, body: Any, headers: dict[str, str], status: int, words: str
) -> None:
    """The same answers as of our own server; the engine lives on."""
    answer = client.post("/hooks", json=body, headers=headers)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
    assert client.get("/hooks").json() == {"hooks": []}
    assert client.delete("/hooks/h999", headers=BEARER).status_code == 404


def test_a_hook_that_raises_in_a_worker_is_switched_off(client: httpx.Client, reference: Any) -> None:
    """The request in which it raised has its answer; the error is told, and another hook goes on."""
    client.post("/hooks", json=STATS, headers=BEARER)
    client.post("/hooks", json={**STATS, "name": "bad", "hook_factory": "helpers_vllm:raising_hook"}, headers=BEARER)
    assert tokens(client) == alone(reference)
    stats, bad = client.get("/hooks").json()["hooks"]
    assert (bad["off"], bad["errors"], "made to raise" in bad["last_error"]) == (True, 1, True)
    assert (stats["off"], stats["fired"]) == (False, 24)


def test_an_export_has_the_rows_of_each_request(client: httpx.Client, exports: Path, reference: Any) -> None:
    """Files lie in the export folder, with request ids and positions, and hold what transformers computes."""
    from hookline.factories import read_export

    body = {
        "target_modules": ["model.embed_tokens"],
        "hook_factory": "hookline.factories:export",
        "config": {"folder": "rows"},
    }
    added = client.post("/hooks", json=body, headers=BEARER).json()
    assert added["config"] == {"folder": "rows"}
    prompts = {name: [place, 6, 7] for place, name in enumerate(("one", "two"), 20)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: tokens(client, prompts[name], headers={"X-Request-Id": name}), prompts))
    client.delete(f"/hooks/{added['id']}", headers=BEARER)
    found: dict[str, dict[int, torch.Tensor]] = {}
    for record in read_export(exports / "rows"):
        found.setdefault(record.request, {}).update(zip(record.positions, record.tensor, strict=True))
    assert sorted(found) == ["cmpl-one-0", "cmpl-two-0"]
    for name, prompt in prompts.items():
        ids = torch.tensor([*prompt, *alone(reference, prompt)][:-1])
        rows = found[f"cmpl-{name}-0"]
        assert torch.equal(torch.stack([rows[place] for place in range(len(ids))]), reference.model.embed_tokens(ids))


def test_one_client_is_steered_and_its_neighbours_are_not(client: httpx.Client, reference: Any) -> None:
    """In one batch, by the id that the client gave its request; afterwards nobody is."""
    vector = [4.0 if place % 2 else -4.0 for place in range(128)]
    body = {
        "target_modules": ["model.layers.1"], "hook_factory": "hookline.factories:steer",
        "config": {"vector": vector, "requests": ["cmpl-steered-*"]},
    }  # fmt: skip
    added = client.post("/hooks", json=body, headers=BEARER)
    assert added.status_code == 201, added.text
    prompts = [[30 + place, 6, 7, 8] for place in range(6)]
    names = [f"plain-{place}" if place % 3 else f"steered-{place}" for place in range(6)]

    def ask(place: int) -> list[int]:
        return tokens(client, prompts[place], max_tokens=12, headers={"X-Request-Id": names[place]})

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    expected = [alone(reference, prompt, 12) for prompt in prompts]
    changed = [answer != plain for answer, plain in zip(answers, expected, strict=True)]
    assert changed == [name.startswith("steered") for name in names]
    client.delete(f"/hooks/{added.json()['id']}", headers=BEARER)
    assert ask(0) == expected[0]


def test_thirty_two_clients_get_the_answers_they_get_alone(client: httpx.Client, reference: Any) -> None:
    """While hooks come and go and every fourth client leaves in the middle of its stream; the engine is idle after."""
    prompts = [[40 + place, *range(3, 3 + place % 7)] for place in range(32)]

    def ask(place: int) -> list[int] | None:
        if place % 4 == 3:
            _leave_early(client, prompts[place])
            return None
        return tokens(client, prompts[place], max_tokens=24)

    def change(place: int) -> None:
        added = client.post("/hooks", json={**STATS, "name": f"n{place}"}, headers=BEARER).json()
        client.delete(f"/hooks/{added['id']}", headers=BEARER)

    with ThreadPoolExecutor(36) as pool:
        answers = pool.map(ask, range(32))
        changes = pool.map(change, range(12))
        found = list(answers)
        assert len(list(changes)) == 12
    for place, answer in enumerate(found):
        assert answer is None or answer == alone(reference, prompts[place], 24), place
    until(lambda: _running(client) == 0, "those who left are out of the engine")


def test_what_could_never_give_anything_is_refused(client: httpx.Client) -> None:
    """A window that ends before it starts; a hook on a module that vLLM never calls."""
    for window in ([5, 2], [4, -3]):
        hooks = {"hidden_states": {"layers": ["model.norm"], "window": window}}
        answer = ask_with_hooks(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, hooks)
        assert (answer.status_code, "window" in answer.text) == (400, True)
    answer = client.post("/hooks", json={**STATS, "target_modules": ["lm_head"]}, headers=BEARER)
    assert (answer.status_code, "logits_processor" in answer.text) == (400, True)


def _leave_early(client: httpx.Client, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())


def _running(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))
