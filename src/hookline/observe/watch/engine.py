"""Add up the statistics of tensors, by place, and read them as metrics.

`Watch` and its hooks call it with tensors, or with what compiled code has found in them. It chooses the reducer by the
device: `reduce` on the CPU; on a GPU a `Kernel`, for the many tensors that `PendingTensors` collects; where there is no
Triton, `reduce_on_device`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel, type_name
from hookline.observe.watch.kernel import READ, Kernel, is_available, readable
from hookline.observe.watch.pending import PendingTensors
from hookline.observe.watch.place import DeviceRows, StatRow, WatchedPlace
from hookline.observe.watch.reduce import factor_of, reduce, reduce_on_device, row_of_parts
from hookline.observe.watch.row import merge_into, metrics_of
from hookline.observe.watch.units import BY_UNIT, read_by_unit, take_by_unit
from hookline.sites import _torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.observe.watch.kernel import KernelInput
    from hookline.observe.watch.place import Note
    from hookline.observe.watch.row import Layout

__all__ = ["StatsEngine", "StatsSnapshot"]

_CPU: Final = torch.device("cpu")
_Taken: TypeAlias = tuple[WatchedPlace, Tensor, Any]
"""The fields of a `Note`: place, tensor, scale."""
_READ_ON_HOST: Final = ("cpu", "mps")
"""Devices whose tensors are reduced on the CPU; Apple's GPU has no float64 to add up in."""


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
        self.lock = threading.RLock()
        """Held while rows and places are handed out, and while what is kept per unit changes."""

    def place(self, name: str, kind: str) -> WatchedPlace:
        """Return the place of that name; make it the first time."""
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
        """Add the statistics of a tensor; its numbers are divided by ``scale`` first, which may be a tensor."""
        local = self._local(place, tensor)
        if local is None:
            return
        if local.device.type in _READ_ON_HOST:
            self._take_on_host(place, local, scale)
        elif place.at_once or self.kernel(local.device) is None:
            self._take_notes(local.device, [(place, local, scale)])
        else:
            self._pending_on(local.device).take(place, local, scale)

    def take_all(self, tensors: Iterable[_Taken]) -> None:
        """Add the statistics of several tensors at once, each with its place and scale; those on a GPU in one launch.

        One that cannot be read costs neither the run nor the rest.
        """
        notes: dict[torch.device, list[_Taken]] = {}
        for place, tensor, scale in tensors:
            try:
                local = self._local(place, tensor)
                if local is None:
                    continue
                if local.device.type in _READ_ON_HOST:
                    self._take_on_host(place, local, scale)
                else:
                    notes.setdefault(local.device, []).append((place, local, scale))
            except Exception as error:
                place.give_up(tensor, error)
        for device, some in notes.items():
            self._take_notes(device, some)

    def take_found(self, items: Iterable[tuple[WatchedPlace, list[Tensor], int, Any]]) -> None:
        """Add what compiled code has found, as `find_in` gives it: the tensor itself, or rows of it."""
        by_row: dict[tuple[torch.device, int], list[tuple[StatRow, list[Tensor], int, Any]]] = {}
        whole: list[_Taken] = []
        for place, found, each, scale in items:
            if each == 1:
                whole.append((place, found[0], scale))
            else:
                device = found[0].device
                by_row.setdefault((device, id(scale)), []).append((self.row(place, device), found, each, scale))
        self.take_all(whole)
        for (device, _), some in by_row.items():
            self._take_rows(device, some)

    def _local(self, place: WatchedPlace, tensor: Tensor) -> Tensor | None:
        """Return the numbers of a tensor; None, and note why, if it has none."""
        local = place.numbers_in(tensor)
        if local is None:
            place.unread = place.silent or f"{type_name(tensor)} on {tensor.device} has no numbers to look at"
        return local

    def _take_on_host(self, place: WatchedPlace, local: Tensor, scale: Any) -> None:
        self.row(place, _CPU).merge(reduce(local.cpu(), self.layout, factor_of(scale)))
        if place.beside:
            self._take_by_unit([(place, local, scale)], None)

    def prepare(self, notes: Sequence[Note]) -> Callable[[], None] | None:
        """Return a call that reduces these tensors of one GPU as they are then, by launches that are worked out now.

        None if the kernel does not work there. Each place has to come once.
        """
        device = notes[0].tensor.device
        kernel = self.kernel(device)
        if kernel is None:
            return None
        launch = kernel.prepare([(note.tensor, self.row(note.place, device), None) for note in notes])

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

    def _take_notes(self, device: torch.device, notes: Sequence[_Taken]) -> None:
        if self.layout.by_unit:
            self._take_by_unit(notes, self.kernel(device))
        kernel = self.kernel(device)
        if kernel is not None:
            try:
                kernel.take(list(self._inputs(device, notes)))
                return
            except Exception as error:  # no compiler for C, for instance
                self._give_up_kernel(device, error)
        for place, tensor, scale in notes:
            try:
                with torch.no_grad():
                    self.row(place, device).merge_tensor(reduce_on_device(tensor, self.layout, scale))
            except Exception as error:
                place.give_up(tensor, error)

    def _inputs(self, device: torch.device, notes: Sequence[_Taken]) -> Iterator[KernelInput]:
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
            yield tensor, row, scale

    def _take_rows(self, device: torch.device, items: Sequence[tuple[StatRow, list[Tensor], int, Any]]) -> None:
        kernel = self.kernel(device)
        if kernel is not None:
            try:
                kernel.add_found(items)
                return
            except Exception as error:
                self._give_up_kernel(device, error)
        with torch.no_grad():
            for row, found, each, scale in items:
                row.merge_tensor(row_of_parts(found, each, self.layout, scale))

    def _take_by_unit(self, notes: Sequence[_Taken], kernel: Kernel | None) -> None:
        with torch.no_grad(), self.lock:
            take_by_unit(notes, kernel, self._give_up_kernel)

    def kernel(self, device: torch.device) -> Kernel | None:
        """Return what reduces tensors on a device; None where torch does, as while a CUDA graph is recorded."""
        if _torch.capturing():
            return None
        if device not in self._kernels:
            self._kernels[device] = Kernel(self.layout, device) if is_available(device) else None
            if device.type == "cuda" and self._kernels[device] is None:
                self._give_up_kernel(device, "Triton is not installed; pip install triton brings it")
        return self._kernels[device]

    def _give_up_kernel(self, device: torch.device, why: Exception | str) -> None:
        self._kernels[device] = None
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
            given = [(index, place.rows[device].number) for index, place in enumerate(places) if device in place.rows]
            index, numbers = np.array(given, dtype=np.int64).reshape(-1, 2).T
            merge_into(rows, index, of_device.read()[numbers], len(self.layout.added))
        return StatsSnapshot(places, rows, read_by_unit(places) if self.layout.by_unit else {})

    def to_metrics(self, snapshot: StatsSnapshot | None = None) -> dict[str, Any]:
        """Return every statistic, by ``"name/kind/statistic"``."""
        places, rows, beside = snapshot or self.snapshot()
        metrics: dict[str, Any] = dict(metrics_of(rows, self.layout, [place.prefix for place in places]))
        for place, found in beside.items():
            for one, values in zip(place.beside, found, strict=True):
                if values:
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
        """Go on from what `state_dict` gave; rows of other statistics than are asked for now are passed over."""
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
