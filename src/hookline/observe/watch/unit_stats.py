"""Add tensors to what a watch keeps per unit or bin, beside the rows: dead units and histograms.

`StatsEngine` has one `UnitStats`; the hooks of a watch call it with tensors. On a GPU, histograms are counted by
`exponent_kernel`, of all tensors that have waited together in one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.observe.host_values import fetch
from hookline.observe.watch.exponent_kernel import ExponentInput, ExponentKernel
from hookline.observe.watch.pending_tensors import Note
from hookline.observe.watch.readable_numbers import factor_of, readable
from hookline.observe.watch.stat_kernel import is_available
from hookline.observe.watch.stat_rows import AliveUnits, ExponentBins

if TYPE_CHECKING:
    from hookline.observe.watch.stat_columns import Layout
    from hookline.observe.watch.stats_engine import WatchedPlace

__all__ = ["UnitStats"]


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
