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
from hookline.factories import export_files
from hookline.factories.export_files import ExportItem, Shards, can_store, item_of, pieces_of
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import Positions, Stage, log_unknown, measurable, output_tensor, running
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
"""Seconds between two checks whether a shard has been held for too long."""
_NAP: Final = 0.03
"""Seconds that the thread waits for more outputs: a thread that wakes up, or returns from the disk, takes the
interpreter from the forward. With one that did so for each output, the export of one layer made a decoding forward on
an H200 take 9 % longer."""


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
    return ExportInputs(options) if options.inputs else Export(options)


@dataclass(slots=True)
class _ModuleCalls:
    """Count the calls of one module."""

    name: str
    """What its records call it."""
    calls: int = 0


class Export(Observer):
    """Export all modules that one ``export`` is on; ``close()`` or the end of the process writes the rest."""

    name = "export"

    def __init__(self, options: ExportOptions, *, queue_bytes: int = _QUEUE_BYTES) -> None:
        self._options = options
        self._queue = _ExportQueue(options, queue_bytes)
        side = INPUT if options.inputs else ""
        self._calls = ByModule(lambda name: _ModuleCalls(name + side))
        self._lock = threading.Lock()
        self._unread = 0
        self._has_logged = False
        # The queue does not refer to this object: it is closed when the hook is deleted, or when the process ends.
        self._finalizer = weakref.finalize(self, self._queue.close)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Queue the output of a module."""
        self._take(module, site, inputs, output_tensor(output, self._options.add_residual))

    def _take(self, module: nn.Module, site: Site | None, inputs: Any, taken: Tensor | None) -> None:
        if _torch.in_recomputation():  # it was taken the first time
            return
        seen, tokens, options = self._calls.of(module, site), running(inputs), self._options
        with self._lock:
            call = seen.calls
            seen.calls = call + 1
        tensor = measurable(taken)
        if tensor is None or not can_store(tensor):
            self._unread += 1
        elif tokens is None and options.phase != "both":
            if not self._has_logged:
                self._has_logged = True
                log_unknown(self.name, "phase")
        else:
            item = item_of(seen.name, call, tensor, tokens, last=options.positions == "last", stage=options.phase)
            if item is not None and self._queue.reserve(item.bytes):
                self._queue.put(_copied(item))

    def to_metrics(self) -> dict[str, float]:
        """Return what was written, waits and was dropped; ``unread`` had no numbers, or none that can be stored."""
        return self._queue.to_metrics() | {"unread": float(self._unread)}

    def close(self) -> None:
        """Write what waits, and complete the last file."""
        self._finalizer()


class ExportInputs(Export):
    """Export what goes into the modules; a hook before the forward, which may change its inputs in place."""

    def __call__(self, module: nn.Module, inputs: Any, *, site: Site | None = None) -> None:  # type: ignore[override]
        """Queue the main tensor of the positional arguments."""
        self._take(module, site, inputs, find_main_input(inputs, {}))


def _copied(item: ExportItem) -> ExportItem:
    """Return the item with its own tensors: the forward may change these in place."""
    if item.tokens is not None:
        item.tokens = item.tokens.with_tensors(lambda value: value.clone() if isinstance(value, Tensor) else value)
    item.tensor = item.tensor.clone(memory_format=torch.contiguous_format)
    if item.tensor.device.type == "cuda":
        make: Any = torch.cuda.Event
        item.ready = make()
        item.ready.record(torch.cuda.current_stream(item.tensor.device))
    return item


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
for _hook in (Export.__call__, ExportInputs.__call__):
    _torch.leave_to_python(_hook)


# -- between the forward and the disk --------------------------------------------------------------------------


class _ExportQueue:
    """Write tensors from a thread of its own, and count them."""

    def __init__(self, options: ExportOptions, queue_bytes: int) -> None:
        self._folder = options.folder
        self._max_bytes, self._queue_bytes = options.max_bytes, queue_bytes
        self._items: queue.SimpleQueue[ExportItem | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        """Held for counting alone, never while something is written."""
        self._accepted = self._queued = self._dropped = self._errors = 0
        self._held = 0
        """Outputs that are in no complete file yet."""
        self._stopped = ""
        """Why nothing more is taken, if that is so."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        """A forked process has no thread, and its locks may stay locked."""
        self._shards: Shards | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # -- in the forward ----------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes; return False, and count what is dropped, if there is no room."""
        if os.getpid() != self._process:
            return False
        with self._lock:
            has_room = not self._stopped and self._queued + size <= self._queue_bytes
            is_over = has_room and self._max_bytes is not None and self._accepted + size > self._max_bytes
            if has_room and not is_over:
                self._accepted += size
                self._queued += size
                return True
            self._dropped += 1
            if is_over:
                self._stopped = f"more than max_bytes ({self._max_bytes}) is asked for"
                logger.warning("Export stops: %s; %d bytes were taken", self._stopped, self._accepted)
            return False

    def put(self, item: ExportItem) -> None:
        """Queue a tensor, for which `reserve` has returned True, to be written."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hookline-export", daemon=True)
                self._thread.start()
        self._items.put(item)

    # -- in the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        is_over = False
        while not is_over:
            items = self._next_items()
            is_over = None in items
            for item in items:
                if item is not None:
                    size = item.bytes
                    self._write_or_fail(item)
                    with self._lock:
                        self._queued -= size
            if is_over or (self._shards is not None and self._shards.age > _FLUSH_SECONDS):
                self._write_or_fail(None)
        if self._shards is not None:
            self._shards.close()

    def _next_items(self) -> list[ExportItem | None]:
        """Return waiting items, after a short wait for more; None comes after the last."""
        found: list[ExportItem | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._items.get(timeout=_LOOK))
            self._is_closing.wait(_NAP)
            while True:
                found.append(self._items.get_nowait())
        return found

    def _write_or_fail(self, item: ExportItem | None) -> None:
        """Write an item, or with None what is held; when that fails, the export ends, and the run goes on."""
        if self._errors:
            self._dropped += item is not None
            return
        try:
            self._write(item)
        except Exception as error:
            logger.error("Export stops, and the run goes on: %s: %s", type(error).__name__, error)
            with self._lock:
                self._stopped, self._errors = str(error), 1
                self._dropped += self._held
                if self._shards is not None:
                    self._shards.close()

    def _write(self, item: ExportItem | None) -> None:
        shards = self._shards
        if item is not None:
            self._held += 1
            shards = self._shards = shards or Shards(self._folder)
            with torch.inference_mode(False), torch.no_grad():
                self._bring_to_host(item)
                shards.add(pieces_of(item))
        if shards is not None and (item is None or shards.size >= export_files.SHARD_BYTES):
            shards.complete()
            self._held = 0

    def _bring_to_host(self, item: ExportItem) -> None:
        """Copy the tensors of an item to the host, on a stream that no forward uses."""
        device = item.tensor.device
        if device.type != "cuda":
            item.tensor = item.tensor.cpu()
            return
        cuda: Any = torch.cuda
        stream = self._streams[device] = self._streams.get(device) or cuda.Stream(device)
        on_device, tokens = item.tensor, item.tokens  # referred to until they are copied
        with torch.cuda.stream(stream):
            item.ready.wait(stream)
            item.tensor = sent_to_host(on_device)
            item.tokens = None if tokens is None else tokens.with_tensors(sent_to_host)
            arrived = cuda.Event(blocking=True)  # does not spin, as waiting for the stream would
            arrived.record(stream)
        arrived.synchronize()

    # -- from outside ------------------------------------------------------------------------------------

    def close(self, timeout: float = 60.0) -> None:
        """Write all that was taken, and take no more; may be called again."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._is_closing.set()
            self._items.put(None)
            thread.join(timeout)
            if thread.is_alive():
                logger.error(
                    "Export is not through after %g s; %d bytes still wait to be written", timeout, self._queued
                )

    def to_metrics(self) -> dict[str, float]:
        """Return the counts so far."""
        with self._lock:
            counts = {
                "written_bytes": 0 if self._shards is None else self._shards.bytes,
                "written_tensors": 0 if self._shards is None else self._shards.tensors,
                "queued_bytes": self._queued,
                "dropped": self._dropped,
                "errors": self._errors,
                "stopped": bool(self._stopped),
            }
        return {name: float(value) for name, value in counts.items()}
