"""Two workers with tensor parallelism, and hookline's extension and another in one class."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_vllm import ROUNDING, greedy, row_error, running_engine

import hookline as hl
from hookline.engines.vllm import VllmHooks, engine_options
from hookline.errors import NoMatchError, OptionError

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [200, 3, 77]]
STATS = {"target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    """An eager engine of two ranks, with all extensions in one class."""
    options = {**engine_options(), "worker_extension_cls": "helpers_vllm.BothExtensions"}
    with running_engine(tiny, tensor_parallel_size=2, **options) as found:
        yield found


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    """What transformers answers to each prompt."""
    return [
        reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[
            0, len(ids) :
        ].tolist()
        for ids in PROMPTS
    ]


def test_receipts_are_merged_over_the_ranks(llm: Any, expected: list[list[int]]) -> None:
    """A module that both ranks have counts once; every rank has fired, and no token changes."""
    hooks = VllmHooks(llm)
    added = hooks.add(STATS)
    before = [each["steps"] for each in hooks.describe()]
    assert greedy(llm, PROMPTS) == expected
    [listed] = hooks.list()
    steps = [after["steps"] - start for after, start in zip(hooks.describe(), before, strict=True)]
    assert steps[0] == steps[1] >= 8
    assert (listed["fired"], listed["fired_by_rank"]) == (4 * steps[0], {"0": 4 * steps[0], "1": 4 * steps[0]})
    assert listed["silent"] == {}
    assert hooks.remove(added["id"])["fired"] == listed["fired"]
    assert greedy(llm, PROMPTS) == expected
    assert hooks.list() == []


def test_the_other_extension_works_beside_ours(llm: Any, expected: list[list[int]]) -> None:
    """Its methods are there on both ranks, and its plain hook of torch counts as it would alone."""
    assert llm.collective_rpc("count_forwards") == [0, 1]
    added = VllmHooks(llm).add(STATS)
    assert greedy(llm, PROMPTS) == expected
    counts = llm.collective_rpc("forwards")
    fired = VllmHooks(llm).remove(added["id"])["fired"]
    assert (counts[0], fired) == (counts[1], 4 * counts[0])


def test_states_that_both_ranks_have_are_those_of_one(llm: Any, reference: Any) -> None:
    """Those that ranks cut into columns are refused, and the answer says what to ask for."""
    hooks, key = VllmHooks(llm), str(uuid.uuid4())
    outputs = ["model.layers.1", "model.layers.1.mlp.down_proj", "model.norm"]
    prompt = PROMPTS[1]
    [answer] = greedy(llm, [prompt], extra_args={"hookline": {"key": key, "hidden_states": {"layers": outputs}}})
    ids = [*prompt, *answer][:-1]
    with torch.no_grad(), hl.capture(reference, outputs) as captured:
        reference(torch.tensor([ids]))
    found = hooks.states(key)
    assert found.not_computed == 0
    for name in outputs:
        assert list(found.states[name].positions) == list(range(len(ids)))
        assert row_error(found.states[name].values, captured[name].output[0]) < ROUNDING, name
    for wanted in ({"layers": ["model.layers.1.self_attn.q_proj"]}, {"layers": ["*.down_proj"], "of": "input"}):
        greedy(llm, [prompt], extra_args={"hookline": {"key": key, "hidden_states": wanted}})
        with pytest.raises(OptionError, match="each worker has a part"):
            hooks.states(key)


def test_what_cannot_be_attached_is_on_no_rank(llm: Any, expected: list[list[int]]) -> None:
    """A module that nobody has, a wrong option, a hook that raises on every rank: told, and the engine lives on."""
    hooks = VllmHooks(llm)
    with pytest.raises(NoMatchError, match=r"model\.layers"):
        hooks.add({**STATS, "target_modules": ["model.layer.#"]})
    with pytest.raises(OptionError, match="stat"):
        hooks.add({**STATS, "config": {"stat": ["mean"]}})
    assert hooks.list() == []
    added = hooks.add({**STATS, "hook_factory": "helpers_vllm:raising_hook"})
    assert greedy(llm, PROMPTS) == expected
    [listed] = hooks.list()
    assert (listed["off"], listed["errors"], "made to raise" in listed["last_error"]) == (True, 2, True)
    hooks.remove(added["id"])
