"""Keep small tensors on the CPU until there are enough to reduce them as one; `Streaming` does so for each module."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hookline.observe.watch.reduce import reduce
from hookline.observe.watch.row import BAD

if TYPE_CHECKING:
    from hookline.observe.watch.engine import StatsEngine
    from hookline.observe.watch.place import WatchedPlace

__all__ = ["SmallTensors"]

_SMALL: Final = 4096
"""Numbers in a small tensor: 16 KiB of float32, half a MiB for a module."""
_SMALL_COUNT: Final = 32
"""Small tensors that are reduced as one."""
_CPU: Final = torch.device("cpu")


class SmallTensors:
    """Keep small tensors of one module on the CPU until there are enough to reduce."""

    __slots__ = ("_kept", "fires")

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque()
        self.fires = 0
        """Firings that the row has not counted, as it got several tensors at once."""

    def keep(self, tensor: Tensor) -> bool:
        """Keep a copy of ``tensor``; return False if it is not a small one."""
        if type(tensor) is not Tensor or tensor.numel() > _SMALL or tensor.device != _CPU or not tensor.dim():
            return False
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if not tensor.is_contiguous():
            return False
        self._kept.append(tensor.detach().clone())
        return True

    @property
    def is_full(self) -> bool:
        """Return whether there are enough to reduce."""
        return len(self._kept) >= _SMALL_COUNT

    def reduce(self, engine: StatsEngine, place: WatchedPlace) -> None:
        """Add what is kept to the row of ``place``."""
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
            if found[BAD]:  # the number of firings with bad values counts as well
                for tensor in tensors:
                    row.merge(reduce(tensor, engine.layout))
                continue
            row.merge(found)
            self.fires += len(tensors) - 1

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept.clear()
        self.fires = 0
