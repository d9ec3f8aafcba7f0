"""Hooks on a compiled engine: on demand, and by hand, too late.

One engine serves all tests: it takes minutes to start. It is started with statistics, which the first test takes off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_vllm import ROUNDING, greedy, row_error, running_engine

import hookline as hl
from hookline.engines.vllm import HookExtension, VllmHooks, engine_options

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
STATS = {"name": "stats", "target_modules": ["model.layers.#"], "hook_factory": "hookline.factories:activation_stats"}


class LateExtension(HookExtension):
    """Attach a hook by hand, without the extension's help, to modules that have none in the compiled code."""

    def attach_by_hand(self) -> None:
        self._late_handle = hl.attach(self.get_model(), "model.layers.#.mlp", lambda module, args, output: None)  # type: ignore[attr-defined]

    def remove_by_hand(self) -> str:
        import warnings

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self._late_handle.remove()
        return "; ".join(str(each.message) for each in warned)


@pytest.fixture(scope="module")
def llm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("specs") / "hooks.json"
    file.write_text(json.dumps([STATS]), encoding="utf-8")
    options = {**engine_options(hooks=file), "worker_extension_cls": "test_vllm_ways.LateExtension"}
    with running_engine(tiny, enforce_eager=False, enable_prefix_caching=True, block_size=32, **options) as found:
        yield found


@pytest.fixture(scope="module")
def hooks(llm: Any) -> VllmHooks:
    return VllmHooks(llm)


@pytest.fixture(scope="module")
def plain(llm: Any) -> list[list[int]]:
    return greedy(llm, PROMPTS, 4)


def test_hooks_of_the_start_fire_in_every_step(llm: Any, hooks: VllmHooks) -> None:
    (stats,) = hooks.list()
    assert stats["way"] == "on_demand"
    assert stats["fired"] == 4 * hooks.describe()[0]["steps"]  # nothing of the warm-up
    with_hook = greedy(llm, PROMPTS, 4)
    assert hooks.remove(stats["id"])["fired"] == 4 * hooks.describe()[0]["steps"] > 0
    assert greedy(llm, PROMPTS, 4) == with_hook


def test_hooks_on_demand_fire_and_the_engine_goes_back(llm: Any, hooks: VllmHooks, plain: list[list[int]]) -> None:
    added = hooks.add({**STATS, "target_modules": ["role:resid"]})
    assert added["way"] == "on_demand"
    assert len(added["matched"]) == 4
    start = hooks.describe()[0]
    assert greedy(llm, PROMPTS, 4) == plain
    end = hooks.describe()[0]
    assert hooks.remove(added["id"])["fired"] == 4 * (end["steps"] - start["steps"])
    assert end["eager_steps"] > start["eager_steps"]
    assert greedy(llm, PROMPTS, 4) == plain
    assert hooks.describe()[0]["eager_steps"] == end["eager_steps"]


def test_a_hook_that_comes_by_hand_names_the_true_cause(llm: Any, plain: list[list[int]]) -> None:
    llm.collective_rpc("attach_by_hand")
    assert greedy(llm, PROMPTS, 4) == plain
    (warned,) = llm.collective_rpc("remove_by_hand")
    assert "never fired on 4 of 4" in warned
    assert "vLLM has compiled without guards" in warned
    assert greedy(llm, PROMPTS, 4) == plain


def test_states_and_steering_of_one_request(llm: Any, hooks: VllmHooks, plain: list[list[int]], reference: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    layers = ["model.layers.#", "model.norm", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    vector = torch.randn(128, generator=torch.Generator().manual_seed(0)).tolist()
    steer = {"target_modules": ["model.layers.1"], "hook_factory": "hookline.factories:steer"}
    steered = {"hooks": [{**steer, "config": {"vector": vector, "strength": 20.0}}]}
    watched = {"hidden_states": {"layers": layers}}
    params = [
        SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={"hookline": asked})
        for asked in (steered, watched)
    ]
    done = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS], params, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in done]
    assert tokens[0] != plain[0]
    assert tokens[1] == plain[1]
    assert hooks.states(done[0].request_id).hooks[0]["rows"] == len(PROMPTS[0]) + 3
    answer = hooks.states(done[1].request_id)
    ids = torch.tensor([PROMPTS[1] + plain[1][:-1]])
    with torch.no_grad(), hl.capture(reference, layers) as expected:
        reference(ids)
    assert set(answer.states) == set(expected)
    for name, found in answer.states.items():
        assert found.positions == list(range(9))
        assert row_error(found.values, expected[name].output[0]) < ROUNDING
    assert row_error(found.values, expected[name].output[0].roll(1, 0)) > ROUNDING  # negative control


def test_the_prefix_cache_is_counted_and_can_be_bypassed(llm: Any, hooks: VllmHooks) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[3 + 7 * place % 250 for place in range(70)])
    asked = {"hookline": {"hidden_states": {"layers": ["model.layers.0"], "phase": "prefill"}}}
    found = []
    for bypass in (None, None, True):
        params = SamplingParams(max_tokens=1, temperature=0, extra_args=asked, skip_reading_prefix_cache=bypass)
        (done,) = llm.generate([prompt], params, use_tqdm=False)
        answer = hooks.states(done.request_id)
        found.append((answer.not_computed, len(answer.states["model.layers.0"].positions)))
    assert found == [(0, 70), (64, 6), (0, 70)]
