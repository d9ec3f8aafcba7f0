"""Hooks at taps of a compiled engine: no step becomes eager for them.

One engine serves all tests but the last, which starts another from the code that the first has left in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_vllm import ROUNDING, greedy, row_error, running_engine

import hookline as hl
from hookline.engines.vllm import VllmHooks, engine_options

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}
STEER = {"target_modules": ["model.layers.1"], "hook_factory": "hookline.factories:steer"}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    with running_engine(tiny, enforce_eager=False, **engine_options(taps=["model.layers.#", "model.norm"])) as found:
        yield found


@pytest.fixture(scope="module")
def hooks(llm: Any) -> VllmHooks:
    return VllmHooks(llm)


@pytest.fixture(scope="module")
def plain(llm: Any) -> list[list[int]]:
    return greedy(llm, PROMPTS, 4)


def _steps(hooks: VllmHooks) -> tuple[int, int]:
    found = hooks.describe()[0]
    return found["steps"], found["eager_steps"]


def test_hooks_at_taps_leave_the_steps_compiled(llm: Any, hooks: VllmHooks, plain: list[list[int]]) -> None:
    added = hooks.add(STATS)
    assert added["way"] == "tapped"
    steps, eager = _steps(hooks)
    assert greedy(llm, PROMPTS, 4) == plain
    assert hooks.remove(added["id"])["fired"] == 4 * (_steps(hooks)[0] - steps) > 0
    assert _steps(hooks)[1] == eager
    assert greedy(llm, PROMPTS, 4) == plain


def test_elsewhere_steps_become_eager(llm: Any, hooks: VllmHooks, plain: list[list[int]]) -> None:
    """A module without a tap, and what goes into one that has; so a hook at a tap fires once in such a step, too."""
    tapped = hooks.add(STATS)
    before = {"target_modules": ["model.layers.#"], "on": "forward_pre", "hook_factory": "helpers_vllm:hook_of_inputs"}
    for spec in ({**STATS, "target_modules": ["model.layers.#.mlp"]}, before):
        added = hooks.add(spec)
        assert added["way"] == "on_demand"
        steps, eager = _steps(hooks)
        fired = hooks.list()[0]["fired"]
        assert greedy(llm, PROMPTS, 4) == plain
        ran = _steps(hooks)[0] - steps
        assert _steps(hooks)[1] - eager == ran > 0
        assert hooks.list()[0]["fired"] - fired == 4 * ran
        assert hooks.remove(added["id"])["fired"] == 4 * ran
    hooks.remove(tapped["id"])


def test_states_and_steering_of_one_request(llm: Any, hooks: VllmHooks, plain: list[list[int]], reference: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    layers = ["model.layers.#", "model.norm"]
    vector = torch.randn(128, generator=torch.Generator().manual_seed(0)).tolist()
    steered = {"hooks": [{**STEER, "config": {"vector": vector, "strength": 20.0}}]}
    watched = {"hidden_states": {"layers": layers}}
    params = [
        SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={"hookline": asked})
        for asked in (steered, watched)
    ]
    eager = _steps(hooks)[1]
    done = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS], params, use_tqdm=False)
    assert _steps(hooks)[1] == eager
    tokens = [list(each.outputs[0].token_ids) for each in done]
    assert tokens[0] != plain[0]
    assert tokens[1] == plain[1]
    assert hooks.states(done[0].request_id).hooks[0]["rows"] == len(PROMPTS[0]) + 3
    answer = hooks.states(done[1].request_id)
    with torch.no_grad(), hl.capture(reference, layers) as expected:
        reference(torch.tensor([PROMPTS[1] + plain[1][:-1]]))
    assert set(answer.states) == set(expected)
    for name, found in answer.states.items():
        assert row_error(found.values, expected[name].output[0]) < ROUNDING
    assert row_error(found.values, expected[name].output[0].roll(1, 0)) > ROUNDING  # negative control


def test_a_hook_that_raises_is_switched_off(llm: Any, hooks: VllmHooks, plain: list[list[int]]) -> None:
    added = hooks.add({"target_modules": ["model.layers.0"], "hook_factory": "helpers_vllm:raising_hook"})
    assert greedy(llm, PROMPTS, 4) == plain
    removed = hooks.remove(added["id"])
    assert (removed["way"], removed["errors"]) == ("tapped", 1)
    assert "made to raise" in removed["last_error"]


def test_code_from_the_compile_cache_has_the_taps(tiny: Path, llm: Any, plain: list[list[int]]) -> None:
    with running_engine(tiny, enforce_eager=False, **engine_options(taps=["model.layers.#", "model.norm"])) as again:
        hooks = VllmHooks(again)
        assert hooks.add(STATS)["way"] == "tapped"
        assert greedy(again, PROMPTS, 4) == plain
        assert hooks.list()[0]["fired"] > 0
        assert _steps(hooks)[1] == 0
