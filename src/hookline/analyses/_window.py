"""The last n gradients of a run and all products between them: what variance, rank and coherence are made of.

Takes flat vectors from an analysis, hands back their Gram matrix on the host. It is kept up to date: a new vector costs
one pass over the others, where working it out anew costs n of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GIB", "GradientWindow"]

_CHUNK: Final = 1 << 17
"""Components that are multiplied in float32 before adding up in float64: right to about 1e-7 of the squared lengths."""
_IN_CACHE: Final = 1 << 12
"""The same on a CPU: of 66 rows they are 1 MiB, which stays in the cache while it is multiplied. Nine new vectors of
57,152 components take 1.8 ms; all at once, 2.3."""
_EXACT: Final = 100_000
"""Numbers that are made float64 at a time on a CPU, 800 KiB of them: they stay in the cache, and so does the room that
they are put into time and again (for 50 rows of 57,152 components 1.3 ms; into new memory 2.2, all at once 2.7). A GPU
takes ``_CHUNK`` components of every row."""
_KEPT_WIDE: Final = 1 << 26
"""Bytes of a window up to which an exact one keeps float64: a new vector then costs half of what widening all rows for
it does, and the memory is none that anybody misses."""
GIB: Final = 1 << 30


class GradientWindow:
    """A ring of vectors, on their device."""

    def __init__(self, capacity: int, spare: int = 0, *, exact: bool = False) -> None:
        self.exact = exact
        """Whether to multiply in float64. Centred figures are differences of products: of gradients that differ by a
        thousandth, they are a millionth of them, which float32 has an error of a tenth in."""
        self.capacity = capacity
        """How many of the newest vectors are asked about."""
        self.size = capacity + spare
        """How many are kept: with some to spare, products may wait until there are several to work out at once."""
        self.clear()

    def clear(self) -> None:
        """Forget all vectors."""
        self._rows: Tensor | None = None  # (size, P), of which the first `_filled` hold something
        self._gram = torch.zeros(self.size, self.size, dtype=torch.float64)
        self._filled = self._next = 0
        self.fresh = 0
        """How many have come since the products were last worked out."""

    @property
    def count(self) -> int:
        """How many there are to ask about."""
        return min(self._filled, self.capacity)

    def gib(self, vector: Tensor) -> float:
        """How much memory it takes for vectors like this one."""
        bytes_each = _widest(vector).itemsize if self._keeps_wide(vector) else vector.element_size()
        return self.size * vector.numel() * bytes_each / GIB

    def _keeps_wide(self, vector: Tensor) -> bool:
        return self.exact and self.size * vector.numel() * _widest(vector).itemsize <= _KEPT_WIDE

    def add(self, vector: Tensor) -> None:
        """One more; the oldest goes when it is full. One of another size begins anew."""
        if self._rows is not None and self._rows.shape[1] != vector.numel():
            self.clear()
        self._make_room(vector)
        assert self._rows is not None
        self._rows[self._next].copy_(vector)
        self._filled = max(self._filled, self._next + 1)
        self._next = (self._next + 1) % self.size
        self.fresh = min(self.fresh + 1, self.size)

    def _make_room(self, like: Tensor) -> None:
        if self._rows is not None and (self._rows.shape[0] == self.size or self._filled < self._rows.shape[0]):
            return
        dtype = _widest(like) if self._keeps_wide(like) else like.dtype
        rows = like.new_empty(self.size, like.numel(), dtype=dtype)
        if self._rows is None:
            self._gram = like.new_zeros(self.size, self.size, dtype=_widest(like))
        else:  # what a checkpoint brought has no room to spare
            rows[: self._filled].copy_(self._rows[: self._filled])
        self._rows = rows

    def places(self, count: int) -> list[int]:
        """The rows of the newest vectors, the newest first."""
        return [(self._next - age) % self.size for age in range(1, count + 1)]

    def slices(self, count: int) -> list[slice]:
        """Where the newest vectors lie: one stretch of rows, or two."""
        # By slices: an index would have to travel to the device, and the step would wait for it.
        start = self._next - count
        if start >= 0:
            return [slice(start, self._next)]
        return [slice(start % self.size, self.size), slice(0, self._next)]

    def products(self) -> Tensor:
        """All products of two vectors by row, (size, size) on their device; zero where there is none. Nothing waits."""
        if self.fresh and self._rows is not None:
            self._gram = self._gram.to(self._rows.device)
            places = self.slices(self.fresh)
            fresh = self._rows[places[0]] if len(places) == 1 else torch.cat([self._rows[rows] for rows in places])
            # Nobody asks how two compare that are further apart than this.
            reach = self.capacity + self.fresh
            for others in [slice(0, self._filled)] if reach >= self._filled else self.slices(reach):
                found = _products(self._rows[others], fresh, exact=self.exact)  # (others, fresh)
                start = 0
                for rows in places:
                    columns = found[:, start : start + rows.stop - rows.start]
                    self._gram[others, rows] = columns
                    self._gram[rows, others] = columns.T
                    start += rows.stop - rows.start
            self.fresh = 0
        return self._gram

    def gram(self) -> NDArray[Any]:
        """The products of the newest vectors, (n, n) in float64 on the host, the newest first."""
        newest = self.places(self.count)
        found: NDArray[Any] = self.products().double().cpu().numpy()[np.ix_(newest, newest)]
        return found

    def times(self, vector: Tensor) -> NDArray[Any]:
        """The product of each of the newest with this one, (n,) in float64 on the host, the newest first."""
        assert self._rows is not None
        rows = self._rows[: self._filled]
        found: NDArray[Any] = _products(rows, vector.unsqueeze(0), exact=self.exact)[:, 0].double().cpu().numpy()
        return found[self.places(self.count)]

    # -- resuming ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint; the products too, as adding them up in another order rounds differently."""
        if self._rows is None:
            return {}
        rows = self._rows[: self._filled]
        return {"rows": rows, "gram": self._gram, "next": self._next, "fresh": self.fresh}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        if not state or state["gram"].shape[0] != self.size:  # another window was asked for since
            self.clear()
            return
        self._rows, self._gram = state["rows"], state["gram"]
        self._filled, self._next, self.fresh = state["rows"].shape[0], state["next"], state["fresh"]


def _products(rows: Tensor, others: Tensor, *, exact: bool) -> Tensor:
    """Of each row with each of the others, (rows, others)."""
    wider = _widest(rows)
    if rows.dtype == wider:
        return rows @ others.to(wider).T
    if exact:
        return _add_exactly(rows.new_zeros(rows.shape[0], others.shape[0], dtype=wider), rows, others)
    total = rows.new_zeros(others.shape[0], rows.shape[0], dtype=wider)
    size = _IN_CACHE if rows.device.type == "cpu" else _CHUNK
    for start in range(0, rows.shape[1], size):
        total += others[:, start : start + size] @ rows[:, start : start + size].T
    return total.T


def _add_exactly(total: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Multiplied in the dtype of the total."""
    num_rows, length = rows.shape
    size = min(length, _EXACT // num_rows + 1 if rows.device.type == "cpu" else _CHUNK)
    room = total.new_empty(num_rows, size)
    for start in range(0, length, size):
        part = rows[:, start : start + size]
        wider = room[:, : part.shape[1]].copy_(part)
        total.addmm_(wider, others[:, start : start + size].to(total.dtype).T)
    return total


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
