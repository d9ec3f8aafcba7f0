"""Keep gradients and numbers of single steps on their device until a report asks for them.

Analyses add to a `GradientWindow` or `StepNumbers` at a step, and read both at a report. The Gram matrix of a window is
kept up to date: a new vector costs one pass over the others, where computing it anew costs n of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.analyses._vectors import widest_float

__all__ = ["GIB", "GradientWindow", "StepNumbers"]

_CHUNK: Final = 1 << 17
"""Entries that are multiplied in float32 before adding up in float64: right to about 1e-7 of the squared lengths."""
_IN_CACHE: Final = 1 << 12
"""The same on a CPU: of 66 rows they are 1 MiB, which stays in the cache while it is multiplied. Nine new vectors of
57,152 entries take 1.8 ms; all at once, 2.3."""
_EXACT: Final = 100_000
"""Numbers that are made float64 at a time on a CPU, 800 KiB of them: they stay in the cache, and so does the memory
that is reused for them (for 50 rows of 57,152 entries 1.3 ms; into new memory 2.2, all at once 2.7). A GPU
takes ``_CHUNK`` entries of every row."""
_KEPT_WIDE: Final = 1 << 26
"""Bytes of a window up to which an exact one keeps float64: a new vector then costs half of what widening all rows for
it does, for little memory."""
GIB: Final = 1 << 30


class GradientWindow:
    """Keep the last ``capacity`` vectors in a ring, on their device, and all products between them."""

    def __init__(self, capacity: int, spare: int = 0, *, exact: bool = False) -> None:
        self.exact = exact
        """Whether to multiply in float64. Centred sums are differences of products: of gradients that differ by a
        thousandth, they are a millionth of them, which float32 has an error of a tenth in."""
        self.capacity = capacity
        """How many of the newest vectors are read."""
        self.size = capacity + spare
        """How many are kept: with some to spare, products may wait until several are computed at once."""
        self.clear()

    def clear(self) -> None:
        """Drop all vectors."""
        self._rows: Tensor | None = None  # (size, P), of which the first `_filled` hold something
        self._gram = torch.zeros(self.size, self.size, dtype=torch.float64)
        self._filled = self._next = 0
        self.fresh = 0
        """How many were added since the products were last computed."""

    @property
    def count(self) -> int:
        """Return how many vectors can be read."""
        return min(self._filled, self.capacity)

    def gib(self, vector: Tensor) -> float:
        """Return how much memory it takes for vectors like this one."""
        bytes_each = widest_float(vector.device).itemsize if self._keeps_wide(vector) else vector.element_size()
        return self.size * vector.numel() * bytes_each / GIB

    def _keeps_wide(self, vector: Tensor) -> bool:
        return self.exact and self.size * vector.numel() * widest_float(vector.device).itemsize <= _KEPT_WIDE

    def add(self, vector: Tensor) -> None:
        """Add ``vector``, and drop the oldest if it is full; drop all if their size is another."""
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
        dtype = widest_float(like.device) if self._keeps_wide(like) else like.dtype
        rows = like.new_empty(self.size, like.numel(), dtype=dtype)
        if self._rows is None:
            self._gram = like.new_zeros(self.size, self.size, dtype=widest_float(like.device))
        else:  # what a checkpoint brought has no room to spare
            rows[: self._filled].copy_(self._rows[: self._filled])
        self._rows = rows

    def places(self, count: int) -> list[int]:
        """Return the rows of the ``count`` newest vectors, the newest first."""
        return [(self._next - age) % self.size for age in range(1, count + 1)]

    def slices(self, count: int) -> list[slice]:
        """Return where the ``count`` newest vectors are: one range of rows, or two."""
        # By slices: an index would be copied to the device, and the step would wait for it.
        start = self._next - count
        if start >= 0:
            return [slice(start, self._next)]
        return [slice(start % self.size, self.size), slice(0, self._next)]

    def products(self) -> Tensor:
        """Return all products of two vectors by row, (size, size), 0 where there is none; wait for nothing."""
        if self.fresh and self._rows is not None:
            self._gram = self._gram.to(self._rows.device)
            places = self.slices(self.fresh)
            fresh = self._rows[places[0]] if len(places) == 1 else torch.cat([self._rows[rows] for rows in places])
            # Two vectors that are further apart than this are never compared.
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
        """Return the products of the newest vectors, (n, n) in float64 on the host, the newest first."""
        newest = self.places(self.count)
        found: NDArray[Any] = self.products().double().cpu().numpy()[np.ix_(newest, newest)]
        return found

    def times(self, vector: Tensor) -> NDArray[Any]:
        """Return the product of each of the newest with ``vector``, (n,) in float64 on the host, the newest first."""
        assert self._rows is not None
        rows = self._rows[: self._filled]
        found: NDArray[Any] = _products(rows, vector.unsqueeze(0), exact=self.exact)[:, 0].double().cpu().numpy()
        return found[self.places(self.count)]

    # -- resuming ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the products too, as summing them in another order rounds differently."""
        if self._rows is None:
            return {}
        rows = self._rows[: self._filled]
        return {"rows": rows, "gram": self._gram, "next": self._next, "fresh": self.fresh}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        if not state or state["gram"].shape[0] != self.size:  # the window has another size now
            self.clear()
            return
        self._rows, self._gram = state["rows"], state["gram"]
        self._filled, self._next, self.fresh = state["rows"].shape[0], state["next"], state["fresh"]


