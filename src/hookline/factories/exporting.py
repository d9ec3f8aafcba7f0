"""``export``: write the outputs or inputs of modules to safetensors files, by request and token.

Specs and users make it. The hook copies tensors into a queue of limited bytes, which a thread empties into the files of
`export_files`; `served_batch` says whose tokens they are. The forward waits neither for the disk nor for the device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.export_files import ExportItem, Shards, WrittenSoFar, can_store, pieces_of
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import Positions, Stage, measurable, only_in_stage, output_tensor, running
from hookline.observe.patch.parts import find_main_input
from hookline.observe.tokens import sent_to_host
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["INPUT", "Export", "ExportInputs", "ExportOptions", "export"]

logger = logging.getLogger("hookline.factories.export")

INPUT: Final = "/input"
"""What an export adds to the name of a module whose inputs it writes: a folder may have both sides of one."""
_QUEUE_BYTES: Final = 256 << 20
"""Bytes that may wait to be written; what does not fit is dropped and counted."""
_FLUSH_SECONDS: Final = 5.0
"""After how long a smaller shard is completed."""
_LOOK: Final = 0.25
"""Seconds between two checks whether a shard has been open for too long."""
_NAP: Final = 0.03
"""Seconds that the thread waits for more outputs, unless a quarter of the queue is full: a thread that wakes up, or
returns from the disk, takes the interpreter from the forward. With one that did so for each output, the export of one
layer made a decoding forward on an H200 take 9 % longer."""
_TOGETHER: Final = 16 << 20
"""Bytes that are copied to the host together, in pinned memory."""


@dataclass(frozen=True)
class ExportOptions:
    """The config of ``export``."""

    folder: Path
    positions: Positions = "all"
    phase: Stage = "both"
    max_bytes: int | None = None
    add_residual: bool = False
    inputs: bool = False

    def __post_init__(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(f"export: {self.folder} is a file, and folder has to be a folder.")
        if self.inputs and self.phase != "both":
            raise OptionError(
                "export: inputs goes with both phases; leave phase out: each record says of which it is (record.phase)."
            )
        if self.inputs and self.add_residual:
            raise OptionError(
                "export: add_residual is for a pair that a module returns, and inputs writes what it gets."
            )


@tried_by()
def export(config: Mapping[str, Any] | None = None) -> Export:
    """Make a hook that writes outputs to safetensors files in a folder; no forward waits for it.

    Recipe::

        hook = export({"folder": "states", "max_bytes": 1_000_000_000})
        with hookline.attach(model, "model.layers.8", hook):
            model(input_ids)
        hook.close()
        for record in read_export("states"):
            print(record.module, record.request, record.positions, record.tensor.shape)

    Args:
        config: ``folder``: where to; the only option that has to be given. ``positions``: ``"all"``, or ``"last"``, the
            last token of each sequence in each forward. ``phase``: ``"prefill"`` or ``"decode"`` of a served model, for
            one of them alone. ``max_bytes``: how much may be written in all; then it stops, and says so once.
            ``add_residual``: of an output that is a pair of tensors of one shape, as SGLang's layers give, write the
            sum. ``inputs``: write what goes into the modules in place of what comes out, under the name
            ``"layers.8/input"``: the main tensor of the positional arguments. The hook is then one for
            ``on="forward_pre"``, as a module may change its input in place.

    At most 256 MiB wait to be written; what does not fit is dropped and counted. A file is complete at 64 MiB, or after
    five seconds.
    """
    options = read_options("export", ExportOptions, config)
    kind = ExportInputs if options.inputs else only_in_stage(Export, options.phase)
    return kind(options)


@dataclass(slots=True)
class _ModuleCalls:
    """Count the calls of one module."""

    name: str
    """What its records call it."""
    calls: int = 0


class Export(Observer):
    """Export all modules that one ``export`` is on; ``close()`` or the end of the process writes the rest."""

    name = "export"

    def __init__(
        self, options: ExportOptions, *, queue_bytes: int = _QUEUE_BYTES, earlier: WrittenSoFar | None = None
    ) -> None:
        self.folder = options.folder
        self._queue = _ExportQueue(options, queue_bytes, earlier)
        self._only_last = options.positions == "last"
        self._add_residual = options.add_residual
        side = INPUT if options.inputs else ""
        self._calls = ByModule(lambda name: _ModuleCalls(name + side))
        self._lock = threading.Lock()
        self._unread = 0
        # The queue does not refer to this object: it is closed when the hook is deleted, or when the process ends.
        self._finalizer = weakref.finalize(self, self._queue.close)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Queue the output of a module."""
        if not _torch.in_recomputation() and self._queue.is_ours():  # else it was taken the first time
            self._take(module, site, inputs, output_tensor(output, self._add_residual))

    def _take(self, module: nn.Module, site: Site | None, inputs: Any, taken: Tensor | None) -> None:
        seen = self._calls.of(module, site)
        with self._lock:
            call = seen.calls
            seen.calls = call + 1
        tensor = measurable(taken)
        if tensor is None or not can_store(tensor):
            self._unread += 1
            return
        rows = running(inputs)
        is_flat = rows is not None and rows.width is None
        is_last = self._only_last and tensor.dim() == 3 and not is_flat
        if is_last:  # of (batch, sequence, features), padded on the left, the last column
            tensor = tensor[:, -1:]
        size = tensor.numel() * tensor.element_size()
        if self._queue.reserve(size):
            self._queue.put(_copied(ExportItem(seen.name, call, tensor, size, rows, self._only_last, is_last)))

    def to_metrics(self) -> dict[str, float]:
        """Return what was written, waits and was dropped; ``unread`` had no numbers, or none that can be stored."""
        return self._queue.to_metrics() | {"unread": float(self._unread)}

    @property
    def is_full(self) -> bool:
        """Return whether ``max_bytes`` has ended it."""
        return self._queue.is_full

    def wait_until_written(self) -> None:
        """Wait until nothing waits to be written, for a run that may wait; the last file stays open."""
        self._queue.wait_until_written()

    def close(self) -> None:
        """Write what waits, and complete the last file."""
        self._finalizer()


