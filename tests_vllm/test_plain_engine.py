"""The environment itself: the engine starts, answers as transformers does, and takes an extension class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers_vllm import greedy, running_engine


def test_the_engine_answers_as_transformers_does(tiny: Path, reference: Any) -> None:
    """Greedy tokens equal those of `generate` on the same weights; an extension class reaches the model."""
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [200, 3, 77]]
    expected = [
        reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :]
        for ids in prompts
    ]
    with running_engine(tiny, worker_extension_cls="helpers_vllm.PlainExtension") as llm:
        assert llm.collective_rpc("count_forwards") == [0]
        assert greedy(llm, prompts) == [each.tolist() for each in expected]
        assert llm.collective_rpc("forwards")[0] >= 8
