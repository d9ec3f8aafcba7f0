"""Keep what a watch counts per unit or bin, beside the rows: dead units and histograms.

`StatsEngine` calls `take_by_unit` with the tensors of each firing. On a GPU, `Kernel` counts the exponents of all
tensors that have waited together in one launch. Opt-in, since each reads the tensor once or twice more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.host_values import fetch, unit_axis
from hookline.observe.watch.kernel import readable
from hookline.observe.watch.reduce import factor_of

if TYPE_CHECKING:
    from hookline.observe.watch.kernel import Kernel
    from hookline.observe.watch.place import WatchedPlace

__all__ = ["BY_UNIT", "AliveUnits", "ExponentBins", "read_by_unit", "take_by_unit"]

_BINS: Final = 256
_BIAS: Final = 127


class AliveUnits:
    """The units of a place that have been anything but zero; `unit_axis` says what a unit is."""

    name: Final = "dead_fraction"

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def take(self, tensor: Tensor, scale: Any = None) -> None:
        """Mark the units that are not zero in ``tensor``, whatever its scale."""
        dim = unit_axis(tensor, None)
        if dim is None or not tensor.numel():
            return
        others = [index for index in range(tensor.dim()) if index != dim]
        alive = (tensor != 0).any(others) if others else tensor != 0
        if self.kept is not None and self.kept.shape == alive.shape:
            alive = torch.logical_or(self.kept.to(alive.device), alive)
        self.kept = alive

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
        """Return the bins on a device, to be counted in."""
        # Not in inference mode: what is made there could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self.kept is None:
                self.kept = torch.zeros(_BINS, dtype=torch.int64, device=device)
            self.kept = self.kept.to(device)
        return self.kept

    def take(self, tensor: Tensor, scale: Any = None) -> None:
        """Count the exponents of ``tensor``, divided by ``scale``; nothing waits for a device."""
        numbers = tensor.abs() if tensor.is_complex() else tensor
        if scale is not None:
            numbers = numbers * factor_of(scale)
        # The exponent is in the bits: shifting takes a quarter of the time that finding a bin does.
        exponents = (numbers.float().reshape(-1).view(torch.int32) >> 23) & (_BINS - 1)
        if tensor.device.type == "cpu":
            self.on(tensor.device).add_(torch.bincount(exponents, minlength=_BINS))
        else:
            self.on(tensor.device).index_add_(0, exponents, torch.ones_like(exponents, dtype=torch.int64))

    @staticmethod
    def as_metric(values: list[float]) -> Any:
        """Return counts by exponent (``"-3"``: numbers from 1/8 to 1/4), with zeros and nonfinite ones apart."""
        counts = {str(exponent - _BIAS): int(count) for exponent, count in enumerate(values) if count}
        zeros, nonfinite = counts.pop(str(-_BIAS), 0), counts.pop(str(_BINS - 1 - _BIAS), 0)
        return {**({"zero": zeros} if zeros else {}), **counts, **({"nonfinite": nonfinite} if nonfinite else {})}


BY_UNIT: Final[dict[str, type[AliveUnits | ExponentBins]]] = {kind.name: kind for kind in (AliveUnits, ExponentBins)}
"""What keeps each statistic."""


def take_by_unit(
    notes: Iterable[tuple[WatchedPlace, Tensor, Any]],
    kernel: Kernel | None,
    give_up: Callable[[torch.device, Exception], None],
) -> None:
    """Add the tensors of several places; one that cannot be read costs neither the run nor the rest.

    Histograms are counted by the kernel; ``give_up`` warns if it does not work, and torch does the rest.
    """
    counted: dict[torch.dtype, list[tuple[WatchedPlace, ExponentBins, Tensor, Any]]] = {}
    for place, tensor, scale in notes:
        try:
            for statistic in place.beside:
                if kernel is not None and isinstance(statistic, ExponentBins):
                    flat = readable(tensor)
                    counted.setdefault(flat.dtype, []).append((place, statistic, flat, scale))
                else:
                    statistic.take(tensor.detach(), scale)
        except Exception as error:
            place.give_up(tensor, error)
    for same in counted.values():
        if kernel is not None:
            try:
                kernel.count([(flat, bins.on(flat.device), scale) for _, bins, flat, scale in same])
                continue  # of one type, so that all were counted or none
            except Exception as error:  # no compiler for C, for instance
                give_up(same[0][2].device, error)
                kernel = None
        for place, bins, flat, scale in same:
            try:
                bins.take(flat.detach(), scale)
            except Exception as error:
                place.give_up(flat, error)


def read_by_unit(places: Iterable[WatchedPlace]) -> dict[WatchedPlace, list[list[float]]]:
    """Return for each place a list for each statistic, empty if there is nothing."""
    found: dict[WatchedPlace, list[list[float]]] = {place: [[] for _ in place.beside] for place in places}
    kept = [(place, at, one.kept) for place in found for at, one in enumerate(place.beside) if one.kept is not None]
    for (place, at, _), values in zip(kept, fetch(tensor.double() for _, _, tensor in kept), strict=True):
        found[place][at] = values
    return found
