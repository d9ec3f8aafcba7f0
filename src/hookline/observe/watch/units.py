"""Keep what a watch counts per unit or bin, beside the rows: dead units and histograms.

`StatsEngine` has one `UnitStats`, and calls it with the tensors of each firing. On a GPU, histograms are counted by
`ExponentKernel`, of all tensors that have waited together in one launch. Opt-in, since each reads the tensor once or
twice more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.host_values import fetch, unit_axis
from hookline.observe.watch.kernel import ExponentInput, ExponentKernel, is_available, readable
from hookline.observe.watch.place import Note
from hookline.observe.watch.reduce import factor_of

if TYPE_CHECKING:
    from hookline.observe.watch.place import WatchedPlace
    from hookline.observe.watch.row import Layout

__all__ = ["BY_UNIT", "AliveUnits", "ExponentBins", "UnitStats"]

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


BY_UNIT: Final[dict[str, type[AliveUnits | ExponentBins]]] = {kind.name: kind for kind in (AliveUnits, ExponentBins)}
"""What keeps each statistic."""


class UnitStats:
    """What is kept per unit of any number of places.

    Args:
        layout: Which statistics there are.
        lock: Held while they change.
        give_up: Warns that kernels do not work on a device, and why; takes them out of `kernels`.
    """

    def __init__(
        self, layout: Layout, lock: threading.RLock, give_up: Callable[[torch.device, Exception], None]
    ) -> None:
        self._layout = layout
        self._lock = lock
        self._give_up = give_up
        self.kernels: dict[torch.device, ExponentKernel | None] = {}
        """By device; None where torch does the work."""

    def take_all(self, notes: Iterable[Note]) -> None:
        """Add the tensors of several places; one that cannot be read costs neither the run nor the rest."""
        by_kernel: dict[torch.device, list[Note]] = {}
        for note in notes:
            place, tensor, scale = note
            try:
                for statistic in place.beside:
                    if isinstance(statistic, ExponentBins) and self._kernel(tensor.device) is not None:
                        by_kernel.setdefault(tensor.device, []).append(Note(statistic, tensor, scale))
                    else:
                        self._take_here(statistic, tensor, scale)
            except Exception as error:
                place.give_up(tensor, error)
        for device, some in by_kernel.items():
            self._count(device, some)

    def read(self, places: Iterable[WatchedPlace]) -> dict[WatchedPlace, list[list[float]]]:
        """Return for each place a list for each statistic, empty if there is nothing."""
        found: dict[WatchedPlace, list[list[float]]] = {place: [[] for _ in place.beside] for place in places}
        kept = [(place, at, one.kept) for place in found for at, one in enumerate(place.beside) if one.kept is not None]
        for (place, at, _), values in zip(kept, fetch(tensor.double() for _, _, tensor in kept), strict=True):
            found[place][at] = values
        return found

    def _take_here(self, statistic: AliveUnits | ExponentBins, tensor: Tensor, scale: Any) -> None:
        """Add a tensor by operations of torch."""
        with torch.no_grad(), self._lock:
            statistic.take(tensor.detach() if scale is None else tensor.detach() * factor_of(scale))

    def _count(self, device: torch.device, notes: Sequence[Note]) -> None:
        """Count tensors of one GPU in their bins; where the kernel does not work, by operations of torch."""
        by_type: dict[torch.dtype, list[Note]] = {}
        for note in notes:
            if note.tensor.numel():
                by_type.setdefault(note.tensor.dtype, []).append(note)
        for same in by_type.values():
            kernel = self._kernel(device)
            if kernel is not None:
                try:
                    with self._lock:
                        items = [ExponentInput(readable(x), bins.on(device), scale) for bins, x, scale in same]
                    kernel.count(items)  # of one type, so that all are counted or none
                    continue
                except Exception as error:  # no compiler for C, for instance
                    self._give_up(device, error)
            for bins, x, scale in same:
                self._take_here(bins, x, scale)

    def _kernel(self, device: torch.device) -> ExponentKernel | None:
        if device not in self.kernels:
            self.kernels[device] = ExponentKernel(self._layout, device) if is_available(device) else None
        return self.kernels[device]
