"""What a client of a real vLLM server cannot do: touch another request, stop the engine, pass checks; and probes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from helpers_vllm import BEARER, VllmServer, ask_with_hooks, head_for
from helpers_waiting import PATIENCE

import hookline as hl

PROMPT = [5, 6, 7, 8, 9]
LAYER = "model.layers.1"
STATES = {"hidden_states": {"layers": [LAYER]}}
VECTOR = [40.0 if place % 2 else -40.0 for place in range(128)]
STEER = {"target_modules": [LAYER], "hook_factory": "hookline.factories:steer", "config": {"vector": VECTOR}}


@pytest.fixture
def client(server: VllmServer, reference: Any) -> Iterator[httpx.Client]:
    """A client; whatever a test did, the engine lives, no hook is left, and answers are as before."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as found:
        yield found
        for hook in found.get("/hooks").json()["hooks"]:
            found.delete(f"/hooks/{hook['id']}", headers=BEARER)
        assert tokens(ask(found)) == alone(reference, PROMPT)


def ask(client: httpx.Client, prompt: Any = PROMPT, *, hooks: Any = None, name: str = "", **options: Any) -> Any:
    """The answer to one prompt, greedy."""
    body = {
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        **options,
    }
    headers = {"X-Request-Id": name} if name else {}
    if hooks is None:
        return client.post("/v1/completions", json=body, headers=headers)
    return ask_with_hooks(client, "/v1/completions", body, hooks, headers=headers)


def tokens(answer: Any) -> list[int]:
    """The ids of the first answer."""
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def alone(reference: Any, prompt: list[int], length: int = 6) -> list[int]:
    """What transformers answers."""
    found = reference.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None)
    return [int(each) for each in found[0, len(prompt) :]]


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ({"hooks": [{**STEER, "on_error": "raise"}]}, "on_error"),
        ({"hooks": [{**STEER, "hook_factory": "os:system"}]}, "os:system"),
        ({"hooks": [STEER] * 65}, "64"),
        ({"hidden_states": {"layers": [LAYER] * 300}}, "256"),
        ({"hook": [STEER]}, "hooks"),
    ],
)
def test_what_no_client_may_ask_is_told_instead_of_results(client: httpx.Client, hooks: Any, words: str) -> None:
    answer = ask(client, hooks=hooks)
    assert (answer.status_code, words in answer.text) == (400, True), answer.text[:500]


@pytest.mark.parametrize("text", ["[" * 100_000, json.dumps({"key": "cmpl-victim-0", **STATES}), "{"])
def test_options_that_mean_nothing_change_no_answer(client: httpx.Client, reference: Any, text: str) -> None:
    """And whoever guesses the id of a request gets nothing by it."""
    assert tokens(ask(client, vllm_xargs={"hookline": text}, name="victim")) == alone(reference, PROMPT)
    assert client.get("/hooks/results/cmpl-victim-0").status_code == 404


def test_one_name_for_all_and_everybody_has_their_own(client: httpx.Client, reference: Any) -> None:
    """Clients that give the id of another: who asks to be steered is, and who asks for states gets their own."""
    prompts = [[60 + place, 6, 7] for place in range(6)]

    def one(place: int) -> Any:
        hooks = (STATES, {"hooks": [STEER]}, None)[place % 3]
        return ask(client, prompts[place], hooks=hooks, name="victim")

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(one, range(6)))
    for place, answer in enumerate(answers):
        plain = alone(reference, prompts[place])
        assert (tokens(answer) == plain) == (place % 3 != 1)
        found = answer.json()["choices"][0].get("hooks")
        if place % 3 == 0:
            assert found["hidden_states"][LAYER]["positions"] == list(range(8))
        elif place % 3 == 1:
            assert found["hooks"][0]["rows"] == 8
        else:
            assert found is None


def test_a_hook_of_a_request_that_raises_ends_no_engine(client: httpx.Client, reference: Any) -> None:
    """A vector of the wrong width, with a neighbour in the batch: told in the one answer."""
    bad = {**STEER, "target_modules": [f"{LAYER}.mlp"], "config": {"vector": [1.0] * 7}}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(ask, client, hooks={"hooks": [bad]}), pool.submit(ask, client, [70, 6])
    assert tokens(first.result()) == alone(reference, PROMPT)
    assert tokens(second.result()) == alone(reference, [70, 6])
    (found,) = first.result().json()["choices"][0]["hooks"]["hooks"]
    assert found["errors"] == 1
    assert "7" in found["last_error"]


def test_behind_a_proxy_the_token_is_asked_for_all_the_same(client: httpx.Client) -> None:
    """With ``--root-path`` paths come with the proxy's prefix and without it."""
    body = {"target_modules": [LAYER], "hook_factory": "hookline.factories:activation_stats"}
    assert client.post("/proxy/hooks", json=body).status_code == 401
    assert client.post("/proxy/hooks", json=body, headers=BEARER).status_code == 201
    assert len(client.get("/proxy/hooks").json()["hooks"]) == 1
    answer = ask_with_hooks(client, "/proxy/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, STATES)
    assert LAYER in answer.json()["choices"][0]["hooks"]["hidden_states"], answer.text[:500]


def test_a_request_brings_its_own_probe(client: httpx.Client, reference: Any) -> None:
    """The head comes as data; the answer is untouched, and so is its neighbour."""
    plain = alone(reference, PROMPT)
    with torch.no_grad(), hl.capture(reference, LAYER) as cache:
        reference(torch.tensor([[*PROMPT, *plain[:-1]]]))
    token = len(PROMPT) + 2  # the third token of the answer
    config = {"head": head_for(cache[LAYER].output[0], token), "action": "flag", "add_residual": True}
    spec = {"target_modules": [LAYER], "hook_factory": "hookline.factories:probe", "config": config}
    with ThreadPoolExecutor(2) as pool:
        own = pool.submit(ask, client, hooks={"hooks": [spec]}, min_tokens=0, logprobs=1)
        other = pool.submit(ask, client, [71, 6])
    assert tokens(other.result()) == alone(reference, [71, 6])
    [choice] = own.result().json()["choices"]
    [flag] = choice["hooks"]["flags"]
    assert (flag["module"], flag["position"], flag["stopped"]) == (LAYER, token, False)
    assert choice["hooks"]["hooks"][0]["errors"] == 0
    assert (flag["tokens"], choice["token_ids"]) == (1, plain)
