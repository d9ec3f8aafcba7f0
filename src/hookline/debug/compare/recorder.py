"""Collect the records of a trace and write them in batches: fingerprints at once, tensors within a budget of bytes.

The hooks of a trace (`TraceSites`) and the factory for specs call `TraceRecorder`. On the CPU a fingerprint is numbers
at once; on other devices it is a row of a buffer there, which comes to the host when a batch is written.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.compare.fingerprint import GROUPS, DeviceFingerprints, FoundNumbers, fingerprint_on_cpu
from hookline.debug.compare.key import MeshPlacement
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace_files import TracePlace, TraceRecord, TraceWriter
from hookline.distributed.shards import arrived, placed
from hookline.errors import HooklineWarning
from hookline.factories.exporting import can_store
from hookline.factories.served_batch import measurable
from hookline.messages import caller_stacklevel, nearest_names
from hookline.sites.targets import name_matcher

Names: TypeAlias = bool | str | tuple[str, ...] | list[str]
"""Whose tensors are stored: True for all, or names and globs of sites."""
_MOST_RECORDS: Final = 4096
"""Records that wait for a batch."""
_MOST_BYTES: Final = 64 << 20
"""Bytes of tensors that wait for a file."""
_SECONDS: Final = 5.0
"""How long fingerprints stay on a device where a step or forward ends: fetching them waits for the device."""
_FOR_TENSORS: Final = 0.9
"""The share of the budget that tensors may take, so that fingerprints go on after them."""


TraceMoment: TypeAlias = tuple[int, int]
"""When something passed a site: the step, and the number of the call in it."""


class _Place:
    """What many records have in common, by its number in the files; what `PendingTensors` keeps of it."""

    __slots__ = ("deferred", "number", "on", "silent", "words")

    def __init__(self, number: int, words: str) -> None:
        self.number = number
        self.words = words
        """What passes there, for messages."""
        self.on: DeviceFingerprints | None = None
        """Where fingerprints alone are wanted of tensors on a device."""
        self.deferred: Any = None
        self.silent = ""


_Pending: TypeAlias = "tuple[_Place, TraceMoment, int | None, int | None, FoundNumbers | DeviceFingerprints, int]"
"""Place, moment, number of the rows, number among the tensors that wait, and the fingerprint, or the device that has it
in that row. A class of Python's takes longer to make than most of what `TraceRecorder.take` does."""


@dataclass(slots=True)
class _Waiting:
    """What the next batch will hold."""

    records: list[_Pending] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0


class _WantedNames:
    """Says whose tensors are stored, and remembers which names and globs nothing has answered to."""

    def __init__(self, names: Names) -> None:
        self._all = names is True
        patterns = [] if isinstance(names, bool) else [names] if isinstance(names, str) else names
        self.unused = {pattern: name_matcher(pattern) for pattern in patterns}
        self._tests = list(self.unused.values())
        self.known: dict[str, bool] = {}
        """The sites that were seen."""

    def has(self, site: str) -> bool:
        """Return whether the tensors of a site are stored."""
        found = self.known.get(site)
        if found is None:
            found = self.known[site] = self._all or any(test(site) for test in self._tests)
            self.unused = {pattern: test for pattern, test in self.unused.items() if not test(site)}
        return found


