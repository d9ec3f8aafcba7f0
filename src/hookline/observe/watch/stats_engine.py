"""Add up the statistics of tensors, by place, and read them as metrics.

`Watch` and its hooks call it with tensors, or with what compiled code has found in them. It chooses the reducer by the
device: `cpu_stats` on the CPU; on a GPU `stat_kernel`, for the many tensors that `pending_tensors` collects;
`graph_stats` on other devices and where there is no Triton.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.distributed.shards import Placed, arrived, placed
from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel, type_name
from hookline.observe.watch.cpu_stats import add, measure
from hookline.observe.watch.graph_stats import add_up, as_columns, as_numbers, summarize
from hookline.observe.watch.pending_tensors import Note, PendingTensors
from hookline.observe.watch.readable_numbers import READ, factor_of, readable
from hookline.observe.watch.stat_columns import MetricTable
from hookline.observe.watch.stat_kernel import FoundByRow, Kernel, KernelInput, is_available, kernel_input
from hookline.observe.watch.stat_rows import AliveUnits, DeviceRows, ExponentBins, StatRow
from hookline.observe.watch.unit_stats import UnitStats
from hookline.sites import _torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.observe.watch.stat_columns import Layout

__all__ = ["StatsEngine", "StatsSnapshot", "WatchedPlace"]

_CPU: Final = torch.device("cpu")
_READ_ON_HOST: Final = ("cpu", "mps")
"""Devices whose tensors are reduced on the CPU; Apple's GPU has no float64 to add up in."""
_AT_ONCE: Final = ("param", "param_grad", "param_grad_local")
"""Kinds that the next step changes in place."""
_BY_UNIT: Final[dict[str, type[AliveUnits | ExponentBins]]] = {kind.name: kind for kind in (AliveUnits, ExponentBins)}
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_PARTIAL: Final = (
    "its DTensor is Partial: each rank has a summand, whose statistics mean nothing. Redistribute it to Replicate() or "
    "Shard(), or watch what comes after the reduction"
)


class WatchedPlace:
    """One place in a model, and one kind of what flows through it."""

    __slots__ = ("at_once", "beside", "deferred", "kind", "name", "placed", "rows", "silent", "unread")

    def __init__(self, name: str, kind: str, beside: tuple[AliveUnits | ExponentBins, ...] = ()) -> None:
        self.name = name
        """Dotted name in the model."""
        self.kind = kind
        """The kind as in ``watch(on=...)``, or nothing for a value of the user's own."""
        self.at_once = kind in _AT_ONCE
        """Whether its tensors have to be reduced at once."""
        self.deferred: PendingTensors | None = None
        """Where its tensors may wait, once it is known that nothing changes them in place."""
        self.rows: dict[torch.device, StatRow] = {}
        self.beside = beside
        """The statistics that are kept per unit."""
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
        if tensor.is_nested:
            tensor = tensor.values()
        if type(tensor) not in _PLAIN:
            tensor = arrived(tensor)
            self.placed = placed(tensor, self.placed)
            if self.placed is not None and self.placed.is_partial and self.kind != "param_grad_local":
                self.silent = _PARTIAL
                return None
        local: Tensor | None = _torch.local_tensor(tensor)
        if local is not None and type(local) not in _PLAIN:
            local = arrived(local)
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


class StatsSnapshot(NamedTuple):
    """The numbers of all places at one moment."""

    places: list[WatchedPlace]
    rows: NDArray[np.float64]
    """One row for each place."""
    beside: dict[WatchedPlace, list[list[float]]]
    """What is kept per unit, for each statistic of ``place.beside``."""