def _products(rows: Tensor, others: Tensor, *, exact: bool) -> Tensor:
    """Return the product of each row with each of the others, (rows, others)."""
    wider = widest_float(rows.device)
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
    """Add the products to ``total``, multiplied in its dtype."""
    num_rows, length = rows.shape
    size = min(length, _EXACT // num_rows + 1 if rows.device.type == "cpu" else _CHUNK)
    room = total.new_empty(num_rows, size)
    for start in range(0, length, size):
        part = rows[:, start : start + size]
        wider = room[:, : part.shape[1]].copy_(part)
        total.addmm_(wider, others[:, start : start + size].to(total.dtype).T)
    return total


# -- numbers -------------------------------------------------------------------------------------------------------

_LOOSE: Final = 64
"""Tensors of one number that are kept before they become one: on a GPU each of them takes 512 bytes."""


class StepNumbers:
    """Keep the numbers of steps where they are: moving one between device and host would wait."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all numbers."""
        self._parts: list[Any] = []  # arrays, and numbers since; in order
        self._loose = 0
        self.has_any = False
        """Whether one of them was a number, and not missing."""

    def add(self, number: Any, *, own: bool = False) -> None:
        """Add a tensor of one element, a float, or a function that returns one; None if it is missing.

        ``own`` says that the tensor is a scalar without a graph that is never written to, so that no copy is needed.
        """
        if isinstance(number, Tensor):
            # A copy: a step that is a captured graph writes its loss to the same place every time.
            self._parts.append(number if own else number.detach().reshape(()).clone())
            self._loose += 1
            if self._loose == _LOOSE:
                self._pack()
        else:
            self._parts.append(np.nan if number is None else number)
            self._loose = 0
        self.has_any = self.has_any or number is not None

    def _pack(self) -> None:
        loose = self._parts[-_LOOSE:]
        if len({(part.device, part.dtype) for part in loose}) == 1:
            self._parts[-_LOOSE:] = [torch.stack(loose)]
        self._loose = 0

    def take(self) -> NDArray[Any]:
        """Return all in float64, in order, and drop them; one transfer, unless devices alternate."""
        found: list[Any] = []
        tensors: list[Tensor] = []
        for part in [*self._parts, None]:
            if isinstance(part, Tensor) and (not tensors or _alike(part, tensors[0])):
                tensors.append(part)
                continue
            if tensors:
                found += torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
            tensors = [part] if isinstance(part, Tensor) else []
            if part is not None and not tensors:
                found.append(part() if callable(part) else part)
        self.clear()
        return np.array(found, dtype=np.float64)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        parts = [part() if callable(part) and not isinstance(part, Tensor) else part for part in self._parts]
        return {"parts": parts, "has_any": self.has_any} if parts else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.clear()
        self._parts, self.has_any = list(state.get("parts", ())), bool(state.get("has_any", False))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype
