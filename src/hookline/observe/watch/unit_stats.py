"""What is kept of a site beside its row: which units were ever alive, and how large its numbers are.

Both are opt-in, since they look at the tensor once or twice more, and stay on the tensor's device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.host_values import unit_axis

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Bins", "Units", "read_all"]

_BINS: Final = 256
_BIAS: Final = 127


class Units:
    """Which units of a site have been anything but zero.

    Units are the last dimension of (B, F) and (B, T, F), the second of (B, C, H, W).
    """

    name: Final = "dead_fraction"

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def take(self, tensor: Tensor) -> None:
        """Look at one more tensor."""
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
        """The share of units that have never been anything but zero."""
        return 1.0 - sum(values) / len(values)


class Bins:
    """How many numbers there are of each order of magnitude: the histogram of their binary exponents."""

    name: Final = "histogram"

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def take(self, tensor: Tensor) -> None:
        """Look at one more tensor."""
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
        """Counts by exponent (``"-3"``: numbers from 1/8 to 1/4), apart from zeros and what is not finite."""
        counts = {str(exponent - _BIAS): int(count) for exponent, count in enumerate(values) if count}
        zeros, nonfinite = counts.pop(str(-_BIAS), 0), counts.pop(str(_BINS - 1 - _BIAS), 0)
        return {**({"zero": zeros} if zeros else {}), **counts, **({"nonfinite": nonfinite} if nonfinite else {})}


def read_all(kept: Iterable[Tensor]) -> list[list[float]]:
    """Several tensors on the host, in one transfer per device."""
    tensors = list(kept)
    numbers: list[list[float]] = [[] for _ in tensors]
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.cat([tensors[place].double() for place in places]).tolist()
        start = 0
        for place in places:
            end = start + tensors[place].numel()
            numbers[place] = joined[start:end]
            start = end
    return numbers
