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

__all__ = ["GradientWindow"]

_CHUNK: Final = 1 << 17
"""Components that are multiplied in float32 before adding up in float64: right to about 1e-7 of the squared lengths."""
_EXACT_CHUNK: Final = 1 << 11
"""Components that are made float64 at a time on a CPU: 50 rows of them are 800 KiB, which stay in the cache (of 62,400
components, 2.9 ms for 50 rows; with four times as many at a time 5.9). A GPU takes ``_CHUNK``."""
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
        return self.size * vector.numel() * vector.element_size() / GIB

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
        rows = like.new_empty(self.size, like.numel())
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
            for rows in self.slices(self.fresh):
                found = self._times(self._rows[rows])  # (filled, fresh)
                self._gram[: self._filled, rows] = found
                self._gram[rows, : self._filled] = found.T
            self.fresh = 0
        return self._gram

    def gram(self) -> NDArray[Any]:
        """The products of the newest vectors, (n, n) in float64 on the host, the newest first."""
        newest = self.places(self.count)
        found: NDArray[Any] = self.products().double().cpu().numpy()[np.ix_(newest, newest)]
        return found

    def times(self, vector: Tensor) -> NDArray[Any]:
        """The product of each of the newest with this one, (n,) in float64 on the host, the newest first."""
        found: NDArray[Any] = self._times(vector.unsqueeze(0))[:, 0].double().cpu().numpy()
        return found[self.places(self.count)]

    def _times(self, others: Tensor) -> Tensor:
        """The products of all rows with k others, (filled, k)."""
        assert self._rows is not None
        rows = self._rows[: self._filled]
        total = rows.new_zeros(self._filled, others.shape[0], dtype=_widest(rows))
        dtype = total.dtype if self.exact else rows.dtype
        size = _EXACT_CHUNK if self.exact and rows.device.type == "cpu" else _CHUNK
        for start in range(0, rows.shape[1], size):
            total += rows[:, start : start + size].to(dtype) @ others[:, start : start + size].to(dtype).T
        return total

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


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
