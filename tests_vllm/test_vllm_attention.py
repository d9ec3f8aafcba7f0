"""Inside the attention of an eager engine: queries, keys, values and what heads read, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_vllm import ROUNDING, greedy, running_engine

import hookline as hl
from hookline.engines.vllm import HookExtension, VllmHooks, engine_options

PROMPT = [9, 10, 11, 12, 13, 14]
PARTS = ("q", "k", "v", "z")


class InsideExtension(HookExtension):
    """Capture inside of attention, in the worker."""

    def begin_capture(self) -> None:
        self._inside = hl.capture(self.get_model(), [f"role:{part}.1" for part in PARTS], clone=True, scope="process")  # type: ignore[attr-defined]

    def captured(self) -> dict[str, Any]:
        self._inside.remove()
        return {part: self._inside[part, 1].calls[0].output.tolist() for part in PARTS}

    def refused(self) -> str:
        try:
            hl.capture(self.get_model(), role="pattern")  # type: ignore[attr-defined]
        except hl.errors.UnhookableError as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    options = {**engine_options(), "worker_extension_cls": "test_vllm_attention.InsideExtension"}
    with running_engine(tiny, **options) as found:
        yield found


def test_parts_are_those_of_transformers(llm: Any, reference: Any) -> None:
    plain = greedy(llm, [PROMPT], 4)
    llm.collective_rpc("begin_capture")
    assert greedy(llm, [PROMPT], 4) == plain
    (found,) = llm.collective_rpc("captured")
    with torch.no_grad(), hl.capture(reference, [f"role:{part}.1" for part in PARTS]) as cache:
        reference(torch.tensor([PROMPT]))
    for part, numbers in found.items():
        tensor = torch.tensor(numbers)
        expected = cache[part, 1].output[0].transpose(0, 1)  # (tokens, heads, width)
        assert tensor.shape == expected.shape
        assert (tensor - expected).abs().max() <= ROUNDING * expected.abs().max(), part
    assert "q, k, v and z" in llm.collective_rpc("refused")[0]
    assert greedy(llm, [PROMPT], 4) == plain


def test_hooks_by_role_come_and_go(llm: Any) -> None:
    plain = greedy(llm, [PROMPT], 4)
    hooks = VllmHooks(llm)
    added = hooks.add({"target_modules": ["role:z"], "hook_factory": "hookline.factories:activation_stats"})
    assert len(added["matched"]) == 4
    assert greedy(llm, [PROMPT], 4) == plain
    assert hooks.remove(added["id"])["fired"] >= 4 * 4
    assert greedy(llm, [PROMPT], 4) == plain
