"""Models of known cost for the tests of ``profile``, a clock that only they advance, and what a report says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl


class Stopwatch:
    """A clock for `Work` to advance; by itself it ticks a nanosecond per mark, so that no two are the same."""

    name = "stopwatch"

    def __init__(self) -> None:
        self._now = threading.local()

    def advance(self, ms: float) -> None:
        self._now.ns = getattr(self._now, "ns", 0) + round(1e6 * ms)

    def mark(self) -> int:
        self.advance(1e-6)
        return self._now.ns

    def settle(self) -> None:
        pass

    def since(self, began: int) -> Callable[[int], float]:
        return lambda mark: (mark - began) * 1e-9

    def allocated(self) -> int | None:
        return None


STOPWATCH = Stopwatch()


class Spend(torch.autograd.Function):
    """Costs so many milliseconds each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backward_ms = backward_ms
        STOPWATCH.advance(forward_ms)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.saved_tensors  # as most do, so that checkpointing has something to repeat for
        STOPWATCH.advance(ctx.backward_ms)
        return grad + 0, None, None


class Work(nn.Module):
    """Costs so many milliseconds each way."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.costs = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(x, *self.costs)


class Learned(Work):
    """Has no input that takes a gradient, as an embedding has none."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__(forward_ms, backward_ms)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return Spend.apply(self.weight, *self.costs)


class Calls(nn.Module):
    """Calls its children as ``how(self, x)`` says."""

    def __init__(self, how: Callable[[Any, Tensor], Any], **children: nn.Module) -> None:
        super().__init__()
        self.how = how
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def times(prof: hl.observe.Profile) -> dict[str, tuple[float, float, float, float]]:
    """Forward, own of it, backward, own of it, in milliseconds to the microsecond, by name."""
    return {
        row.name: tuple(
            round(ms, 3) for ms in (row.forward_ms, row.forward_own_ms, row.backward_ms, row.backward_own_ms)
        )
        for row in prof.rows
    }


def own(prof: hl.observe.Profile) -> dict[str, tuple[float, float]]:
    """Own forward and backward, by name."""
    return {name: (forward, backward) for name, (_, forward, _, backward) in times(prof).items()}


def calls(prof: hl.observe.Profile) -> dict[str, int]:
    return {row.name: row.calls for row in prof.rows}


def run(model: nn.Module, x: Tensor | None = None) -> None:
    model(torch.ones(3) if x is None else x).sum().backward()


def profiled(model: nn.Module, x: Tensor | None = None, *, steps: int = 1, **options: Any) -> hl.observe.Profile:
    """Measure so many steps of a model."""
    with hl.profile(model, **options) as prof:
        for _ in range(steps):
            run(model, x)
    return prof


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), Work(1, 2), Work(3, 4), nn.Sequential(Work(5, 6)))