class ExportInputs(Export):
    """Export what goes into the modules; a hook before the forward, which may change its inputs in place."""

    def __call__(self, module: nn.Module, inputs: Any, *, site: Site | None = None) -> None:  # type: ignore[override]
        """Queue the main tensor of the positional arguments."""
        self.take_arguments(module, inputs, {}, site=site)

    def take_arguments(
        self, module: nn.Module, inputs: Any, named: dict[str, Any], *, site: Site | None = None
    ) -> None:
        """Queue the main tensor of the arguments, positional or ``named``, as a hook that is given both."""
        if not _torch.in_recomputation() and self._queue.is_ours():
            self._take(module, site, inputs, find_main_input(inputs, named))


def _copied(item: ExportItem) -> ExportItem:
    """Return the item with its own tensors: the forward may change these in place."""
    if item.rows is not None:
        item.rows = item.rows.with_tensors(lambda value: value.clone() if isinstance(value, Tensor) else value)
    item.tensor = item.tensor.clone(memory_format=torch.contiguous_format)
    if item.tensor.device.type == "cuda":
        make: Any = torch.cuda.Event
        item.ready = make()
        item.ready.record(torch.cuda.current_stream(item.tensor.device))
    return item


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
for _hook in (Export.__call__, ExportInputs.__call__, ExportInputs.take_arguments):
    _torch.leave_to_python(_hook)


