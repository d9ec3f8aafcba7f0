"""Numbers of single steps, kept where they are until a report asks for all of them.

Takes tensors, floats or functions from an analysis at a step, hands an array to it at a report. A number of the host
stays on the host and one of a device on the device: to put one among the others would be a transfer, which waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Series"]

_LOOSE: Final = 64
"""Tensors of one number that are kept before they become one: on a GPU each of them takes 512 bytes."""


class Series:
    """Adds numbers, tells them all at once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._parts: list[Any] = []  # arrays, and numbers since; in order
        self._loose = 0
        self.has_any = False
        """Whether one of them was a number, and not missing."""

    def add(self, number: Any, *, own: bool = False) -> None:
        """One more: a tensor of one element, a float, or a function that finds it out; None if it is missing.

        ``own`` says that the tensor is a scalar without a graph that nobody writes to, so that it need not be copied.
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
        """All of them in float64, in order; then they are forgotten. One transfer, unless devices take turns."""
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
        """Everything, for a checkpoint."""
        parts = [part() if callable(part) and not isinstance(part, Tensor) else part for part in self._parts]
        return {"parts": parts, "has_any": self.has_any} if parts else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.clear()
        self._parts, self.has_any = list(state.get("parts", ())), bool(state.get("has_any", False))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype
