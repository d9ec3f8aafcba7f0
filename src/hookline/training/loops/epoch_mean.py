"""The mean of a figure over the steps of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Mean"]


class Mean:
    """Adds the figures of steps up where they are; nothing waits for a device."""

    def __init__(self) -> None:
        self._total: Any = None
        self._count = 0

    @property
    def state(self) -> tuple[Any, int]:
        """The sum so far, and of how many."""
        return self._total, self._count

    @state.setter
    def state(self, state: tuple[Any, int]) -> None:
        self._total, self._count = state

    def add(self, figure: Any) -> None:
        """One more; None does not count."""
        if figure is None:
            return
        if isinstance(figure, Tensor):
            # Half precision would stop growing after a few hundred steps.
            figure = figure.detach().to(torch.promote_types(figure.dtype, torch.float32))
        self._total = figure if self._total is None else self._total + figure
        self._count += 1

    def take(self) -> Any:
        """The mean since the last time, as a tensor if there was one among them; None of nothing."""
        mean = self._total / self._count if self._count else None
        self._total, self._count = None, 0
        return mean