class _ExportQueue:
    """The queue of one hook; its thread starts with the first tensor."""

    def __init__(self, options: ExportOptions, queue_bytes: int, earlier: WrittenSoFar | None) -> None:
        self._folder = options.folder
        self._max_bytes, self._queue_bytes = options.max_bytes, queue_bytes
        self._earlier = earlier or WrittenSoFar()
        self._items: queue.SimpleQueue[ExportItem | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        """Set when the thread should not wait for more."""
        self._lock = threading.Lock()
        """Held for counting alone, never while something is written."""
        self._written = threading.Condition(self._lock)
        """Notified when what waited has been written, or dropped."""
        self._accepted = self._earlier.bytes
        self._queued = self._dropped = self._dropped_bytes = self._errors = 0
        self.is_full = False
        """Whether ``max_bytes`` has ended it."""
        self._stopped = ""
        """Why nothing more is taken, if that is so."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._shards: Shards | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def is_ours(self) -> bool:
        """Return whether this process has made it: a forked one has no thread, and its locks may stay locked."""
        return os.getpid() == self._process

    # -- in the forward ----------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes; return False, and count what is dropped, if there is no room."""
        with self._lock:
            has_room = not self._stopped and self._queued + size <= self._queue_bytes
            is_over = has_room and self._max_bytes is not None and self._accepted + size > self._max_bytes
            if has_room and not is_over:
                self._accepted += size
                self._queued += size
                return True
            self._drop(1, size)
            if is_over:
                self.is_full = True
                self._stopped = f"more than max_bytes ({self._max_bytes}) is asked for"
                logger.warning("Export stops: %s; %d bytes were taken", self._stopped, self._accepted)
            return False

    def put(self, item: ExportItem) -> None:
        """Queue a tensor, for which `reserve` has returned True, to be written."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="hookline-export", daemon=True)
                    self._thread.start()
        self._items.put(item)
        if self._queued * 4 > self._queue_bytes:
            self._hurry.set()

    def _drop(self, count: int, size: int) -> None:
        self._dropped += count
        self._dropped_bytes += size

    # -- in the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        is_over = False
        while not is_over:
            items, is_over = self._next_items()
            try:
                self._write(items)
                if self._shards is not None and (is_over or self._shards.age > _FLUSH_SECONDS):
                    self._shards.complete()
            except Exception as error:  # a full disk, say: the run goes on without the export
                self._fail(error)
            with self._lock:
                self._queued -= sum(item.bytes for item in items)
                lost = [item.bytes for item in items if self._errors and not item.is_taken]
                self._drop(len(lost), sum(lost))
                self._written.notify_all()
        if self._shards is not None:
            self._shards.abandon()

    def _next_items(self) -> tuple[list[ExportItem], bool]:
        """Return waiting items, after a short wait for more, and whether they are the last."""
        found: list[ExportItem | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._items.get(timeout=_LOOK))
            if found[0] is not None and self._items.empty():
                self._hurry.wait(_NAP)
            self._hurry.clear()
            while found[-1] is not None and sum(item.bytes for item in found if item is not None) < _TOGETHER:
                found.append(self._items.get_nowait())
        return [item for item in found if item is not None], None in found

    def _write(self, items: list[ExportItem]) -> None:
        if self._errors or not items:
            return
        if self._shards is None:
            self._shards = Shards(self._folder)
        self._bring_to_host(items)
        with torch.inference_mode(False), torch.no_grad():
            for item in items:
                item.is_taken = True
                for piece in pieces_of(item):
                    if not self._earlier.has(piece.line):
                        self._shards.add(piece)

    def _bring_to_host(self, items: list[ExportItem]) -> None:
        """Replace the tensors of items by copies on the host, made on a stream of its own; one wait for each device."""
        until_copied = [item.tensor for item in items]
        with torch.inference_mode(False), torch.no_grad():
            for item in items:
                device = item.tensor.device
                if device.type != "cuda":
                    item.tensor = item.tensor.cpu()
                    continue
                make: Any = torch.cuda.Stream
                stream = self._streams[device] = self._streams.get(device) or make(device)
                with torch.cuda.stream(stream):
                    item.ready.wait(stream)
                    item.tensor = sent_to_host(item.tensor)
                    item.rows = None if item.rows is None else item.rows.with_tensors(sent_to_host)
        for stream in self._streams.values():
            make = torch.cuda.Event
            arrived = make(blocking=True)  # does not spin, as waiting for the stream would
            arrived.record(stream)
            arrived.synchronize()
        del until_copied

    def _fail(self, error: Exception) -> None:
        logger.error("Export stops, and the run goes on: %s: %s", type(error).__name__, error)
        with self._lock:
            self._stopped = str(error)
            self._errors += 1
            if self._shards is not None:
                self._drop(*self._shards.abandon())

    # -- from outside ------------------------------------------------------------------------------------

    def wait_until_written(self) -> None:
        """Wait until nothing waits to be written."""
        self._hurry.set()
        with self._written:
            self._written.wait_for(lambda: not self._queued)

    def close(self, timeout: float = 60.0) -> None:
        """Write all that was taken, and take no more; may be called again."""
        if not self.is_ours():
            return
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._items.put(None)
            self._hurry.set()
            thread.join(timeout)
            if thread.is_alive():
                logger.error(
                    "Export is not through after %g s; %d bytes still wait to be written", timeout, self._queued
                )

    def to_metrics(self) -> dict[str, float]:
        """Return the counts so far."""
        with self._lock:
            shards = self._shards
            counts = {
                "written_bytes": 0 if shards is None else shards.bytes,
                "written_tensors": 0 if shards is None else shards.tensors,
                "queued_bytes": self._queued,
                "dropped": self._dropped,
                "dropped_bytes": self._dropped_bytes,
                "shards": 0 if shards is None else shards.count,
                "errors": self._errors,
                "stopped": bool(self._stopped),
            }
        return {name: float(value) for name, value in counts.items()}
