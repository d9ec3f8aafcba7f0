"""What is measured: a GPT-2 with its input, the empty hooks, and torch's own way to put them on.

Takes shapes from ``models``, hands a `Subject` to the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from models import GPT, SMALL, TINY, Shape, tokens_for
from torch import nn

__all__ = [
    "Setting", "Subject", "by_torch", "empty", "empty_grad", "empty_pre", "is_leaf",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to measure, and how long."""

    device: torch.device
    quick: bool = False

    def rounds(self, full: int) -> int:
        """How many rounds to run."""
        return max(5, full // 10) if self.quick else full

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The GPT-2 shapes for this device."""
        return (TINY, SMALL) if self.device.type == "cuda" else (TINY,)


class Subject:
    """A GPT-2 of some shape with something to feed it."""

    def __init__(self, shape: Shape, setting: Setting) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model = GPT(shape).to(setting.device)
        self.tokens = tokens_for(shape, setting.device)
        self._low = shape is SMALL
        self.inner = 3 if shape is SMALL else 10

    def forward(self, model: nn.Module | None = None) -> None:
        """The whole forward, without gradients."""
        with torch.no_grad(), self._precision():
            (self.model if model is None else model)(self.tokens)

    def step(self, model: nn.Module | None = None) -> None:
        """Forward and backward; gradients are let go of, as an optimizer would."""
        model = self.model if model is None else model
        with self._precision():
            loss = model(self.tokens).float().mean()
        loss.backward()
        model.zero_grad()

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self._low else nullcontext()


def empty_pre(module, args): ...
def empty(module, args, output): ...
def empty_grad(module, grad_input, grad_output): ...


def is_leaf(name: str, module: nn.Module) -> bool:
    """Modules without children; embeddings left out, whose integer inputs make torch warn at each backward."""
    return not any(module.children()) and not isinstance(module, nn.Embedding)


@contextmanager
def by_torch(modules: list[nn.Module], register: str, hook: object) -> Iterator[None]:
    """The same hook on each of the modules through torch's own method."""
    handles = [getattr(module, register)(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
