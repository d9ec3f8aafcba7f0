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
from hookline.observe.host_values import fetch

__all__ = ["GIB", "GradientWindow", "StepNumbers"]

_IN_CACHE, _AT_ONCE = 1 << 17, 1 << 24
"""Numbers that are multiplied at a time on a CPU, 1 MiB of float64, which stay in the cache; and on other devices."""
_KEPT_WIDE: Final = 1 << 26
"""Bytes up to which an exact window keeps float64."""
GIB: Final = 1 << 30


class GradientWindow:
    """Keep the last vectors in a ring, on their device, and all products between them.

    Args:
        capacity: How many of the newest vectors are read.
        batch: How many new vectors wait until their products are taken, as one product of matrices.
        exact: Multiply in float64. Centred sums are differences of products: of gradients that differ by a thousandth,
            they are a millionth of them, which float32 has an error of a tenth in.
    """

    def __init__(self, capacity: int, batch: int = 1, *, exact: bool = False) -> None:
        self.capacity, self.batch, self.exact = capacity, batch, exact
        self.size = capacity + (batch if batch > 1 else 0)
        """How many are kept: one that waits is compared with as many before it as any other."""
        self.clear()

    def clear(self) -> None:
        """Drop all vectors."""
        self._rows: Tensor | None = None  # (size, P), of which the first `_filled` hold something
        self._gram = torch.zeros(self.size, self.size, dtype=torch.float64)
        self._filled = self._next = self._fresh = 0

    @property
    def count(self) -> int:
        """Return how many vectors can be read."""
        return min(self._filled, self.capacity)

    @property
    def fresh(self) -> slice:
        """Return the rows that were added since the products were last taken."""
        end = self._next or self.size
        return slice(end - self._fresh, end)

    @property
    def is_due(self) -> bool:
        """Return whether products are to be taken before the next vector comes: the fresh rows stay one slice."""
        return self._fresh == self.batch or (self._fresh > 0 and self._next == 0)

    def gib(self, vector: Tensor) -> float:
        """Return how much memory it takes for vectors like this one."""
        return self.size * vector.numel() * self._kept_type(vector).itemsize / GIB

    def _kept_type(self, vector: Tensor) -> torch.dtype:
        """Return the type of the rows: a small exact window keeps float64, which spares widening all for a new one."""
        wider = widest_float(vector.device)
        return wider if self.exact and self.size * vector.numel() * wider.itemsize <= _KEPT_WIDE else vector.dtype

    def add(self, vector: Tensor) -> None:
        """Add ``vector``, and drop the oldest if it is full; drop all if their size is another."""
        if self.is_due:
            self.products()
        if self._rows is None or self._rows.shape[1] != vector.numel():
            self.clear()
            self._rows = vector.new_empty(self.size, vector.numel(), dtype=self._kept_type(vector))
            self._gram = vector.new_zeros(self.size, self.size, dtype=widest_float(vector.device))
        self._rows[self._next].copy_(vector)
        self._filled = max(self._filled, self._next + 1)
        self._next = (self._next + 1) % self.size
        self._fresh += 1

    def places(self, count: int) -> list[int]:
        """Return the rows of the ``count`` newest vectors, the newest first."""
        return [(self._next - age) % self.size for age in range(1, count + 1)]

    def products(self) -> Tensor:
        """Return all products of two vectors by row, (size, size), 0 where there is none; wait for nothing."""
        if self._fresh and self._rows is not None:
            found = _products(self._rows[: self._filled], self._rows[self.fresh], self.exact)  # (all, fresh)
            self._gram[: self._filled, self.fresh] = found
            self._gram[self.fresh, : self._filled] = found.T
            self._fresh = 0
        return self._gram

    def gram(self) -> NDArray[Any]:
        """Return the products of the newest vectors, (n, n) in float64 on the host, the newest first."""
        newest = self.places(self.count)
        found: NDArray[Any] = self.products().double().cpu().numpy()[np.ix_(newest, newest)]
        return found

    def times(self, vector: Tensor) -> NDArray[Any]:
        """Return the product of each of the newest with ``vector``, (n,) in float64 on the host, the newest first."""
        assert self._rows is not None
        products = _products(self._rows[: self._filled], vector.unsqueeze(0), self.exact)[:, 0]
        found: NDArray[Any] = products.double().cpu().numpy()[self.places(self.count)]
        return found

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the products too, as summing them in another order rounds differently."""
        if self._rows is None:
            return {}
        return {"rows": self._rows[: self._filled], "gram": self._gram, "next": self._next, "fresh": self._fresh}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.clear()
        if not state or state["gram"].shape[0] != self.size:  # the window has another size now
            return
        rows = state["rows"]
        self._rows, self._gram = rows.new_empty(self.size, rows.shape[1]), state["gram"]
        self._rows[: len(rows)] = rows
        self._filled, self._next, self._fresh = len(rows), state["next"], state["fresh"]


def _products(rows: Tensor, others: Tensor, exact: bool) -> Tensor:
    """Return the product of each row with each of the others, (rows, others), added up in float64."""
    wider = widest_float(rows.device)
    dtype = wider if exact else rows.dtype
    total = rows.new_zeros(len(rows), len(others), dtype=wider)
    size = max(1, (_IN_CACHE if rows.device.type == "cpu" else _AT_ONCE) // len(rows))
    for start in range(0, rows.shape[1], size):
        total += rows[:, start : start + size].to(dtype) @ others[:, start : start + size].to(dtype).T
    return total


_LOOSE: Final = 64
"""Tensors of one number that are kept before they become one: on a GPU each of them takes 512 bytes."""


class StepNumbers:
    """Keep the numbers of steps where they are: moving one between device and host would wait."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all numbers."""
        self._parts: list[Any] = []  # tensors, numbers, and functions that return one; in order
        self.has_any = False
        """Whether one of them was a number, and not missing."""

    def add(self, number: Any) -> None:
        """Add a tensor of one element, a float, or a function that returns one; None if it is missing."""
        # A copy: a step that is a captured graph writes its loss to the same place every time.
        own = number.detach().reshape(1).clone() if isinstance(number, Tensor) else number
        self._parts.append(np.nan if own is None else own)
        self.has_any = self.has_any or own is not None
        loose = self._parts[-_LOOSE:]
        if len(self._parts) % _LOOSE == 0 and len({_kind(part) for part in loose}) == 1 and isinstance(own, Tensor):
            self._parts[-_LOOSE:] = [torch.cat(loose)]

    def take(self) -> NDArray[Any]:
        """Return all in float64, in order, and drop them; one transfer for each device and type."""
        fetched = iter(fetch(part for part in self._parts if isinstance(part, Tensor)))
        found: list[float] = []
        for part in self._parts:
            found += next(fetched) if isinstance(part, Tensor) else [part() if callable(part) else part]
        self.clear()
        return np.array(found, dtype=np.float64)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        parts = [part() if callable(part) and not isinstance(part, Tensor) else part for part in self._parts]
        return {"parts": parts, "has_any": self.has_any} if parts else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self._parts, self.has_any = list(state.get("parts", ())), bool(state.get("has_any", False))


def _kind(part: Any) -> Any:
    return (part.device, part.dtype) if isinstance(part, Tensor) else type(part)