class TraceRecorder:
    """Takes tensors from hooks of any thread.

    Args:
        writer: Where to.
        tensors: Whose tensors are stored.
        budget: How many bytes may be written in all; None for any number.
    """

    def __init__(self, writer: TraceWriter, tensors: Names = False, budget: int | None = None) -> None:
        self._writer = writer
        self._wanted = _WantedNames(tensors)
        self._budget = budget
        self._waiting = _Waiting()
        self._last: FoundNumbers | None = None
        """That of the last tensor on the CPU."""
        self._on_devices: dict[torch.device, DeviceFingerprints] = {}
        self._places: dict[tuple[Any, ...], _Place] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._told: set[str] = set()
        self._flushed = time.monotonic()
        self._is_over = False
        """Whether nothing is taken any more: the budget is spent, the files are closed, or the process is a fork."""
        self.records = 0
        """How many records were taken."""

    @property
    def bytes(self) -> int:
        """Return how many bytes were written."""
        return self._writer.bytes

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._writer.bytes >= self._budget

    def take(
        self, site: str, kind: str, leaf: str, tensor: Tensor, moment: TraceMoment, rows: RowTable | None = None
    ) -> None:
        """Add one record; whatever goes wrong with it is noted and does not end the run."""
        if self._is_over:
            self._tell_spent(f"step {moment[0]}, {_in_words(site, kind, leaf)}")
            return
        try:
            with self._lock:
                number = None if rows is None else self._writer.number(rows)
                place = self._places.get((site, kind, leaf, tensor.shape, tensor.dtype, None))
                if place is not None and place.deferred is not None and place.on is not None:
                    on = place.on
                    if on.used < on.capacity and on.pending.note(place, tensor, on.used):
                        self._waiting.records.append((place, moment, number, None, on, on.used))
                        on.used += 1
                        self.records += 1
                        return
                if os.getpid() != self._process:  # a forked worker has no files of its own
                    self._is_over = True
                    return
                local = measurable(arrived(tensor) if type(tensor) is not Tensor else tensor)
                if local is None:
                    what = f"a tensor of {tensor.layout} on {tensor.device} without numbers that can be read"
                    text = f"{_in_words(site, kind, leaf)}: {what} was left out"
                    self.tell(text, is_left_out=True)
                    return
                with torch.no_grad():
                    self._add(self._place(site, kind, leaf, tensor, local), local, moment, number, site)
        except Exception as error:
            text = f"{_in_words(site, kind, leaf)} was left out: {type(error).__name__}: {error}"
            self.tell(text, is_left_out=True)

    def _tell_spent(self, where: str) -> None:
        """Say that the budget is why nothing is taken any more."""
        if self._is_spent and self._writer.is_open and os.getpid() == self._process:
            self.tell(
                f"The budget of {self._budget:,} bytes is spent: nothing is traced any more; all from {where}, on was "
                "left out. Give a larger budget=",
                is_left_out=True,
            )

    def _add(self, place: _Place, local: Tensor, moment: TraceMoment, rows: int | None, site: str) -> None:
        is_stored = self._wanted.has(site)
        row = 0
        found: FoundNumbers | DeviceFingerprints
        if local.device.type == "cpu":
            found = self._last = fingerprint_on_cpu(local, self._last)
        else:
            on = self._on_devices.get(local.device)
            if on is None:
                on = self._on_devices[local.device] = DeviceFingerprints(local.device)
            if on.used == on.capacity:
                self.flush()
            found, row = on, on.add(place, local)
            place.on = None if is_stored else on
        stored = self._store(local) if is_stored else None
        waiting = self._waiting
        waiting.records.append((place, moment, rows, stored, found, row))
        self.records += 1
        if len(waiting.records) >= _MOST_RECORDS or waiting.bytes >= _MOST_BYTES:
            self.flush()

    def _place(self, site: str, kind: str, leaf: str, tensor: Tensor, local: Tensor) -> _Place:
        is_laid = tensor is not local and hasattr(tensor, "placements")
        laid: Any = (tensor.placements, tensor.shape) if is_laid else None  # type: ignore[attr-defined]
        key = (site, kind, leaf, local.shape, local.dtype, laid)
        place = self._places.get(key)
        if place is None:
            dtype = str(local.dtype).removeprefix("torch.")
            placements = _mesh_placement(tensor) if is_laid else None
            number = self._writer.number(TracePlace(site, kind, leaf, tuple(local.shape), dtype, placements))
            place = self._places[key] = _Place(number, _in_words(site, kind, leaf))
        return place

    def _store(self, local: Tensor) -> int | None:
        """Keep a copy of a tensor for the next file; return its number there, None without room."""
        size = local.numel() * local.element_size()
        coming = self._writer.bytes + self._waiting.bytes + size
        if self._budget is not None and coming > self._budget * _FOR_TENSORS:
            self.tell(
                f"The budget of {self._budget:,} bytes has no room for more tensors; from record {self.records} on "
                "there are only fingerprints. Give a larger budget=, or fewer tensors="
            )
            return None
        if not can_store(local) and not local.is_complex():
            self.tell(f"Tensors of {local.dtype} cannot be stored; they have only fingerprints")
            return None
        self._waiting.tensors.append(local.detach().clone())
        self._waiting.bytes += size
        return len(self._waiting.tensors) - 1

    def end_part(self) -> None:
        """Write what has come, since a step or forward is over; what is on a device at most every 5 seconds."""
        self.end_pass()
        is_there = any(there.used for there in self._on_devices.values())
        if not is_there or time.monotonic() - self._flushed >= _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what has come since the last time: one transfer from each device."""
        with self._lock:
            self._flushed = time.monotonic()
            waiting = self._waiting
            if waiting.records and self._writer.is_open and os.getpid() == self._process:
                try:
                    self._writer.add_records(*self._on_host(waiting.records), waiting.tensors)
                except Exception as error:  # not Ctrl-C: after it, all waits still
                    self._fail(error)
            self._waiting = _Waiting()
            self._is_over = self._is_spent or not self._writer.is_open
            for there in self._on_devices.values():
                there.forget()

    def _on_host(self, pending: list[_Pending]) -> tuple[list[TraceRecord], NDArray[np.float64], NDArray[np.uint64]]:
        """Return records, the numbers of their fingerprints and hashes, but for those whose tensors changed first."""
        with torch.no_grad():
            read = {there: there.read() for there in self._on_devices.values() if there.used}
        known = [one for one in pending if isinstance(one[4], FoundNumbers) or self._is_found(one[0], one[4], one[5])]
        numbers, hashes = np.empty((len(known), 5 + GROUPS)), np.empty(len(known), np.uint64)
        for there, (of_rows, hashes_of_rows) in read.items():
            mine = [index for index, one in enumerate(known) if one[4] is there]
            rows = [known[index][5] for index in mine]
            numbers[mine], hashes[mine] = of_rows[rows], hashes_of_rows[rows]
        for index, (*_, found, _) in enumerate(known):
            if isinstance(found, FoundNumbers):
                numbers[index], hashes[index] = (*found.numbers, *found.sketch), found.hash
        return [(place.number, *moment, rows, tensor) for place, moment, rows, tensor, *_ in known], numbers, hashes

    def _is_found(self, place: _Place, on: DeviceFingerprints, row: int) -> bool:
        """Return whether a row on a device has a fingerprint; say once why it has none."""
        if row in on.found:
            return True
        if row in on.errors:
            error = on.errors[row]
            self.tell(f"{place.words} was left out: {type(error).__name__}: {error}", is_left_out=True)
        else:
            text = f"{place.words} was changed in place before it was read, which it was not at first"
            self.tell(f"{text}; such records were left out, and it is read at once from then on")
        return False

    def end_pass(self) -> None:
        """Find the fingerprints of tensors that wait on a device: a forward is over."""
        for there in self._on_devices.values():
            there.end_pass()

    def _fail(self, error: Exception) -> None:
        """End the trace, and not the run; whoever reads it finds that it was not closed."""
        self._is_over = True
        self._writer.close(is_complete=False)
        self.warn(
            f"Trace in {self._writer.folder}: it ends early, and the rest was left out: it could not be written "
            f"({error})."
        )

    def note(self, text: str, *, is_left_out: bool = False) -> None:
        """Write a sentence into the trace; with ``is_left_out`` it is of something that is missing there."""
        with self._lock:
            if self._writer.is_open and os.getpid() == self._process:
                try:
                    self._writer.add_note(text, is_left_out=is_left_out)
                except OSError as error:
                    self._fail(error)

    def tell(self, text: str, *, is_left_out: bool = False) -> None:
        """Say something once, in the trace and as a warning."""
        if text.partition(";")[0] in self._told:
            return
        self._told.add(text.partition(";")[0])
        self.note(text + ".", is_left_out=is_left_out)
        self.warn(f"Trace in {self._writer.folder}: {text}.")

    def warn(self, text: str) -> None:
        """Warn at the line of the user that led here."""
        warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())

    def close(self) -> None:
        """Write the rest, close the files, and warn of names in ``tensors`` that no site had; may be called again."""
        with self._lock:
            if os.getpid() != self._process or not self._writer.is_open:
                return
            self.flush()
            self._is_over = True
            for each in self._wanted.unused if self._wanted.known else ():
                near = ", ".join(repr(name or "(model)") for name in nearest_names(each, [*self._wanted.known]))
                self.warn(f"tensors={each!r}: no site that was traced has such a name, so no tensor is stored for it; "
                          f"nearest: {near}.")  # fmt: skip
            try:
                self._writer.close()
            except OSError as error:
                self._fail(error)


def _in_words(site: str, kind: str, leaf: str) -> str:
    """Return what passes a site as messages name it."""
    return f"{site or '(model)'} {kind}{f' {leaf}' if leaf else ''}"


def _mesh_placement(tensor: Any) -> MeshPlacement | None:
    """Return how a distributed tensor lies on its mesh; None if it is none."""
    where = placed(tensor)
    if where is None:
        return None
    mesh, own = where.mesh, where.mesh.get_coordinate()
    return MeshPlacement(
        placements=tuple(_placement_words(each) for each in where.placements),
        mesh_shape=tuple(mesh.mesh.shape),
        coordinate=tuple(own or ()),
    )


def _placement_words(placement: Any) -> str:
    """Return a placement in the words of the format, the same in all versions of torch; of an unknown one, its own."""
    factor = getattr(placement, "split_factor", None)  # FSDP2 over tensor parallelism; no shard by is_shard()
    if factor is not None:
        return f"StridedShard({placement.dim}, {factor})"
    if placement.is_shard():
        return f"Shard({placement.dim})"
    if placement.is_replicate():
        return "Replicate()"
    return f"Partial({placement.reduce_op})" if type(placement).__name__ == "Partial" else repr(placement)
