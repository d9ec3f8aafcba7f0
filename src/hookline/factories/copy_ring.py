"""Copy small outputs on a GPU into memory that is kept, and reduce the copies of many forwards by launches made once.

`Streaming` gives it outputs. Each module has a few slots, one for each of its next firings. A firing copies the output
into the next slot and does nothing else: it may be changed in place right after, or lie in memory that a CUDA graph or
compiled code uses again, and in inference mode torch does not tell. When the slots of a module are used up, or numbers
are asked for, all copies are reduced. They lie where they lay the last time, so the table of addresses is on the device
already, and the host makes two launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hookline.observe.watch.pending import limit_of, streams_of
from hookline.observe.watch.place import Note
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.observe.watch.engine import StatsEngine

__all__ = ["SLOT_KINDS", "CopyRing"]

SLOTS: Final = 8
"""Firings of a module between two reductions. Each has a row of its own, as two programs must not add to the same one
at a time. For 12 layers a reduction takes the host 60 µs on an H200: 8 µs a forward."""
SLOT_KINDS: Final = tuple(f"slot {number}" for number in range(SLOTS))
"""The kinds of the places of a module's slots."""
_SHARE: Final = 16
"""Of what `limit_of` gives, one part in so many may be held: 1/1024 of the GPU's memory, 140 MiB on an H200."""
_SMALL_SHARE: Final = 256
"""Of that, an output has one part in so many at most: 560 KiB on an H200, a batch of 64 tokens of width 4096."""


class _Slot:
    """One copy, with the place whose row it is added to."""

    __slots__ = ("note", "view")

    def __init__(self, note: Note) -> None:
        self.note = note
        self.view = note.tensor


class _ModuleSlots:
    """The slots of one module for outputs of one shape."""

    __slots__ = ("dtype", "num_bytes", "shape", "slots", "used")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.slots: list[_Slot] = []
        """None as long as the shape was seen once: prompts are all of another length."""
        self.num_bytes = 0
        self.used = 0


class CopyRing:
    """The slots of all modules on one device. Threads may share it."""

    def __init__(self, engine: StatsEngine, device: torch.device) -> None:
        self._engine = engine
        self._index = -1 if device.index is None else device.index
        self._limit = limit_of(device) // _SHARE
        self.largest = self._limit // _SMALL_SHARE
        """The bytes of the largest output that is taken."""
        self._streams = streams_of(device)
        self._stream = self._streams.now()
        """The stream that copies and reduces."""
        self._modules: dict[str, _ModuleSlots] = {}
        self._bytes = 0
        self._pending: list[_Slot] = []
        self._filled: list[_ModuleSlots] = []
        self._launch: tuple[list[_Slot], Callable[[], None] | None] = [], None
        """What was reduced last, and the call that does it again; there is none without a kernel."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pending)

    def keep_like(self, name: str, tensor: Tensor) -> bool:
        """Copy an output of a module of which one was copied before; return False if this one is of another kind."""
        if type(tensor) is not Tensor or tensor.get_device() != self._index or tensor.layout is not torch.strided:
            return False
        return not _torch.is_wrapped(tensor) and self.keep(name, tensor)

    def keep(self, name: str, tensor: Tensor) -> bool:
        """Copy an output of the module ``name``; return False if that cannot be done."""
        with self._lock:
            slot = self._next_slot(name, tensor)
            if slot is not None:
                slot.view.copy_(tensor)
            return slot is not None

    def keep_all(self, outputs: Sequence[tuple[str, Tensor]]) -> list[int]:
        """Copy outputs of several modules by one launch; return the indices of those for which it cannot be done."""
        left: list[int] = []
        views: list[Tensor] = []
        tensors: list[Tensor] = []
        with self._lock:
            for index, (name, tensor) in enumerate(outputs):
                if self._is_full(name):  # what was not copied yet is among what is reduced now
                    _copy_all(views, tensors)
                slot = self._next_slot(name, tensor)
                if slot is None:
                    left.append(index)
                else:
                    views.append(slot.view)
                    tensors.append(tensor)
            _copy_all(views, tensors)
        return left

    def flush(self) -> None:
        """Reduce all copies; the current stream waits for that."""
        with self._lock:
            if not _torch.capturing():  # it would become part of the graph, and be done at each replay
                self._reduce()
                self._follow()

    def forget(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._take_pending()

    # -- under the lock ----------------------------------------------------------------------------------

    def _is_full(self, name: str) -> bool:
        found = self._modules.get(name)
        return found is not None and found.used == len(found.slots) > 0

    def _next_slot(self, name: str, tensor: Tensor) -> _Slot | None:
        """Return the slot that the output is to be copied into, or None."""
        stream = self._streams.now()
        if stream and _torch.capturing():  # CUDA records no graph on the stream of number 0, and asking it takes 2 µs
            return None
        if stream != self._stream:
            self._follow()
        found = self._modules.get(name)
        if found is None or found.shape != tensor.shape or found.dtype is not tensor.dtype or not found.slots:
            found = self._renew(name, found, tensor)
            if found is None:
                return None
        if found.used == len(found.slots):
            self._reduce()
        if not found.used:
            self._filled.append(found)
        slot = found.slots[found.used]
        found.used += 1
        self._pending.append(slot)
        return slot

    def _renew(self, name: str, found: _ModuleSlots | None, tensor: Tensor) -> _ModuleSlots | None:
        """Return slots for outputs like ``tensor``, if the last one was like it, and there is memory."""
        size = tensor.numel() * tensor.element_size()
        if not size or size > self.largest:
            return None
        if found is None or found.shape != tensor.shape or found.dtype is not tensor.dtype:
            self._drop(found)
            self._modules[name] = _ModuleSlots(tensor.shape, tensor.dtype)
            return None
        if self._bytes + SLOTS * size > self._limit:
            return None
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.empty((SLOTS, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            places = [self._engine.place(name, kind) for kind in SLOT_KINDS]
            found.slots = [_Slot(Note(place, view)) for place, view in zip(places, buffer.unbind(), strict=True)]
        found.num_bytes = SLOTS * size
        self._bytes += found.num_bytes
        return found

    def _drop(self, found: _ModuleSlots | None) -> None:
        if found is not None and found.slots:
            self._reduce()
            self._bytes -= found.num_bytes
            self._launch = [], None  # it has the addresses

    def _follow(self) -> None:
        """Go on on the current stream, behind the one so far, with memory of its own: torch's allocator asks no other
        stream whether it is done.
        """
        now = self._streams.now()
        if now != self._stream:
            self._reduce()
            self._modules.clear()
            self._launch, self._bytes = ([], None), 0
            self._streams.join(self._stream)
            self._stream = now

    def _take_pending(self) -> list[_Slot]:
        pending, self._pending = self._pending, []
        for each in self._filled:
            each.used = 0
        self._filled = []
        return pending

    def _reduce(self) -> None:
        """Reduce all copies on the stream that made them."""
        pending = self._take_pending()
        if not pending:
            return
        with self._streams.on(self._stream):
            if pending != self._launch[0]:  # slots are equal if they are the same
                self._launch = pending, self._engine.prepare([slot.note for slot in pending])
            launch = self._launch[1]
            if launch is None:
                self._engine.take_all([slot.note for slot in pending])
            else:
                launch()


def _copy_all(views: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into views, and empty both lists."""
    if views:
        _torch.copy_all(views, tensors)
        views.clear()
        tensors.clear()
