"""Hidden states over HTTP from a real vLLM: each client gets its own rows, equal to transformers' to rounding."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from helpers_vllm import BEARER, ROUNDING, VllmServer, ask_with_hooks, row_error
from helpers_waiting import PATIENCE

LAYERS = ["model.layers.0", "model.layers.3", "model.norm"]


@pytest.fixture
def client(server: VllmServer) -> Iterator[httpx.Client]:
    """A client of the shared server."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as found:
        yield found


def ask(client: httpx.Client, prompt: Any, length: int = 5, *, path: str = "/v1/completions", **options: Any) -> Any:
    """The whole answer with hidden states; `states` are the options of ``hooks.hidden_states``."""
    wanted = {"layers": LAYERS, **options.pop("states", {})}
    given = {"messages": prompt} if "chat" in path else {"prompt": prompt}
    sampling = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return ask_with_hooks(client, path, {**given, **sampling, **options}, {"hidden_states": wanted})


def tensor(found: dict[str, Any]) -> torch.Tensor:
    """The numbers of one layer."""
    raw = bytearray(base64.b64decode(found["data"]))
    return torch.frombuffer(raw, dtype=getattr(torch, found["dtype"])).reshape(found["shape"])


def expected(reference: Any, ids: list[int]) -> dict[str, torch.Tensor]:
    """The outputs of transformers' modules over all of `ids`."""
    import hookline as hl

    with torch.no_grad(), hl.capture(reference, LAYERS) as captured:
        reference(torch.tensor([ids]))
    return {name: captured[name].output[0] for name in LAYERS}


def assert_own(reference: Any, prompt: list[int], choice: dict[str, Any]) -> None:
    """The states of one choice are those of its own tokens, from the first computed one on."""
    ids = [*prompt, *choice["token_ids"]][:-1]
    hooks = choice["hooks"]
    first = hooks["tokens_not_computed"]
    for name, values in expected(reference, ids).items():
        found = hooks["hidden_states"][name]
        assert found["positions"] == list(range(first, len(ids)))
        assert row_error(tensor(found), values[first:]) < ROUNDING


def test_states_equal_transformers(client: httpx.Client, reference: Any) -> None:
    """Of blocks, whose pair of tensors is added, and of the last norm; the tokens are those without hooks."""
    prompt = [5, 6, 7, 8, 9]
    answer = ask(client, prompt)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert_own(reference, prompt, choice)
    plain = client.post(
        "/v1/completions",
        json={"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
    )
    assert plain.json()["choices"][0]["token_ids"] == choice["token_ids"]
    assert "hooks" not in plain.json()["choices"][0]
    other = expected(reference, [*reversed(prompt), *choice["token_ids"]][:-1])["model.norm"]
    found = tensor(choice["hooks"]["hidden_states"]["model.norm"])
    assert row_error(found, other) > 1000 * ROUNDING  # negative control: other tokens have other states


def test_positions_and_phase_choose_the_window(client: httpx.Client) -> None:
    """As on our own server."""

    def positions(**states: Any) -> Any:
        choice = ask(client, [5, 6, 7, 8], 4, states=states).json()["choices"][0]
        return choice["hooks"]["hidden_states"]["model.norm"]["positions"]

    assert positions() == [0, 1, 2, 3, 4, 5, 6]
    assert positions(phase="decode") == [4, 5, 6]
    assert positions(phase="prefill") == [0, 1, 2, 3]
    assert positions(positions="last") == [3, 4, 5, 6]
    assert positions(window=[-2, 5]) == [2, 3, 4]


def test_several_prompts_and_answers_are_told_apart(client: httpx.Client, reference: Any) -> None:
    """Two prompts with two sampled answers each, in one request: results come in the order of the choices."""
    prompts = [[11, 12, 13], [14, 15]]
    options = {"n": 2, "temperature": 1.0, "seed": 3}
    whole = ask(client, prompts, 4, **options).json()["choices"]
    assert [each["index"] for each in whole] == [0, 1, 2, 3]
    for choice in whole:
        assert_own(reference, prompts[choice["index"] // 2], choice)


def test_the_prefix_cache_is_told_and_can_be_bypassed(client: httpx.Client, reference: Any) -> None:
    """The second time most rows come from the cache: the answer says how many; bypassed, all are computed."""
    prompt = [3 + (7 * place) % 250 for place in range(70)]
    first, second, third = (
        ask(client, prompt, 2, **options).json()["choices"][0] for options in ({}, {}, {"cache_salt": "of its own"})
    )
    assert [each["hooks"]["tokens_not_computed"] for each in (first, second, third)] == [0, 64, 0]
    for choice in (first, second, third):
        assert_own(reference, prompt, choice)


def test_a_layer_that_is_not_there_fails_who_asked(client: httpx.Client, reference: Any) -> None:
    """With the nearest names; a neighbour in the batch gets its states."""
    prompt = [21, 22, 23]
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(ask, client, prompt, states={"layers": ["model.nrm"]})
        good = pool.submit(ask, client, prompt)
    assert (bad.result().status_code, "model.norm" in bad.result().text) == (400, True), bad.result().text
    assert_own(reference, prompt, good.result().json()["choices"][0])


def test_whoever_comes_and_goes_everybody_gets_their_own(client: httpx.Client, reference: Any) -> None:
    """32 clients at once: some want states, some none, some leave, one hook raises, prompts join running answers."""
    chance = random.Random(5)
    prompts = [[chance.randrange(3, 256) for _ in range(chance.randrange(1, 20))] for _ in range(32)]
    bad = {"target_modules": ["model.layers.2"], "hook_factory": "helpers_vllm:raising_hook"}
    added = client.post("/hooks", json=bad, headers=BEARER).json()

    def one(place: int) -> Any:
        prompt, length = prompts[place], 4 + place % 13
        if place % 4 == 3:
            return _leave(client, prompt)
        return ask(client, prompt, length, states={"layers": LAYERS})

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(32)))
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer is not None:
            assert answer.status_code == 200, answer.text
            assert_own(reference, prompt, answer.json()["choices"][0])
    client.delete(f"/hooks/{added['id']}", headers=BEARER)


def _leave(client: httpx.Client, prompt: list[int]) -> None:
    asked = {"hookline": json.dumps({"hidden_states": {"layers": LAYERS}})}
    sampling = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    body = {"prompt": prompt, **sampling, "vllm_xargs": asked}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
