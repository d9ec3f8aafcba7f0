"""Add up the statistics of tensors, by place, and read them as metrics.

`Watch`, its hooks (hooks.py, graph.py) and factories/streaming_stats.py, with the probes on top of it, give a
`StatsEngine` tensors, or what compiled code has found in them. `RankStats` (ranks.py) and the step monitor (monitor.py)
read its rows. It chooses the reducer by the device: `reduce` (row.py) on the CPU; on a GPU a `Kernel` (kernel.py), for
the many tensors that `PendingTensors` (pending.py) collects; where there is no Triton, `reduce_on_device` (row.py).

A `WatchedPlace` has one row on each device; dead units and histograms are kept beside it. Rows have the columns of
`Layout`; the head of row.py says who else knows their order. A row must never move, because compiled code writes to its
address. Taking a tensor must not wait for a CUDA device; one on mps is copied to the CPU, which waits. What the kernel
fails at, torch does (`_by_kernel`). `take_all` gives up a place whose tensor cannot be read. `take` and `take_found`
let errors through: watch hooks and statistics of factories catch them, probes let them end the call.

A new statistic per unit is a class like `ExponentBins`, with `name`, `kept` (a tensor or None), `take` and `as_metric`,
and `on(device)` if the kernel counts into it. Then:
- put it into `BY_UNIT` here, and its name into ``_BY_UNIT`` of row.py; into `_MEANINGS` there if it needs words;
- give it a case in `_take_by_unit`, where all but `AliveUnits` goes to the kernel as a count of exponents;
- give it a case in `to_metrics` and `_metrics` of ranks.py, unless its numbers are added up over ranks;
- if its metric is a mapping, tell `_is_histogram` of report/metric_series.py its keys, and report_page.py there its
  name;
- list it for users in the docstring of `watch` (watch.py), docs/factories.md and docs/tour.md;
- test it by `ALL_STATS` of tests/observe/test_observers_inert.py and in tests/distributed/test_rank_statistics.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.distributed.shards import Placed, arrived, placed
from hookline.error_policy import error_text, warn_user
from hookline.messages import type_name
from hookline.observe.host_values import fetch, unit_axis
from hookline.observe.watch.kernel import READ, ExponentInput, Kernel, KernelInput, is_available, readable
from hookline.observe.watch.pending import Note, PendingTensors
from hookline.observe.watch.row import BAD, factor_of, merge_into, metrics_of, reduce, reduce_on_device, row_of_parts
from hookline.sites import _torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.observe.watch.row import Layout

_BINS: Final = 256
"""The exponents of a float32; ``_BINS`` of triton_programs.py is the same."""
_BIAS: Final = 127
"""What a float32 adds to an exponent to store it."""


class AliveUnits:
    """The units of a place that have been anything but zero; `unit_axis` says what a unit is."""

    name: Final = "dead_fraction"
    kept: Tensor | None = None
    """Which units those are; None before the first tensor."""

    def take(self, tensor: Tensor, scale: Any = None) -> None:
        """Mark the units that are not zero in ``tensor``, whatever its scale."""
        dim = unit_axis(tensor)
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
    kept: Tensor | None = None
    """How many numbers there are of each exponent; None before the first tensor."""

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
        """Return counts by exponent (``"-3"``: numbers from 1/8 to 1/4), with zeros and nonfinite ones apart.

        report/metric_series.py knows a histogram by these keys.
        """
        counts = {str(exponent - _BIAS): int(count) for exponent, count in enumerate(values) if count}
        zeros, nonfinite = counts.pop(str(-_BIAS), 0), counts.pop(str(_BINS - 1 - _BIAS), 0)
        return {**({"zero": zeros} if zeros else {}), **counts, **({"nonfinite": nonfinite} if nonfinite else {})}


BY_UNIT: Final[dict[str, type[AliveUnits | ExponentBins]]] = {kind.name: kind for kind in (AliveUnits, ExponentBins)}
"""For each statistic that is kept per unit, the class that keeps it."""


_AT_ONCE: Final = ("param", "param_grad")
"""Kinds that the next step changes in place, so that they cannot wait to be read; names of ``watch(on=…)``, which the
head of hooks.py says where else to find."""
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_PARTIAL: Final = (
    "its DTensor is Partial: each rank has a summand, whose statistics mean nothing. Redistribute it to Replicate() or "
    "Shard(), or watch what comes after the reduction"
)
_ROWS_IN_BLOCK: Final = 256
"""Rows per block: 24 KiB with twelve columns, enough for every module of most models."""
_LOCK: Final = threading.Lock()
"""Held while a row on a CPU changes."""


@dataclass(eq=False, repr=False, slots=True)
class WatchedPlace:
    """One place in a model, and one kind of what flows through it."""

    name: str
    """Dotted name in the model."""
    kind: str
    """The kind as in ``watch(on=...)``; nothing for what factories keep."""
    beside: tuple[Any, ...] = ()
    """The statistics that are kept per unit, `AliveUnits` and `ExponentBins`."""
    deferred: Any = None
    """The `PendingTensors` that may hold its tensors, once it is known that nothing changes them in place."""
    rows: dict[torch.device, StatRow] = field(default_factory=dict)
    placed: Placed | None = None
    """How its tensors lie on a mesh, if they are distributed (DTensor)."""
    silent: str = ""
    """Why something could not be measured here; empty if everything could."""
    unread: str = ""
    """Why a tensor had no numbers; it counts only if no tensor had any."""

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics."""
        return "".join(f"{part}/" for part in (self.name, self.kind) if part)

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.prefix.rstrip("/")

    def numbers_in(self, tensor: Tensor) -> Tensor | None:
        """Return the numbers of a tensor, of a distributed one this rank's part; None if it has none.

        Also note how a distributed tensor lies on its mesh.
        """
        tensor = tensor.values() if tensor.is_nested else tensor
        local: Tensor | None = tensor
        if type(tensor) not in _PLAIN:
            tensor = arrived(tensor)
            self.placed = placed(tensor, self.placed)
            if self.placed is not None and self.placed.is_partial:
                self.silent = _PARTIAL
                return None
            local = _torch.local_tensor(tensor)
            local = local if local is None or type(local) in _PLAIN else arrived(local)
        if local is None or local.device.type == "meta" or _torch.is_wrapped(local):
            return None
        if local.layout is torch.strided:
            return local.dequantize() if local.is_quantized else local
        values: Tensor = (local.coalesce() if local.layout is torch.sparse_coo else local).values()
        return values

    def give_up(self, tensor: Any, error: Exception) -> None:
        """Warn once that the place cannot be measured; the run goes on."""
        if not self.silent:
            self.silent = error_text(error)
            what = f", {tensor.dtype}, shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""
            warn_user(
                f"The statistics of {self.label!r} ({type(tensor).__name__}{what}) could not be taken: "
                f"{self.silent}. The run continues; exclude= leaves it out."
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


class StatRow:
    """The numbers of one place on one device."""

    __slots__ = ("added", "address", "bad_order", "cells", "kept", "number")

    def __init__(self, number: int, values: Tensor, num_added: int, bad_order: dict[int, None]) -> None:
        self.number = number
        """Its position among the rows of the device."""
        self.added = values[:num_added]
        """The columns that are added up."""
        self.kept = values[num_added:]
        """The columns of which the largest number is kept; minima are there with the other sign."""
        self.address = values.data_ptr()
        memory: Any = values.numpy() if values.device.type == "cpu" else None
        self.cells = None if memory is None else memoryview(memory).cast("B").cast("d")
        """On a CPU, the columns as plain numbers; 0.07 µs to change one, a tensor takes 3."""
        self.bad_order = bad_order
        """The numbers of the device's rows in the order of their first bad calls; only the CPU knows them."""

    def merge(self, found: Sequence[float]) -> None:
        """Merge the row of one firing into this one, which is on a CPU."""
        cells, num_added = self.cells, self.added.numel()
        assert cells is not None
        with _LOCK:
            for at, value in enumerate(found):
                if at < num_added:
                    cells[at] += value
                elif not value <= cells[at] and cells[at] == cells[at]:  # a NaN replaces any number, and stays
                    cells[at] = value
            if found[BAD]:
                self.bad_order.setdefault(self.number)

    def merge_tensor(self, found: Tensor) -> None:
        """Merge the row of one firing, a tensor on the same device; no transfer, no wait."""
        count = self.added.numel()
        self.added.add_(found[:count])
        torch.maximum(self.kept, found[count:], out=self.kept)

    def empty(self) -> None:
        """Set the row to its initial values."""
        self.added.zero_()
        self.kept.fill_(-torch.inf)
        self.bad_order.pop(self.number, None)


class DeviceRows:
    """The rows of one device.

    A row never moves, because compiled code and CUDA graphs write to its address: memory grows by blocks.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._blocks: list[Tensor] = []
        self._count = 0
        self._bad_order: dict[int, None] = {}
        self._initial = torch.tensor(layout.empty, dtype=torch.float64, device=device)

    def new_row(self) -> StatRow:
        """Return one more row, empty."""
        block, index = divmod(self._count, _ROWS_IN_BLOCK)
        if block == len(self._blocks):
            # Not in inference mode: what is made there could not be changed outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._blocks.append(self._initial.repeat(_ROWS_IN_BLOCK, 1))
        self._count += 1
        return StatRow(self._count - 1, self._blocks[block][index], len(self._layout.added), self._bad_order)

    def reset(self) -> None:
        """Empty every row."""
        for block in self._blocks:
            block.copy_(self._initial.expand_as(block))
        self._bad_order.clear()

    def take_bad_order(self) -> list[int]:
        """Return the numbers of rows in the order of their first bad calls since the last time; empty on a GPU."""
        found = list(self._bad_order)
        self._bad_order.clear()
        return found

    def copy(self) -> Tensor:
        """Return all rows as they are now, on their device; nothing waits."""
        return torch.cat([self._initial[None][:0], *self._blocks])[: self._count]

    def read(self) -> NDArray[np.float64]:
        """Return all rows on the host, by one transfer."""
        numbers: NDArray[np.float64] = self.copy().cpu().numpy()
        return numbers


# -- the engine ------------------------------------------------------------------------------------------------------

_CPU: Final = torch.device("cpu")
_READ_ON_HOST: Final = ("cpu", "mps")
"""Devices whose tensors are reduced on the CPU; Apple's GPU has no float64 to add up in."""


class StatsSnapshot(NamedTuple):
    """The numbers of all places at one moment."""

    places: list[WatchedPlace]
    rows: NDArray[np.float64]
    """One row for each place."""
    beside: list[tuple[WatchedPlace, AliveUnits | ExponentBins, list[float]]]
    """What is kept per unit: place, statistic and numbers, where anything was taken."""


class StatsEngine:
    """Streaming statistics of any number of places."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.places: dict[tuple[str, str], WatchedPlace] = {}
        self.device_rows: dict[torch.device, DeviceRows] = {}
        self._kernels: dict[torch.device, Kernel | None] = {}
        self._pending: dict[torch.device, PendingTensors] = {}
        self.lock = threading.RLock()
        """Held while a row is made, while what is kept per unit is added up, and by `Watch` and the ready hooks of
        factories while they read numbers. Places are made without it."""

    def place(self, name: str, kind: str) -> WatchedPlace:
        """Return the place of that name and kind; make it the first time."""
        found = self.places.get((name, kind))
        if found is None:
            beside = tuple([BY_UNIT[each]() for each in self.layout.by_unit])
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
        """Add the statistics of a tensor; its numbers are divided by ``scale`` first, which may be a tensor.

        Errors of a tensor that is reduced at once come out here; the caller catches them.
        """
        local = self._take_on_host(place, tensor, scale)
        if local is None:
            return
        device = local.device
        if place.kind in _AT_ONCE or self.kernel(device) is None:
            self._take_notes(device, [(place, local, scale)])
            return
        if device not in self._pending:
            # By setdefault, which no other thread can interrupt: tensors in a `PendingTensors` that was replaced would
            # be lost.
            self._pending.setdefault(device, PendingTensors(partial(self._take_notes, device), device))
        self._pending[device].take(place, local, scale)

    def take_all(self, tensors: Iterable[Note]) -> None:
        """Add the statistics of several tensors at once, each with its place and scale; those on a GPU in one launch.

        One that cannot be read costs neither the run nor the rest.
        """
        notes: dict[torch.device, list[Note]] = {}
        for place, tensor, scale in tensors:
            try:
                local = self._take_on_host(place, tensor, scale)
                if local is not None:
                    notes.setdefault(local.device, []).append((place, local, scale))
            except Exception as error:
                place.give_up(tensor, error)
        for device, some in notes.items():
            self._take_notes(device, some)

    def take_found(self, items: Iterable[tuple[WatchedPlace, list[Tensor], int]], scale: Any) -> None:
        """Add what compiled code has found, as `find_in` of graph.py gives it, divided by ``scale``.

        Each item has a place, the tensors found, and how many numbers each entry of them stands for (1: it is the
        tensor itself, to be read).
        """
        by_row: dict[torch.device, list[tuple[StatRow, list[Tensor], int]]] = {}
        whole: list[Note] = []
        for place, found, each in items:
            if each == 1:
                whole.append((place, found[0], scale))
            else:
                device = found[0].device
                by_row.setdefault(device, []).append((self.row(place, device), found, each))
        self.take_all(whole)
        for device, some in by_row.items():
            if not self._by_kernel(device, partial(Kernel.add_found, items=some, scale=scale)):
                with torch.no_grad():
                    for row, found, each in some:
                        row.merge_tensor(row_of_parts(found, each, self.layout, scale))

    def _take_on_host(self, place: WatchedPlace, tensor: Tensor, scale: Any) -> Tensor | None:
        """Add a tensor that the CPU reduces; return the numbers of any other, None if that is done or it has none."""
        local = place.numbers_in(tensor)
        if local is None:
            place.unread = place.silent or f"{type_name(tensor)} on {tensor.device} has no numbers to look at"
        elif local.device.type in _READ_ON_HOST:
            self.row(place, _CPU).merge(reduce(local.cpu(), self.layout, factor_of(scale)))
            if place.beside:
                self._take_by_unit(local.device, [(place, local, scale)])
            return None
        return local

    def prepare(self, notes: Sequence[Note]) -> Callable[[], None]:
        """Return a call that reduces these tensors of one GPU as they are then; launches are worked out now.

        Each place has to come once, without a scale, and the layout may have no statistics per unit: the launches take
        neither. factories/streaming_stats.py calls it under these conditions.
        """
        device = notes[0][1].device
        kernel = self.kernel(device)
        if kernel is None or any(tensor.dtype not in READ for _, tensor, _ in notes):
            return partial(self._take_notes, device, notes)
        launch = kernel.prepare([(tensor, self.row(place, device), None) for place, tensor, _ in notes])

        def run() -> None:
            if not self._by_kernel(device, lambda _: launch()):
                self._take_notes(device, notes)

        return run

    def flush(self) -> None:
        """Reduce all tensors that wait: a forward or backward pass is over, or a step."""
        for pending in self._pending.values():
            pending.flush()

    # -- on a GPU ----------------------------------------------------------------------------------------

    def _take_notes(self, device: torch.device, notes: Sequence[Note]) -> None:
        if self.layout.by_unit:
            self._take_by_unit(device, notes)
        if self._by_kernel(device, lambda kernel: kernel.take(list(self._inputs(device, notes)))):
            return
        for place, tensor, scale in notes:
            try:
                with torch.no_grad():
                    self.row(place, device).merge_tensor(reduce_on_device(tensor, self.layout, scale))
            except Exception as error:
                place.give_up(tensor, error)

    def _inputs(self, device: torch.device, notes: Sequence[Note]) -> Iterator[KernelInput]:
        """Yield the tensors with their rows; in the common case without a call of a Python function."""
        for place, tensor, scale in notes:
            row = place.rows.get(device) or self.row(place, device)
            # A view that has still to be negated (``is_neg``) is the imaginary part of a conjugate. In memory that is
            # every second number, so it is not contiguous, unless it has fewer than two. To ask ``is_neg`` takes as
            # long as all else here together.
            if tensor.dtype not in READ or not tensor.is_contiguous() or tensor.numel() < 2:
                try:
                    tensor = readable(tensor.dequantize() if tensor.is_quantized else tensor)
                except Exception as error:  # it is not the kernel that does not work
                    place.give_up(tensor, error)
                    continue
            yield tensor, row, scale

    def _take_by_unit(self, device: torch.device, notes: Sequence[Note]) -> None:
        """Add what is kept per unit; a tensor that cannot be read costs neither the run nor the rest."""
        has_kernel = self.kernel(device) is not None
        counted: dict[torch.dtype, list[tuple[Note, ExponentInput]]] = {}
        with torch.no_grad(), self.lock:
            for place, tensor, scale in notes:
                try:
                    for statistic in place.beside:
                        if not has_kernel or isinstance(statistic, AliveUnits):
                            statistic.take(tensor.detach(), scale)
                        else:
                            item = readable(tensor), statistic.on(tensor.device), scale
                            counted.setdefault(item[0].dtype, []).append(((place, tensor, scale), item))
                except Exception as error:
                    place.give_up(tensor, error)
            for same in counted.values():  # of one type, so that all are counted or none
                if not self._by_kernel(device, partial(Kernel.count, items=[item for _, item in same])):
                    self._take_by_unit(device, [note for note, _ in same])

    def _by_kernel(self, device: torch.device, work: Callable[[Kernel], None]) -> bool:
        """Have the kernel of a device do some work; return False if it cannot, and torch has to."""
        kernel = self.kernel(device)
        if kernel is None:
            return False
        try:
            work(kernel)
            return True
        except Exception as error:  # no compiler for C, for instance
            self._give_up_kernel(device, error_text(error))
            return False

    def kernel(self, device: torch.device) -> Kernel | None:
        """Return what reduces tensors on a device; None where torch does, as while a CUDA graph is recorded."""
        if _torch.capturing():
            return None
        if device not in self._kernels:
            self._kernels[device] = Kernel(self.layout, device) if is_available(device) else None
            if device.type == "cuda" and self._kernels[device] is None:
                self._give_up_kernel(device, "Triton is not installed; pip install triton brings it")
        return self._kernels[device]

    def _give_up_kernel(self, device: torch.device, reason: str) -> None:
        self._kernels[device] = None
        warn_user(
            f"Statistics on {device} are taken by operations of torch, which is several times slower: the Triton "
            f"kernel does not work here ({reason})."
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
            given = [(index, place.rows[device].number) for index, place in enumerate(places) if device in place.rows]
            index, numbers = np.array(given, dtype=np.int64).reshape(-1, 2).T
            merge_into(rows, index, of_device.read()[numbers], len(self.layout.added))
        kept = [(place, one) for place in places for one in place.beside if one.kept is not None]
        values = fetch(one.kept.double() for _, one in kept)
        return StatsSnapshot(places, rows, [(*each, found) for each, found in zip(kept, values, strict=True)])

    def to_metrics(self, snapshot: StatsSnapshot | None = None) -> dict[str, Any]:
        """Return every statistic, by ``"name/kind/statistic"``."""
        places, rows, beside = snapshot or self.snapshot()
        metrics: dict[str, Any] = dict(metrics_of(rows, self.layout, [place.prefix for place in places]))
        for place, one, values in beside:
            metrics[place.prefix + one.name] = one.as_metric(values)
        return metrics

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the rows of each place, and what is kept per unit, for a checkpoint."""
        self.flush()
        return [
            {
                "name": place.name,
                "kind": place.kind,
                "rows": {str(device): torch.cat([row.added, row.kept]) for device, row in place.rows.items()},
                "beside": [None if one.kept is None else one.kept.clone() for one in place.beside],
            }
            for place in self.places.values()
        ]

    def load_state_dict(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Go on from what `state_dict` gave; rows with another number of columns (other statistics) are passed over."""
        self.reset()
        for state in saved:
            place = self.place(state["name"], state["kind"])
            for device, values in state["rows"].items():
                row = self.row(place, torch.device(device))
                if values.numel() == self.layout.width:
                    row.merge_tensor(values.to(row.added.device))
            for one, kept in zip(place.beside, state["beside"], strict=False):
                one.kept = kept

    def reset(self) -> None:
        """Forget all numbers; rows stay where they are."""
        for pending in self._pending.values():
            pending.forget()
        for rows in self.device_rows.values():
            rows.reset()
        for place in self.places.values():
            place.forget_beside()
