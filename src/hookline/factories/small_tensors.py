"""Small tensors on the CPU, kept until there are enough of them to be worth reducing.

Takes outputs from ``activation_stats``, hands their statistics to a row of the engine. While a model answers, a layer
gives out one token for each request: reducing a thousand numbers takes 23 µs, of which 20 are calls; keeping a copy
takes 5 µs with all that is around it, and 32 copies are reduced as one tensor.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hookline.observe.watch.cpu_stats import add, measure, reduce

if TYPE_CHECKING:
    from hookline.observe.watch.stats_engine import StatsEngine, WatchedPlace

__all__ = ["Small"]

_MOST: Final = 4096
"""Numbers in a tensor that is kept: 16 KiB of float32, half a MiB for a place."""
_COUNT: Final = 32
_CPU: Final = torch.device("cpu")


class Small:
    """The small tensors of one place."""

    __slots__ = ("_kept", "fires")

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque()
        self.fires = 0
        """Firings that the row does not know of, having got several at once."""

    def takes(self, tensor: Tensor) -> bool:
        """Keep a copy of a tensor, if it is a small one."""
        if type(tensor) is not Tensor or tensor.numel() > _MOST or tensor.device != _CPU or not tensor.dim():
            return False
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if not tensor.is_contiguous():
            return False
        self._kept.append(tensor.detach().clone())
        return True

    @property
    def is_full(self) -> bool:
        """Whether it is time to reduce them."""
        return len(self._kept) >= _COUNT

    def reduce(self, engine: StatsEngine, place: WatchedPlace) -> None:
        """Add what is kept to the place's row."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        while True:
            try:
                tensor = self._kept.popleft()  # in one step: another thread may be at it
            except IndexError:
                break
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        row = engine.row(place, _CPU)
        for tensors in by_dtype.values():
            found = reduce(torch.cat([tensor.view(-1) for tensor in tensors]), engine.layout)
            if found.bad:  # in how many firings, is asked for as well
                for tensor in tensors:
                    measure(tensor, engine.layout, row)
                continue
            add(found, row, engine.layout, 1.0)
            self.fires += len(tensors) - 1

    def forget(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()
        self.fires = 0
