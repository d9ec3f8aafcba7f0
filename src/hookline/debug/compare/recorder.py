"""Collect the records of a trace and write them in batches: fingerprints at once, tensors within a budget of bytes.

The hooks of a trace (`TraceSites`) and the factory for specs call `TraceRecorder`. On the CPU a fingerprint is numbers
at once; on other devices it is a row of a buffer there, which comes to the host when a batch is written.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.compare.fingerprint import (
    DeviceFingerprints,
    FoundNumbers,
    fingerprint_on_cpu,
    sketch_tables,
)
from hookline.debug.compare.key import MeshPlacement
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace_files import RecordBatch, TracePlace, TraceWriter
from hookline.distributed.shards import arrived, placed
from hookline.errors import HooklineWarning
from hookline.factories.export_files import can_store
from hookline.factories.served_batch import measurable
from hookline.messages import caller_stacklevel
from hookline.observe.watch.pending import Streams, streams_of

__all__ = ["TraceMoment", "TraceRecorder"]

_MOST_RECORDS: Final = 4096
"""Records that wait for a batch."""
_MOST_BYTES: Final = 64 << 20
"""Bytes of tensors that wait for a file."""
_LINE_BYTES: Final = 400
"""What a record adds to the files beside its tensor, at most: its share of a line, its place, its key."""
_SECONDS: Final = 5.0
"""How long fingerprints stay on a device where a step or forward ends: fetching them waits for the device."""
_FOR_TENSORS: Final = 0.9
"""The share of the budget that tensors may take, so that fingerprints go on after them."""


class TraceMoment(NamedTuple):
    """When something passed a site."""

    step: int
    call: int
    micro_batch: int = 0
    recompute: bool = False


_Stream: TypeAlias = tuple[torch.device, int]
_Found: TypeAlias = FoundNumbers | tuple[_Stream, int]
"""Numbers, or where they are: a row of the fingerprints on a stream."""


class _PendingRecord(NamedTuple):
    place: int
    moment: TraceMoment
    rows: int | None
    tensor: int | None
    """The number among the tensors that wait."""
    found: _Found


@dataclass(slots=True)
class _Waiting:
    """What the next batch will hold."""

    records: list[_PendingRecord] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0


class TraceRecorder:
    """Takes tensors from hooks of any thread.

    Args:
        writer: Where to.
        budget: How many bytes may be written in all; None for any number.
        wants_tensor: Returns whether the tensors of a site are to be stored, given its name.
        dims_of: Returns what the user has said of the dimensions of a site, given its name and kind.
    """

    def __init__(
        self,
        writer: TraceWriter,
        *,
        budget: int | None = None,
        wants_tensor: Callable[[str], bool] = lambda site: False,
        dims_of: Callable[[str, str], str | None] = lambda site, kind: None,
    ) -> None:
        self._writer = writer
        self._tables = sketch_tables()
        self._budget = budget
        self._wants_tensor, self._dims_of = wants_tensor, dims_of
        self._waiting = _Waiting()
        self._streams: dict[torch.device, Streams] = {}
        self._on_devices: dict[_Stream, DeviceFingerprints] = {}
        self._places: dict[tuple[Any, ...], int] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._told: set[str] = set()
        self._flushed = time.monotonic()
        self.records = 0
        """How many records were taken."""
        self._failure: str | None = None
        """Why nothing more can be written."""
        self.is_spent = False
        """Whether the budget is spent, or the files cannot be written any more."""

    @property
    def bytes(self) -> int:
        """Return how many bytes were written."""
        return self._writer.bytes

    def take(
        self, site: str, kind: str, leaf: str, tensor: Tensor, moment: TraceMoment, rows: RowTable | None = None
    ) -> None:
        """Add one record; whatever goes wrong with it is noted and does not end the run."""
        if os.getpid() != self._process:  # a forked worker has no files of its own
            return
        if self.is_spent:
            self._tell_of_budget(_in_words(site, kind, leaf), moment.step)
            return
        try:
            local = measurable(arrived(tensor) if type(tensor) is not Tensor else tensor)
            if local is None:
                self.tell(f"{_in_words(site, kind, leaf)}: {_unreadable(tensor)} was left out", is_left_out=True)
                return
            with self._lock, torch.no_grad():
                self._add(site, kind, leaf, tensor, local, moment, rows)
        except Exception as error:
            text = f"{_in_words(site, kind, leaf)} was left out: {type(error).__name__}: {error}"
            self.tell(text, is_left_out=True)

    def _add(
        self, site: str, kind: str, leaf: str, tensor: Tensor, local: Tensor, moment: TraceMoment, rows: RowTable | None
    ) -> None:
        place = self._place(site, kind, leaf, tensor, local)
        number = None if rows is None else self._writer.rows_number(rows)
        found = self._fingerprint(local)
        stored = self._store(local) if self._wants_tensor(site) else None
        self._waiting.records.append(_PendingRecord(place, moment, number, stored, found))
        self.records += 1
        if len(self._waiting.records) >= _MOST_RECORDS or self._waiting.bytes >= _MOST_BYTES:
            self.flush()

    def _place(self, site: str, kind: str, leaf: str, tensor: Tensor, local: Tensor) -> int:
        is_laid = tensor is not local and hasattr(tensor, "placements")
        laid: Any = (tensor.placements, tensor.shape) if is_laid else None  # type: ignore[attr-defined]
        key = (site, kind, leaf, local.shape, local.dtype, laid)
        number = self._places.get(key)
        if number is None:
            dtype = str(local.dtype).removeprefix("torch.")
            placements = _mesh_placement(tensor) if is_laid else None
            dims = self._dims_of(site, kind)
            found = TracePlace(site, kind, leaf, tuple(local.shape), dtype, dims, placements)
            number = self._places[key] = self._writer.place_number(found)
        return number

    def _fingerprint(self, local: Tensor) -> _Found:
        # Of the very tensor that came before too: a kernel, or .data, may have written to it without a new version.
        on_cpu = local.device.type == "cpu"
        return fingerprint_on_cpu(local, self._tables) if on_cpu else self._on_device(local)

    def _on_device(self, local: Tensor) -> tuple[_Stream, int]:
        device = local.device
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = streams_of(device)
        stream = device, streams.now()
        there = self._on_devices.get(stream)
        if there is None:
            there = self._on_devices[stream] = DeviceFingerprints(device, self._tables)
        if there.is_full:
            self.flush()
        return stream, there.add(local)

    def _store(self, local: Tensor) -> int | None:
        """Keep a copy of a tensor for the next file; return its number there, None without room."""
        size = local.numel() * local.element_size()
        coming = self._waiting.bytes + len(self._waiting.records) * _LINE_BYTES + size
        if self._budget is not None and self._writer.bytes + coming > self._budget * _FOR_TENSORS:
            self.tell(
                f"The budget of {self._budget:,} bytes has no room for more tensors; from record {self.records} on "
                "there are fingerprints alone. Give a larger budget=, or fewer tensors="
            )
            return None
        if not can_store(local) and not local.is_complex():
            self.tell(f"Tensors of {local.dtype} cannot be stored; they have fingerprints alone")
            return None
        self._waiting.tensors.append(local.detach().clone())
        self._waiting.bytes += size
        return len(self._waiting.tensors) - 1

    def end_part(self) -> None:
        """Write what has come, since a step or forward is over; what is on a device at most every 5 seconds."""
        is_there = any(there.used for there in self._on_devices.values())
        if not is_there or time.monotonic() - self._flushed >= _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what has come since the last time: one transfer from each device."""
        with self._lock:
            self._flushed = time.monotonic()
            waiting = self._waiting
            if waiting.records and not self.is_spent and os.getpid() == self._process:
                try:
                    self._write(waiting)  # after Ctrl-C in it, all waits still
                except Exception as error:
                    self._fail(error)
                else:
                    self.is_spent = self._budget is not None and self._writer.bytes >= self._budget
            self._waiting = _Waiting()
            for there in self._on_devices.values():
                there.forget()

    def _write(self, waiting: _Waiting) -> None:
        on_host = {stream: self._read(stream, there) for stream, there in self._on_devices.items() if there.used}
        count, width = len(waiting.records), len(self._tables.starts)
        numbers, sketches = np.empty((count, 5)), np.empty((count, width), np.float32)
        hashes = np.empty(count, np.uint64)
        with np.errstate(over="ignore"):  # sums of a run that diverges can be too large for a sketch
            for index, record in enumerate(waiting.records):
                found = record.found
                if isinstance(found, FoundNumbers):
                    numbers[index], sketches[index], hashes[index] = found.numbers, found.sketch, found.hash
                else:
                    rows_there, hashes_there = on_host[found[0]]
                    numbers[index], sketches[index] = rows_there[found[1], :5], rows_there[found[1], 5:]
                    hashes[index] = hashes_there[found[1]]
        records = waiting.records
        keys = self._writer.add_tensors(waiting.tensors) if waiting.tensors else []
        self._writer.add_records(
            RecordBatch(
                place=[each.place for each in records],
                step=[each.moment.step for each in records],
                call=[each.moment.call for each in records],
                micro_batch=[each.moment.micro_batch for each in records],
                recompute=[int(each.moment.recompute) for each in records],
                rows=[each.rows for each in records],
                tensor=[None if each.tensor is None else keys[each.tensor] for each in records],
                numbers=numbers,
                sketches=sketches,
                hashes=hashes,
            )
        )

    def _read(self, stream: _Stream, there: DeviceFingerprints) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        with torch.no_grad(), self._streams[stream[0]].on(stream[1]):
            return there.read()

    def _tell_of_budget(self, what: str, step: int) -> None:
        if self._failure is None:
            self.tell(
                f"The budget of {self._budget:,} bytes is spent: nothing is traced any more; all from step {step}, "
                f"{what}, on was left out. Give a larger budget=",
                is_left_out=True,
            )

    def _fail(self, error: Exception) -> None:
        """End the trace, and not the run."""
        self.is_spent = True
        if self._failure is None:
            self._failure = f"The trace ends early, and the rest was left out: it could not be written ({error})."
            self.warn(f"Trace in {self._writer.folder}: {self._failure}")

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
        warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())

    def close(self) -> None:
        """Write the rest, and close the files; may be called again."""
        with self._lock:
            if os.getpid() != self._process:
                return
            self.flush()
            try:
                if self._failure is not None and self._writer.is_open:
                    self._writer.add_note(self._failure, is_left_out=True)
                self._writer.close()
            except OSError as error:
                self._fail(error)


def _in_words(site: str, kind: str, leaf: str) -> str:
    """Return what passes a site as messages name it."""
    return f"{site or '(model)'} {kind}{f' {leaf}' if leaf else ''}"


def _unreadable(tensor: Tensor) -> str:
    """Return what a tensor is that no fingerprint can be made of."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.device.type == "meta":
        return "a tensor without memory, on the meta device,"
    return "a tensor without numbers that can be read"


def _mesh_placement(tensor: Any) -> MeshPlacement | None:
    """Return how a distributed tensor lies on its mesh; None if it is none."""
    where = placed(tensor)
    if where is None:
        return None
    mesh, own = where.mesh, where.mesh.get_coordinate()
    return MeshPlacement(
        placements=tuple(_placement_words(each) for each in where.placements),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        mesh_shape=tuple(mesh.mesh.shape),
        coordinate=tuple(own or ()),
        full_shape=tuple(tensor.shape),
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
