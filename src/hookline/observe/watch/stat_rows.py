"""Keep the numbers of a watch on their devices: one row per place, and what is counted per unit beside it.

The engine makes rows and reads them all in one transfer; reducers and kernels write to them. A row never moves, because
compiled code and CUDA graphs write to its address: the memory grows by blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.observe.host_values import unit_axis

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.observe.watch.stat_columns import Layout

__all__ = ["AliveUnits", "DeviceRows", "ExponentBins", "StatRow"]

_BLOCK: Final = 256
"""Rows per block: 24 KiB with twelve columns, enough for every module of most models."""


class StatRow:
    """The numbers of one place on one device."""

    __slots__ = ("added", "address", "bad_order", "cells", "kept", "number", "start")

    def __init__(
        self,
        number: int,
        values: Tensor,
        num_added: int,
        cells: memoryview[float] | None,
        start: int,
        bad_order: dict[int, None],
    ) -> None:
        self.number = number
        """Its position among the rows of the device."""
        self.added = values[:num_added]
        """The columns that are added up."""
        self.address = values.data_ptr()
        self.kept = values[num_added:]
        """The columns of which the largest number is kept."""
        self.cells = cells
        """On a CPU, the memory of its block as plain numbers; 0.07 µs to change one, a tensor takes 3."""
        self.start = start
        """The position of its first column in ``cells``."""
        self.bad_order = bad_order
        """The numbers of the device's rows in the order of their first bad calls; only the CPU knows them."""

    def take(self, values: Tensor) -> None:
        """Add the numbers of one firing, as a tensor on the device of the row; no transfer, no wait."""
        count = self.added.numel()
        self.added.add_(values[:count])
        torch.maximum(self.kept, values[count:], out=self.kept)

    def empty(self) -> None:
        """Set the row to its initial values."""
        self.added.zero_()
        self.kept.fill_(-torch.inf)
        self.bad_order.pop(self.number, None)


class DeviceRows:
    """The rows of one device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._on_cpu = device.type == "cpu"
        self._blocks: list[Tensor] = []
        self._cells: list[memoryview[float] | None] = []
        self._count = 0
        self._bad_order: dict[int, None] = {}
        self._initial = torch.tensor(
            [0.0] * len(layout.added) + [-torch.inf] * len(layout.kept), dtype=torch.float64, device=device
        )

    def __len__(self) -> int:
        return self._count

    def new_row(self) -> StatRow:
        """Return one more row, empty."""
        block, index = divmod(self._count, _BLOCK)
        if block == len(self._blocks):
            self._add_block()
        self._count += 1
        values, num_added = self._blocks[block][index], len(self._layout.added)
        start = index * self._layout.width
        return StatRow(self._count - 1, values, num_added, self._cells[block], start, self._bad_order)

    def reset(self) -> None:
        """Empty every row."""
        for block in self._blocks:
            block.copy_(self._initial.expand_as(block))
        self._bad_order.clear()

    def take_bad_order(self) -> list[int]:
        """Return the numbers of rows in the order of their first bad calls since the last time; empty on a GPU."""
        found = list(self._bad_order)
        self._bad_order.clear()
        return found

    def read(self) -> NDArray[np.float64]:
        """Return all rows on the host, by one transfer."""
        if not self._blocks:
            return np.zeros((0, self._layout.width))
        rows = self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks)
        numbers: NDArray[np.float64] = rows[: self._count].to("cpu", copy=True).numpy()
        return numbers

    def copy(self) -> Tensor:
        """Return the columns of all rows that are added up, as they are now, on their device; nothing waits."""
        width = len(self._layout.added)
        parts = [block[:, :width] for block in self._blocks]
        rows = torch.cat(parts) if len(parts) > 1 else parts[0].clone() if parts else self._initial[None, :width][:0]
        return rows[: self._count]

    def _add_block(self) -> None:
        # Not in inference mode: what is made there could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            block = self._initial.expand(_BLOCK, -1).clone(memory_format=torch.contiguous_format)
        self._blocks.append(block)
        memory: Any = block.numpy() if self._on_cpu else None
        self._cells.append(memoryview(memory).cast("B").cast("d") if self._on_cpu else None)


# -- per unit or bin: opt-in, since each reads the tensor once or twice more ----------------------------------

_BINS: Final = 256
_BIAS: Final = 127


class AliveUnits:
    """The units of a place that have been anything but zero; `unit_axis` says what a unit is."""

    name: Final = "dead_fraction"

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def take(self, tensor: Tensor) -> None:
        """Mark the units that are not zero in ``tensor``."""
        dim = unit_axis(tensor, None)
        if dim is None or not tensor.numel():
            return
        others = [index for index in range(tensor.dim()) if index != dim]
        alive = (tensor != 0).any(others) if others else tensor != 0
        before = self.kept
        same = before is not None and before.shape == alive.shape and before.device == alive.device
        self.kept = torch.logical_or(before, alive) if same and before is not None else alive

    @staticmethod
    def as_metric(values: list[float]) -> Any:
        """Return the share of units that have never been anything but zero."""
        return 1.0 - sum(values) / len(values)


class ExponentBins:
    """The histogram of the binary exponents of numbers: how many there are of each order of magnitude."""

    name: Final = "histogram"

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the bins on a device, where a kernel counts."""
        if self.kept is None or self.kept.device != device:
            # Not in inference mode: what is made there could not be changed outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self.kept = torch.zeros(_BINS, dtype=torch.int64, device=device)
        return self.kept

    def take(self, tensor: Tensor) -> None:
        """Count the exponents of ``tensor``."""
        if not tensor.numel():
            return
        numbers = tensor.abs() if tensor.is_complex() else tensor
        # The exponent is in the bits: shifting takes a quarter of the time that finding a bin does.
        exponents = (numbers.float().reshape(-1).view(torch.int32) >> 23) & (_BINS - 1)
        found = torch.bincount(exponents, minlength=_BINS)
        same = self.kept is not None and self.kept.device == found.device
        self.kept = self.kept + found if same and self.kept is not None else found

    @staticmethod
    def as_metric(values: list[float]) -> Any:
        """Return counts by exponent (``"-3"``: numbers from 1/8 to 1/4), with zeros and nonfinite ones apart."""
        counts = {str(exponent - _BIAS): int(count) for exponent, count in enumerate(values) if count}
        zeros, nonfinite = counts.pop(str(-_BIAS), 0), counts.pop(str(_BINS - 1 - _BIAS), 0)
        return {**({"zero": zeros} if zeros else {}), **counts, **({"nonfinite": nonfinite} if nonfinite else {})}
