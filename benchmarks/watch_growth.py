"""How the cost of an eager watch grows with modules, width and batch: the subjects of ``before_after.py --only watch``.

Each chapter is one size of GPT-2, alone on the device; ``before_after`` opens one after the other in both versions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_statistics import HUNDRED, Training
from models import SMALL, Shape
from subject import Setting
from torch.utils.checkpoint import checkpoint

import hookline as hl

__all__ = ["CHAPTERS", "Chapter", "open_chapter"]

MEDIUM = Shape("GPT-2 medium", 24, 1024, 16, 50304, 8, 1024)
LARGE = Shape("GPT-2 large", 36, 1280, 20, 50304, 8, 1024)
_WORDS = {
    "watch": "`hl.watch`, forward and backward, every step",
    "norm": '`hl.watch(stats="norm")`',
    "histogram": '`hl.watch(stats="histogram")`',
    "by hand": "hand-written hooks that keep each output and its gradient, and do nothing with them",
}


@dataclass(frozen=True, slots=True)
class Chapter:
    """One size of model, and the targets by way of watching."""

    shape: Shape
    targets: dict[str, float | None]
    checkpointed: bool = False

    @property
    def modules(self) -> int:
        """How many modules are watched."""
        return 8 * self.shape.layers + 4

    def words(self, way: str) -> str:
        """What is measured."""
        return f"{_WORDS[way]}, {self.modules} modules"

    def title(self, way: str, chapter: str) -> str:
        """The name of a row."""
        what = {"watch": "watch", "by hand": "hooks by hand that only keep"}.get(way, f"watch, {way}")
        return f"{what}, GPT-2 {chapter.removesuffix(', histogram')}, eager step"

    def __str__(self) -> str:
        more = ", activation checkpointing of every block" if self.checkpointed else ""
        return f"{self.shape}, bf16 autocast, fused AdamW{more}"


CHAPTERS = {
    "small, batch 8": Chapter(SMALL, {"watch": 1.12, "norm": None, "by hand": None}),
    "small, batch 32": Chapter(replace(SMALL, batch=32), {"watch": 1.06}),
    "small, batch 8, checkpointed": Chapter(SMALL, {"watch": 1.12, "by hand": None}, checkpointed=True),
    "medium, batch 8": Chapter(MEDIUM, {"watch": 1.12, "by hand": None}),
    "large, batch 8": Chapter(LARGE, {"watch": 1.10, "by hand": None}),
    "small, batch 2": Chapter(replace(SMALL, batch=2), {"watch": None}),
    "small, batch 8, histogram": Chapter(SMALL, {"histogram": 1.5}),
}


def open_chapter(
    name: str, setting: Setting
) -> dict[str, tuple[Callable[[], None], Callable[[], AbstractContextManager[object]]]]:
    """What to call and what is on the model meanwhile, by way of watching."""
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    chapter = CHAPTERS[name]
    training = Training(setting, chapter.shape.batch, chapter.shape)
    for block in training.model.h if chapter.checkpointed else ():
        block.forward = _Checkpointed(block.forward)
    ways: dict[str, Any] = dict.fromkeys(("bare", "bare again"), nullcontext)
    for way in chapter.targets:
        ways[way] = lambda way=way: _watching(training, {} if way == "watch" else {"stats": way})
    if "by hand" in ways:
        ways["by hand"] = lambda: _keeping(training)
    return {way: (training.step, on) for way, on in ways.items()}


class _Checkpointed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any) -> Any:
        return checkpoint(self._forward, *args, use_reentrant=False)


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


@contextmanager
def _watching(training: Training, options: dict[str, Any]) -> Iterator[None]:
    watch = hl.watch(training.model, HUNDRED, on=("forward", "backward"), optimizer=training.optimizer, **options)
    try:
        yield
        silent = watch.report()["silent"]
        assert not silent, silent
    finally:
        watch.remove(quiet=True)
