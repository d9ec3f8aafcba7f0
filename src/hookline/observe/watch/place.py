"""Name one place that a watch looks at, find the numbers in a tensor that came by, and keep its rows on their devices.

The engine makes a `WatchedPlace` for each name and kind; the hooks hand tensors over with it. A place has one row on
each device, which reducers and kernels write to. A row never moves, because compiled code and CUDA graphs write to its
address: the memory of `DeviceRows` grows by blocks, and is read in one transfer.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from hookline.distributed.shards import Placed, arrived, placed
from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel
from hookline.observe.watch.row import BAD
from hookline.sites import _torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookline.observe.watch.row import Layout

__all__ = ["DeviceRows", "Note", "StatRow", "WatchedPlace"]

_AT_ONCE: Final = ("param", "param_grad", "param_grad_local")
"""Kinds that the next step changes in place."""
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_PARTIAL: Final = (
    "its DTensor is Partial: each rank has a summand, whose statistics mean nothing. Redistribute it to Replicate() or "
    "Shard(), or watch what comes after the reduction"
)
_ROWS_IN_BLOCK: Final = 256
"""Rows per block: 24 KiB with twelve columns, enough for every module of most models."""
_LOCK: Final = threading.Lock()
"""Held while a row on a CPU changes."""


class WatchedPlace:
    """One place in a model, and one kind of what flows through it."""

    __slots__ = ("at_once", "beside", "deferred", "kind", "name", "placed", "rows", "silent", "unread")

    def __init__(self, name: str, kind: str, beside: tuple[Any, ...] = ()) -> None:
        self.name = name
        """Dotted name in the model."""
        self.kind = kind
        """The kind as in ``watch(on=...)``, or nothing for a value of the user's own."""
        self.at_once = kind in _AT_ONCE
        """Whether its tensors have to be reduced at once."""
        self.deferred: Any = None
        """The `PendingTensors` where its tensors may wait, once it is known that nothing changes them in place."""
        self.rows: dict[torch.device, StatRow] = {}
        self.beside = beside
        """The statistics that are kept per unit, `AliveUnits` and `ExponentBins`."""
        self.placed: Placed | None = None
        """How its tensors lie on a mesh, if they are distributed (DTensor)."""
        self.silent = ""
        """Why something was not measured here, if that is so."""
        self.unread = ""
        """Why the first tensor had no numbers; of no account once another had."""

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics."""
        return "".join(f"{part}/" for part in (self.name, self.kind) if part)

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.prefix.rstrip("/")

    def numbers_in(self, tensor: Tensor) -> Tensor | None:
        """Return the numbers of a tensor, those of this rank, None if it has none; note how it lies on its mesh."""
        tensor = tensor.values() if tensor.is_nested else tensor
        local: Tensor | None = tensor
        if type(tensor) not in _PLAIN:
            tensor = arrived(tensor)
            self.placed = placed(tensor, self.placed)
            if self.placed is not None and self.placed.is_partial and self.kind != "param_grad_local":
                self.silent = _PARTIAL
                return None
            local = _torch.local_tensor(tensor)
            local = local if local is None or type(local) in _PLAIN else arrived(local)
        if local is None or local.device.type == "meta" or _torch.is_wrapped(local):
            return None
        if local.layout is torch.strided:
            return local.dequantize() if local.is_quantized else local
        values: Tensor = (local.coalesce() if local.layout is torch.sparse_coo else local).values()
        return values

    def give_up(self, tensor: Any, error: Exception) -> None:
        """Warn once that the place cannot be measured; the run goes on."""
        if not self.silent:
            self.silent = f"{type(error).__name__}: {error}"
            what = f", {tensor.dtype}, shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""
            warnings.warn(
                f"The statistics of {self.label!r} ({type(tensor).__name__}{what}) could not be taken: "
                f"{self.silent}. The run goes on; exclude= leaves it out.",
                HooklineWarning,
                stacklevel=caller_stacklevel(),
            )

    def empty(self) -> None:
        """Forget its numbers."""
        for row in self.rows.values():
            row.empty()
        self.forget_beside()

    def forget_beside(self) -> None:
        """Forget what is kept per unit."""
        for statistic in self.beside:
            statistic.kept = None


class Note(NamedTuple):
    """A tensor that was seen at a place."""

    place: Any
    """A `WatchedPlace`; for a histogram, its `ExponentBins`."""
    tensor: Tensor
    scale: Any = None
    """Divide its numbers by this."""


class StatRow:
    """The numbers of one place on one device."""

    __slots__ = ("added", "address", "bad_order", "cells", "kept", "number")

    def __init__(self, number: int, values: Tensor, num_added: int, bad_order: dict[int, None]) -> None:
        self.number = number
        """Its position among the rows of the device."""
        self.added = values[:num_added]
        """The columns that are added up."""
        self.kept = values[num_added:]
        """The columns of which the largest number is kept."""
        self.address = values.data_ptr()
        memory: Any = values.numpy() if values.device.type == "cpu" else None
        self.cells = None if memory is None else memoryview(memory).cast("B").cast("d")
        """On a CPU, the columns as plain numbers; 0.07 µs to change one, a tensor takes 3."""
        self.bad_order = bad_order
        """The numbers of the device's rows in the order of their first bad calls; only the CPU knows them."""

    def merge(self, found: Sequence[float]) -> None:
        """Merge the row of one firing into this one, which is on a CPU."""
        cells, num_added = self.cells, self.added.numel()
        assert cells is not None
        with _LOCK:
            for at, value in enumerate(found):
                if at < num_added:
                    cells[at] += value
                elif not value <= cells[at] and cells[at] == cells[at]:  # NaN comes in, and stays
                    cells[at] = value
            if found[BAD]:
                self.bad_order.setdefault(self.number)

    def merge_tensor(self, found: Tensor) -> None:
        """Merge the row of one firing, a tensor on the same device; no transfer, no wait."""
        count = self.added.numel()
        self.added.add_(found[:count])
        torch.maximum(self.kept, found[count:], out=self.kept)

    def empty(self) -> None:
        """Set the row to its initial values."""
        self.added.zero_()
        self.kept.fill_(-torch.inf)
        self.bad_order.pop(self.number, None)


class DeviceRows:
    """The rows of one device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._blocks: list[Tensor] = []
        self._count = 0
        self._bad_order: dict[int, None] = {}
        self._initial = torch.tensor(layout.empty, dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return self._count

    def new_row(self) -> StatRow:
        """Return one more row, empty."""
        block, index = divmod(self._count, _ROWS_IN_BLOCK)
        if block == len(self._blocks):
            # Not in inference mode: what is made there could not be changed outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._blocks.append(self._initial.repeat(_ROWS_IN_BLOCK, 1))
        self._count += 1
        return StatRow(self._count - 1, self._blocks[block][index], len(self._layout.added), self._bad_order)

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

    def copy(self) -> Tensor:
        """Return all rows as they are now, on their device; nothing waits."""
        return torch.cat([self._initial[None][:0], *self._blocks])[: self._count]

    def read(self) -> NDArray[np.float64]:
        """Return all rows on the host, by one transfer."""
        numbers: NDArray[np.float64] = self.copy().cpu().numpy()
        return numbers