class StatsEngine:
    """Streaming statistics of any number of places."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.places: dict[tuple[str, str], WatchedPlace] = {}
        self.limit: int | None = None
        """How many bytes of tensors on a GPU may wait to be reduced; None for a share of its memory."""
        self.device_rows: dict[torch.device, DeviceRows] = {}
        self._kernels: dict[torch.device, Kernel | None] = {}
        self._pending: dict[torch.device, PendingTensors] = {}
        self._numbers: dict[torch.device, tuple[int, int, NDArray[np.int64], NDArray[np.int64]]] = {}
        self._table: tuple[list[WatchedPlace], MetricTable] | None = None
        self.lock = threading.RLock()
        """Held while rows and places are handed out, and while what is kept per unit changes."""

    @cached_property
    def units(self) -> UnitStats:
        """What is kept per unit."""
        return UnitStats(self.layout, self.lock, self._give_up_kernel)

    def place(self, name: str, kind: str) -> WatchedPlace:
        """Return the place of that name; make it the first time."""
        found = self.places.get((name, kind))
        if found is None:
            beside = tuple([_BY_UNIT[each]() for each in self.layout.by_unit])
            found = self.places.setdefault((name, kind), WatchedPlace(name, kind, beside))
        return found

    def row(self, place: WatchedPlace, device: torch.device) -> StatRow:
        """Return the row of a place on a device; make it the first time."""
        row = place.rows.get(device)
        if row is not None:
            return row
        with self.lock:
            if device not in place.rows:  # another thread may have made it meanwhile
                if device not in self.device_rows:
                    self.device_rows[device] = DeviceRows(self.layout, device)
                place.rows[device] = self.device_rows[device].new_row()
            return place.rows[device]

    # -- taking tensors ----------------------------------------------------------------------------------

    def take(self, place: WatchedPlace, tensor: Tensor, scale: Any = None) -> None:
        """Add the statistics of a tensor; its numbers are divided by ``scale`` first, which may be a tensor."""
        deferred = place.deferred
        if deferred is not None and deferred.note(place, tensor, scale):
            return
        local = place.numbers_in(tensor)
        if local is None:
            place.unread = place.silent or f"{type_name(tensor)} on {tensor.device} has no numbers to look at"
            return
        device = local.device
        if device.type in _READ_ON_HOST:
            measure(local.cpu(), self.layout, self.row(place, _CPU), 1.0 if scale is None else factor_of(scale))
            if place.beside:
                self.units.take_all([Note(place, local, scale)])
        elif place.at_once or self._kernel(device) is None:
            self._take_notes(device, [Note(place, local, scale)])
        else:
            self._pending_on(device).take(place, local, scale)

    def take_all(self, tensors: Iterable[tuple[WatchedPlace, Tensor, Any]]) -> None:
        """Add the statistics of several tensors, each with its place and scale; those on a GPU in one launch.

        One that cannot be read costs neither the run nor the rest.
        """
        notes: dict[torch.device, list[Note]] = {}
        for place, tensor, scale in tensors:
            try:
                local = place.numbers_in(tensor)
                if local is not None and local.device.type not in _READ_ON_HOST:
                    notes.setdefault(local.device, []).append(Note(place, local, scale))
                else:
                    self.take(place, tensor, scale)
            except Exception as error:
                place.give_up(tensor, error)
        for device, some in notes.items():
            self._take_notes(device, some)

    def take_found(self, items: Iterable[tuple[WatchedPlace, list[Tensor], int, Any]]) -> None:
        """Add what compiled code has found, as `find_in` gives it: a vector, the tensor itself, or rows of it."""
        by_row: dict[torch.device, list[tuple[WatchedPlace, FoundByRow]]] = {}
        whole: dict[torch.device, list[Note]] = {}
        for place, found, each, scale in items:
            device = found[0].device
            if each == 1:
                whole.setdefault(device, []).append(Note(place, found[0], scale))
            elif each == 0:
                self.take_vector(place, found[0], scale)
            else:
                parts = FoundByRow(found, each, self.row(place, device), scale)
                by_row.setdefault(device, []).append((place, parts))
        for device, notes in whole.items():
            self._take_notes(device, notes)
        for device, some in by_row.items():
            self._take_rows(device, some)

    def take_vector(self, place: WatchedPlace, vector: Tensor, scale: Any = None) -> None:
        """Add what `summarize` has found; thresholds were then not divided by the scale."""
        row = self.row(place, vector.device)
        layout = self.layout if vector.numel() == len(self.layout.graph_outputs) else self.layout.with_details
        if vector.device.type == "cpu":
            add(as_numbers(vector, layout), row, self.layout, 1.0 if scale is None else factor_of(scale))
            return
        with torch.no_grad():
            row.take(as_columns(vector, layout, scale))

    def prepare(self, notes: Sequence[Note]) -> Callable[[], None] | None:
        """Return a call that reduces these tensors of one GPU as they are then, by launches that are worked out now.

        None if the kernel does not work there. Each place has to come once.
        """
        device = notes[0].tensor.device
        kernel = self._kernel(device)
        if kernel is None:
            return None
        try:
            launch = kernel.prepare([KernelInput(note.tensor, self.row(note.place, device)) for note in notes])
        except Exception as error:
            self._give_up_kernel(device, error)
            return None

        def run() -> None:
            if self._kernels[device] is kernel:
                try:
                    launch()
                    return
                except Exception as error:
                    self._give_up_kernel(device, error)
            self._take_notes(device, notes)

        return run

    def flush(self) -> None:
        """Reduce all tensors that wait: a forward or backward pass is over, or a step."""
        for pending in self._pending.values():
            pending.flush()

    # -- on a GPU ----------------------------------------------------------------------------------------

    def _pending_on(self, device: torch.device) -> PendingTensors:
        found = self._pending.get(device)
        if found is None:
            made = PendingTensors(partial(self._take_notes, device), device, limit=self.limit)
            # In one step: what another thread notes in one that is replaced here would never be asked for.
            found = self._pending.setdefault(device, made)
        return found

    def _take_notes(self, device: torch.device, notes: Sequence[Note]) -> None:
        if self.layout.by_unit:
            self.units.take_all(notes)
        kernel = self._kernel(device)
        if kernel is not None:
            try:
                kernel.take(list(self._inputs(device, notes)))
                return
            except Exception as error:  # no compiler for C, for instance
                self._give_up_kernel(device, error)
        for place, tensor, scale in notes:
            try:
                with torch.no_grad():
                    self.take_vector(place, summarize(tensor, self.layout.with_details), scale)
            except Exception as error:
                place.give_up(tensor, error)

    def _inputs(self, device: torch.device, notes: Sequence[Note]) -> Iterator[KernelInput]:
        """Yield the tensors with their rows, by no call of Python's in the common case."""
        for place, tensor, scale in notes:
            row = place.rows.get(device)
            if row is None:
                row = self.row(place, device)
            # A view with a sign to come is one of complex numbers: every other one in memory, unless there is but one.
            # To ask whether it is one takes as long as all else here together.
            if tensor.dtype not in READ or not tensor.is_contiguous() or tensor.numel() < 2:
                try:
                    tensor = readable(tensor.dequantize() if tensor.is_quantized else tensor)
                except Exception as error:  # it is not the kernel that does not work
                    place.give_up(tensor, error)
                    continue
            yield kernel_input((tensor, row, scale))

    def _take_rows(self, device: torch.device, items: Sequence[tuple[WatchedPlace, FoundByRow]]) -> None:
        kernel = self._kernel(device)
        if kernel is not None:
            try:
                kernel.take_rows([parts for _, parts in items])
                return
            except Exception as error:
                self._give_up_kernel(device, error)
        with torch.no_grad():
            for place, (found, each, _, scale) in items:
                self.take_vector(place, add_up(found, each, self.layout), scale)

    def _kernel(self, device: torch.device) -> Kernel | None:
        if device not in self._kernels:
            self._kernels[device] = Kernel(self.layout, device) if is_available(device) else None
            if device.type == "cuda" and self._kernels[device] is None:
                self._give_up_kernel(device, "Triton is not installed; pip install triton brings it")
        return self._kernels[device]

    def _give_up_kernel(self, device: torch.device, why: Exception | str) -> None:
        self._kernels[device] = self.units.kernels[device] = None
        reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        warnings.warn(
            f"Statistics on {device} are taken by operations of torch, which is several times slower: the Triton "
            f"kernel does not work here ({reason}).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )

    # -- reading, forgetting, saving ---------------------------------------------------------------------

    def read(self) -> dict[WatchedPlace, dict[str, float]]:
        """Return the columns of every place, by one transfer per device."""
        places, rows, _ = self.snapshot()
        names = self.layout.names
        return {place: dict(zip(names, row, strict=True)) for place, row in zip(places, rows.tolist(), strict=True)}

    def snapshot(self) -> StatsSnapshot:
        """Return all numbers as they are now."""
        self.flush()
        places = list(self.places.values())
        rows = np.zeros((len(places), self.layout.width))
        rows[:, len(self.layout.added) :] = -np.inf
        for device, of_device in self.device_rows.items():
            self._add_device(rows, of_device.read(), places, device)
        return StatsSnapshot(places, rows, self.units.read(places) if self.layout.by_unit else {})

    def _add_device(
        self, rows: NDArray[Any], numbers: NDArray[Any], places: list[WatchedPlace], device: torch.device
    ) -> None:
        """Merge the rows of one device into ``rows``."""
        index, numbered = self._row_numbers(places, device, len(numbers))
        found, added = numbers[numbered], len(self.layout.added)
        rows[index, :added] += found[:, :added]
        with np.errstate(invalid="ignore"):
            rows[index, added:] = np.maximum(rows[index, added:], found[:, added:])  # of NaN and a number, NaN

    def _row_numbers(
        self, places: list[WatchedPlace], device: torch.device, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which places have a row on ``device``, and its number there; known while there are no new ones."""
        known = self._numbers.get(device)
        if known is None or known[:2] != (len(places), count):
            given = [(index, place.rows[device].number) for index, place in enumerate(places) if device in place.rows]
            found = np.array(given, dtype=np.int64).reshape(-1, 2)
            known = self._numbers[device] = (len(places), count, found[:, 0], found[:, 1])
        return known[2], known[3]

    def to_metrics(self, snapshot: StatsSnapshot | None = None) -> dict[str, Any]:
        """Return every statistic, by ``"name/kind/statistic"``."""
        places, rows, beside = snapshot or self.snapshot()
        if self._table is None or self._table[0] != places:
            self._table = places, MetricTable(self.layout, [place.prefix for place in places])
        metrics = self._table[1].metrics(rows)
        for place, found in beside.items():
            for one, values in zip(place.beside, found, strict=True):
                if values:
                    metrics[place.prefix + one.name] = one.as_metric(values)
        return metrics

    def reset(self) -> None:
        """Forget all numbers; rows stay where they are."""
        for pending in self._pending.values():
            pending.forget()
        for rows in self.device_rows.values():
            rows.reset()
        for place in self.places.values():
            place.forget_beside()
