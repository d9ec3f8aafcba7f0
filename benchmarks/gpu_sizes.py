"""Rows about an eager watch of larger models on a GPU: three sizes of GPT-2, checkpointed blocks, histograms.

Takes a GPT-2 from ``models``, hands `Row`s to ``rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_statistics import HUNDRED, Training, row, watching
from measure import Row, interleave, trial
from models import SMALL, Shape
from subject import Setting
from torch.utils.checkpoint import checkpoint

__all__ = ["gpu_sizes"]

MEDIUM = Shape("GPT-2 medium", 24, 1024, 16, 50304, 8, 1024)
LARGE = Shape("GPT-2 large", 36, 1280, 20, 50304, 8, 1024)
_WORDS = {
    "watch": "`hl.watch`, forward and backward, every step",
    "watch, histogram": '`hl.watch(stats="histogram")`',
    "hooks by hand that only keep": "hooks by hand that keep each output and its gradient, and do nothing with them",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One size of model, alone on the device, and the targets by way of watching."""

    name: str
    shape: Shape
    targets: dict[str, float | None]
    checkpointed: bool = False


_BY_HAND: dict[str, float | None] = {"hooks by hand that only keep": None}
_CASES = (
    Case("small, batch 8", SMALL, {"watch": 1.12, "watch, histogram": 1.5} | _BY_HAND),
    Case("small, batch 32", replace(SMALL, batch=32), {"watch": 1.06}),
    Case("small, batch 8, checkpointed", SMALL, {"watch": 1.12} | _BY_HAND, checkpointed=True),
    Case("medium, batch 8", MEDIUM, {"watch": 1.12} | _BY_HAND),
    Case("large, batch 8", LARGE, {"watch": 1.10} | _BY_HAND),
)


def gpu_sizes(setting: Setting) -> Iterator[Row]:
    """A watched step of each size, against the bare one."""
    for case in _CASES:
        torch.cuda.empty_cache()
        yield from _measured(setting, case)


def _measured(setting: Setting, case: Case) -> Iterator[Row]:
    training = Training(setting, case.shape.batch, case.shape)
    for block in training.model.h if case.checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "bare again": nullcontext,
        "watch": lambda: watching(training),
        "watch, histogram": lambda: watching(training, stats="histogram"),
        "hooks by hand that only keep": lambda: _keeping(training),
    }
    named = ["bare", "bare again", *case.targets]
    trials = [trial(way, training.step, inner=3, hooked=ways[way], device=setting.device) for way in named]
    samples = interleave(trials, setting.rounds(15 if case.shape.batch <= 8 else 8))
    bare = training.peak(nullcontext)
    modules = 8 * training.shape.layers + 4
    for way, target in case.targets.items():
        found = row(f"{way}, GPT-2 {case.name}, eager step", f"{_WORDS[way]}, {modules} modules", training, samples,
                    way, (training.peak(ways[way]), bare), target)  # fmt: skip
        more = ", activation checkpointing of every block" if case.checkpointed else ""
        yield replace(found, model=found.model + more)


@contextmanager
def _keeping(training: Training) -> Iterator[None]:
    """The least that Python can do at every module, both ways: what a watch takes more is its own."""
    kept: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output)
        if output.requires_grad:
            output.register_hook(kept.append)

    watched = [module for module in training.model.modules() if isinstance(module, HUNDRED)]
    handles = [module.register_forward_hook(keep) for module in watched]
    handles.append(training.model.register_forward_pre_hook(lambda *_: kept.clear()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        kept.clear()  # autograd holds the hook, the hook the list: Python would never find that circle
