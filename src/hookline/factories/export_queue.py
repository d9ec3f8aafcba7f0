"""Write exported tensors behind the forward: a queue of limited bytes, and a thread that empties it.

``export`` reserves room and puts tensors in the middle of a forward; the thread gives them to ``export_files``. The
forward never waits: not for the disk, not for the device. The thread copies tensors from a GPU to the host, some at a
time, when the forward has got so far.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.factories.export_files import Shards, pieces_of
from hookline.observe.tokens import Tokens, sent_to_host

if TYPE_CHECKING:
    from pathlib import Path

    from hookline.factories.export_files import WrittenSoFar

__all__ = ["QUEUE_BYTES", "ExportItem", "ExportQueue"]

logger = logging.getLogger("hookline.factories.export")

_LOOK: Final = 0.25
"""Seconds between two checks whether a shard has been open for too long."""
_NAP: Final = 0.03
"""Seconds that the thread waits for more outputs, unless a quarter of the queue is full: a thread that wakes up, or
returns from the disk, takes the interpreter from the forward. With one that did so for each output, the export of one
layer made a decoding forward on an H200 take 9 % longer."""
QUEUE_BYTES: Final = 256 << 20
"""Bytes that may wait to be written; what does not fit is dropped and counted."""
_FLUSH_SECONDS: Final = 5.0
"""After how long a smaller shard is completed."""
_TOGETHER: Final = 16 << 20
"""Bytes that are copied to the host together, in pinned memory."""


@dataclass(slots=True)
class ExportItem:
    """One output in the queue."""

    module: str
    call: int
    tensor: Tensor
    bytes: int
    rows: Tokens | None
    wants_last: bool
    """Whether the last token of each request is wanted alone."""
    is_last: bool = False
    """Whether the tensor has that alone."""
    ready: Any = None
    """On a GPU, the event after which the copy of the tensor is complete."""


@dataclass(slots=True)
class _ExportCounts:
    accepted_bytes: int = 0
    queued_bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    errors: int = 0
    seconds: float = 0.0
    """How long the thread has worked."""


class ExportQueue:
    """The queue of one hook; its thread starts with the first tensor.

    Args:
        folder: Where to.
        max_bytes: How much may be written in all.
        queue_bytes: How much may wait to be written.
        earlier: What an export that is continued has left.
    """

    def __init__(self, folder: Path, max_bytes: int | None, queue_bytes: int, earlier: WrittenSoFar | None) -> None:
        self._folder = folder
        self._earlier = earlier
        self._max_bytes, self._queue_bytes = max_bytes, queue_bytes
        self._items: queue.SimpleQueue[ExportItem | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        """Set when the thread should not wait for more."""
        self._counts = _ExportCounts(accepted_bytes=0 if earlier is None else earlier.bytes)
        self._lock = threading.Lock()
        """Held for counting alone, never while something is written."""
        self._written = threading.Condition(self._lock)
        """Notified when what waited has been written, or dropped."""
        self.is_full = False
        """Whether ``max_bytes`` has ended it."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._shards: Shards | None = None
        self._since = 0.0
        self._host_copies = _HostCopies()
        self._unsure: list[int] = []
        """The bytes of outputs that are not, or not wholly, in complete shards."""
        self._failed = False
        self.stopped = ""
        """Why nothing more is taken, if that is so."""

    def is_ours(self) -> bool:
        """Return whether this process has made it: a forked one has no thread, and its locks may stay locked."""
        return os.getpid() == self._process

    # -- in the forward ----------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes; return False, and count what is dropped, if there is no room."""
        counts, most = self._counts, self._max_bytes
        with self._lock:
            if self.stopped or counts.queued_bytes + size > self._queue_bytes:
                counts.dropped += 1
                counts.dropped_bytes += size
                return False
            if most is None or counts.accepted_bytes + size <= most:
                counts.accepted_bytes += size
                counts.queued_bytes += size
                return True
            counts.dropped += 1
            counts.dropped_bytes += size
            self.stopped = f"more than max_bytes ({most}) is asked for"
            self.is_full = True
        logger.warning("Export stops: %s; %d bytes were taken", self.stopped, counts.accepted_bytes)
        return False

    def put(self, item: ExportItem) -> None:
        """Queue a tensor, for which `reserve` has returned True, to be written."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="hookline-export", daemon=True)
                    self._thread.start()
        self._items.put(item)
        if self._counts.queued_bytes * 4 > self._queue_bytes:
            self._hurry.set()

    # -- in the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        is_over = False
        while not is_over:
            items, is_over = self._gathered()
            for some in _parts(items):
                self._write(some)
            self._flush_if_old()
        self._finish()

    def _gathered(self) -> tuple[list[ExportItem], bool]:
        """Return the waiting items, after a short wait for more, and whether they are the last."""
        try:
            found = [self._items.get(timeout=_LOOK)]
        except queue.Empty:
            return [], False
        if found[0] is not None:
            self._hurry.wait(_NAP)
        self._hurry.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._items.get_nowait())
        return [item for item in found if item is not None], None in found

    def _write(self, items: list[ExportItem]) -> None:
        begin, done = time.perf_counter(), 0
        try:
            if not self._failed:
                self._host_copies.bring(items)
                for item in items:
                    self._unsure.append(item.bytes)
                    done += 1
                    self._write_pieces(item)
        except Exception as error:  # a full disk, say: the run goes on without the export
            self._fail(error)
        if self._failed:
            self._drop([item.bytes for item in items[done:]])
        with self._lock:
            self._counts.queued_bytes -= sum(item.bytes for item in items)
            self._counts.seconds += time.perf_counter() - begin
            self._written.notify_all()

    def _drop(self, sizes: list[int]) -> None:
        with self._lock:
            self._counts.dropped += len(sizes)
            self._counts.dropped_bytes += sum(sizes)

    def _write_pieces(self, item: ExportItem) -> None:
        shards = self._opened()
        complete = shards.count
        with torch.inference_mode(False), torch.no_grad():
            for piece in pieces_of(item, item.tensor):
                if self._earlier is not None and self._earlier.has(piece.line):
                    continue
                if not shards.is_open:
                    self._since = time.monotonic()
                shards.add(piece.key, piece.tensor, piece.line)
        if shards.count > complete:  # a part of this one may be in the next
            self._unsure = [item.bytes] if shards.is_open else []

    def _opened(self) -> Shards:
        if self._shards is None:
            self._shards = Shards(self._folder)
        return self._shards

    def _flush_if_old(self) -> None:
        shards = self._shards
        if (
            shards is not None
            and shards.is_open
            and not self._failed
            and time.monotonic() - self._since > _FLUSH_SECONDS
        ):
            try:
                shards.complete()
                self._unsure = []
            except OSError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self.stopped = f"{type(error).__name__}: {error}"
        self._counts.errors += 1
        logger.error("Export stops, and the run goes on: %s", self.stopped)
        if self._shards is not None:
            self._shards.abandon()
        self._drop(self._unsure)
        self._unsure = []

    def _finish(self) -> None:
        if self._shards is not None and not self._failed:
            try:
                self._shards.close()
            except OSError as error:
                self._fail(error)

    # -- from outside ------------------------------------------------------------------------------------

    def wait_until_written(self) -> None:
        """Wait until nothing waits to be written."""
        self._hurry.set()
        with self._written:
            self._written.wait_for(lambda: not self._counts.queued_bytes)

    def close(self, timeout: float = 60.0) -> None:
        """Write all that was taken, and take no more; may be called again."""
        if not self.is_ours():
            return
        with self._lock:
            self.stopped = self.stopped or "it was closed"
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._items.put(None)
            self._hurry.set()
            thread.join(timeout)
            if thread.is_alive():
                waiting = int(self.to_metrics()["queued_bytes"])
                logger.error("Export is not through after %g s; %d bytes still wait to be written", timeout, waiting)

    def to_metrics(self) -> dict[str, float]:
        """Return the counts so far."""
        with self._lock:
            counts, shards = self._counts, self._shards
            written = 0 if shards is None else shards.bytes
            speed = written / counts.seconds if counts.seconds else 0.0
            return {
                "written_bytes": float(written),
                "written_tensors": float(0 if shards is None else shards.tensors),
                "queued_bytes": float(counts.queued_bytes),
                "dropped": float(counts.dropped),
                "dropped_bytes": float(counts.dropped_bytes),
                "shards": float(0 if shards is None else shards.count),
                "bytes_per_second": speed,
                "errors": float(counts.errors),
                "stopped": float(bool(self.stopped)),
            }


def _parts(items: list[ExportItem]) -> Iterator[list[ExportItem]]:
    """Yield groups of items that are copied together."""
    some: list[ExportItem] = []
    for item in items:
        if some and sum(each.bytes for each in some) + item.bytes > _TOGETHER:
            yield some
            some = []
        some.append(item)
    if some:
        yield some


class _HostCopies:
    """Copy tensors to the host on a stream of its own, from any number of GPUs; only the writing thread waits."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def bring(self, items: Sequence[ExportItem]) -> None:
        """Replace the tensors of items by copies on the host; one wait for each device."""
        sent: dict[torch.device, list[tuple[ExportItem, Tensor]]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for item in items:
                if item.tensor.device.type == "cuda":
                    sent.setdefault(item.tensor.device, []).append((item, self._sent(item)))
                else:
                    item.tensor = item.tensor.cpu()
        for device, some in sent.items():
            with self._stream(device) as stream:
                make: Any = torch.cuda.Event
                arrived = make(blocking=True)
                arrived.record(stream)
            arrived.synchronize()
            for item, host in some:
                item.tensor = host  # what was on the GPU was needed until now

    def _sent(self, item: ExportItem) -> Tensor:
        """Start the copy of a tensor; return where it will be, once the stream has got so far."""
        with self._stream(item.tensor.device) as stream:
            item.ready.wait(stream)
            host = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=True)
            host.copy_(item.tensor, non_blocking=True)
            if item.rows is not None:
                item.rows = item.rows.with_tensors(sent_to_host)
        return host

    @contextlib.contextmanager
    def _stream(self, device: torch.device) -> Iterator[torch.cuda.Stream]:
        stream = self._streams.get(device)
        if stream is None:
            make: Any = torch.cuda.Stream
            stream = self._streams[device] = make(device)
        with torch.cuda.stream(stream):
            yield stream
