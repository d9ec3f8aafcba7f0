"""Add up statistics by the engine of ``watch`` while a model answers, where many small reductions become one.

``activation_stats`` and ``nan_alarm`` derive from `StreamingObserver`, which feeds a `Streaming`. In inference mode
torch does not say whether a tensor was changed in place, so an output cannot be noted and read later, as ``watch`` does
in training. A launch for each takes the host 140 µs next to an H200, more than many a layer has to do when it decodes;
a copy takes 10. So small outputs on a GPU are copied into memory that is kept (`CopyRing`), and reduced together after
some forwards; larger ones are worth a launch of their own. On a CPU each is reduced in its call.

Compiled code hands the outputs of all modules over by one operator (`_Outputs`), where they are small.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from hookline.factories.factory_hook import ByModule, Observer
from hookline.factories.served_batch import output_tensor, without_padding
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.graph import hand_over_late
from hookline.observe.watch.pending import limit_of, streams_of
from hookline.observe.watch.place import Note
from hookline.sites import _torch
from hookline.sites.compiled.op_schemas import Summary
from hookline.sites.hook_at_site import PerSiteHook
from hookline.tree import main_of

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.watch.place import StatRow, WatchedPlace
    from hookline.observe.watch.row import Layout
    from hookline.sites.compiled.op_schemas import Found, Handed
    from hookline.sites.site_info import Site

__all__ = ["CopyRing", "Gathered", "StreamedModule", "Streaming", "StreamingObserver"]

_LONG: Final = 4
"""Calls of every module in one forward, above which it is taken for several."""


class StreamedModule:
    """Hold the rows and copies of one module, and count its calls."""

    __slots__ = ("_engine", "calls", "name", "ring", "watched")

    def __init__(self, engine: StatsEngine, name: str) -> None:
        self._engine = engine
        self.name = name
        self.ring: CopyRing | None = None
        """What took its last output, if one did."""
        self.watched = engine.place(name, "")
        self.calls = 0

    @property
    def places(self) -> list[WatchedPlace]:
        """Return all places with rows of the module."""
        slots = [self._engine.places.get((self.name, kind)) for kind in SLOT_KINDS]
        return [self.watched, *(place for place in slots if place is not None)]

    def rows(self, device: torch.device) -> list[StatRow]:
        """Return all rows of the module on ``device``."""
        return [place.rows[device] for place in self.places if device in place.rows]


ModuleT = TypeVar("ModuleT", bound=StreamedModule)
Gathered: TypeAlias = list[tuple[StreamedModule, Tensor]]
"""Outputs on a GPU that are copied together."""


class StreamingObserver(Observer, PerSiteHook, Generic[ModuleT]):
    """Feed a `Streaming` with the outputs of each module that the hook is on."""

    def __init__(self, streaming: Streaming, kind: type[ModuleT], *, add_residual: bool = False) -> None:
        self._streaming = streaming
        self._modules = ByModule(lambda name: streaming.add_module(kind, name))
        self._expected: set[str] = set()
        """Modules that it was told of before they ran."""
        self._add_residual = add_residual
        self._first: ModuleT | None = None
        """The module that was called first: when it is called again, a forward is over."""
        self.summary = None if add_residual else _Outputs(self._receive)

    def expect(self, names: Iterable[str]) -> None:
        """Make the rows of modules with these names now."""
        self._expected |= set(names)
        self._modules.expect(names)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Add the output of a module."""
        if not _torch.in_recomputation():  # it was counted the first time
            self._fire(self._modules.of(module, site), output)

    @property
    def is_per_site(self) -> bool:
        """Whether nothing is done around a call that `for_site` would leave out, such as reading the inputs."""
        return type(self).__call__ is StreamingObserver.__call__

    def for_site(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return what observes the module called ``name``."""
        return _SiteObserver(self._modules, name, self._fire)

    def _fire(self, seen: ModuleT, output: Any, gathered: Gathered | None = None) -> None:
        """Add the output of a module; into ``gathered``, if it does not outlast the call and may be copied later."""
        if self._first is None:
            self._first = seen
        elif seen is self._first:
            self._end_forward()
        seen.calls += 1
        plain = type(output) is Tensor and not self._add_residual
        tensor = output if plain else output_tensor(output, self._add_residual)
        if tensor is None:
            seen.watched.unread = "there is no tensor in its output"
        else:
            self._take(seen, tensor, gathered)

    def _receive(self, items: Sequence[Handed]) -> None:
        """Add the outputs that compiled code hands over."""
        if _torch.in_recomputation():
            return
        gathered: Gathered = []
        for name, module, found, _ in items:
            self._fire(self._modules.named(name, module), found[0] if found else None, gathered)
        self._streaming.take_gathered(gathered)

    def _end_forward(self) -> None:
        """Begin the next forward."""
        self._streaming.begin_forward()

    def _take(self, seen: ModuleT, tensor: Tensor, gathered: Gathered | None) -> None:
        """Add the statistics of ``tensor``."""
        try:
            real = without_padding(tensor)
            if real is not None:
                self._add(seen, real, gathered)
        except Exception as error:  # an observer must not end the run
            seen.watched.give_up(tensor, error)

    def _add(self, seen: ModuleT, real: Tensor, gathered: Gathered | None) -> None:
        self._streaming.take(seen, real, gathered)


class _SiteObserver(Generic[ModuleT]):
    """Observe one module, whose state is found once."""

    __slots__ = ("_fire", "_modules", "_name", "_seen")

    def __init__(self, modules: ByModule[ModuleT], name: str, fire: Callable[[ModuleT, Any], None]) -> None:
        self._modules = modules
        self._name = name
        self._fire = fire
        self._seen: ModuleT | None = None

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not _torch.in_recomputation():
            seen = self._seen
            if seen is None:
                seen = self._seen = self._modules.named(self._name, module)
            self._fire(seen, output)


class _Outputs(Summary):
    """Hands the main tensors of outputs over as they are; in one call, where they are small."""

    number = zlib.crc32(b"main tensor of an output")

    def __init__(self, receive: Callable[[Sequence[Handed]], None]) -> None:
        self.make = _main_output
        self._receive = receive

    def receive(self, items: Sequence[Handed]) -> None:
        """Take the outputs of modules."""
        self._receive(items)


def _main_output(tensors: list[Tensor]) -> Found:
    """Return the main tensor of an output, to be handed over; an output without a tensor counts as a call."""
    main = main_of(tensors)
    hand_over_late()
    return ([] if main is None else [main.detach()]), 1


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(StreamingObserver.__call__)


class Streaming:
    """Add up statistics of any number of modules, on the devices of their tensors."""

    def __init__(self, layout: Layout) -> None:
        self.engine = StatsEngine(layout)
        self._keeps = not layout.by_unit
        """Whether tensors may be reduced later; else each is reduced at once."""
        self._rings: dict[torch.device, CopyRing] = {}
        self._modules = self._since = 0
        """How many modules there are, and how many tensors were added since a forward began."""

    @property
    def layout(self) -> Layout:
        """Return which statistics are counted."""
        return self.engine.layout

    def add_module(self, kind: type[ModuleT], name: str) -> ModuleT:
        """Return the state of a new module."""
        self._modules += 1
        return kind(self.engine, name)

    def take(self, module: StreamedModule, tensor: Tensor, gathered: Gathered | None = None) -> None:
        """Add the statistics of a tensor, now or later; with ``gathered``, the tensor lasts as long as the call."""
        self._since += 1
        ring = module.ring
        if ring is not None and gathered is None and ring.keep_like(module.name, tensor):
            return
        if self._since > _LONG * self._modules + 16:  # the first module is not called again: an encoder, say
            self.begin_forward()
        if self._keeps and _torch.has_numbers(tensor) and self._keep(module, tensor, gathered):
            return
        if tensor.device not in module.watched.rows and _torch.capturing():
            module.watched.unread = "the first forward was recorded as a CUDA graph, where nothing can be made ready"
            return
        if gathered is None or tensor.device.type in _READ_AT_ONCE:
            self.engine.take(module.watched, tensor)
        else:  # what is noted would be read when the memory has other numbers
            self.engine.take_found([(module.watched, [tensor], 1, None)])

    def take_gathered(self, gathered: Gathered) -> None:
        """Add the statistics of tensors that are copied together."""
        by_device: dict[torch.device, Gathered] = {}
        for module, tensor in gathered:
            by_device.setdefault(tensor.device, []).append((module, tensor))
        for device, some in by_device.items():
            left = self._ring_on(device).keep_all([(module.name, tensor) for module, tensor in some])
            self.engine.take_found([(some[index][0].watched, [some[index][1]], 1, None) for index in left])

    def _keep(self, module: StreamedModule, tensor: Tensor, gathered: Gathered | None) -> bool:
        """Copy a small tensor of inference mode or compiled code on a GPU; return False if it is not copied."""
        device = tensor.device
        # The first one is reduced at once: rows are made then, and the kernel that a CUDA graph may need as well.
        if device.type in _READ_AT_ONCE or device not in module.watched.rows:
            return False
        ring = self._ring_on(device)
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes > ring.largest:
            return False
        if gathered is not None:
            gathered.append((module, tensor))
            return True
        if not tensor.is_inference() or not ring.keep(module.name, tensor):
            return False
        module.ring = ring
        return True

    def _ring_on(self, device: torch.device) -> CopyRing:
        found = self._rings.get(device)
        return self._rings.setdefault(device, CopyRing(self.engine, device)) if found is None else found

    def begin_forward(self) -> None:
        """Begin a forward: reduce what was noted without a copy."""
        self._since = 0
        self.engine.flush()

    def flush_copies(self) -> None:
        """Reduce all copies into the rows."""
        for ring in list(self._rings.values()):
            ring.flush()

    def read(self, modules: Sequence[StreamedModule]) -> list[dict[str, float]]:
        """Return the columns of each module: one transfer per device."""
        with self.engine.lock:
            self.flush_copies()
            cells = self.engine.read()
            return [self._joined(module, cells) for module in modules]

    def by_unit(self) -> dict[str, float]:
        """Return every statistic by its name, if some are per unit: then nothing is kept for later."""
        with self.engine.lock:
            return self.engine.to_metrics()

    def _joined(self, module: StreamedModule, cells: dict[WatchedPlace, dict[str, float]]) -> dict[str, float]:
        """Return all rows of a module as one."""
        found = dict(cells[module.watched])
        for turn in module.places[1:]:
            if turn.rows:
                found |= {name: found[name] + cells[turn][name] for name in self.layout.added}
                found |= {name: _larger(found[name], cells[turn][name]) for name in self.layout.kept}
        return found

    def reset(self) -> None:
        """Drop what was counted so far."""
        with self.engine.lock:
            for ring in self._rings.values():
                ring.forget()
            self.engine.reset()


_READ_AT_ONCE: Final = ("cpu", "mps", "meta")
"""Devices that the engine reads at once, as they do not run behind the host."""


def _larger(one: float, other: float) -> float:
    return math.nan if one != one or other != other else max(one, other)


# -- copies on a GPU ---------------------------------------------------------------------------------------------

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
    """The slots of all modules on one device, one for each of their next firings. Threads may share it.

    A firing copies the output into the next slot and does nothing else: it may be changed in place right after, or lie
    in memory that a CUDA graph or compiled code uses again. When the slots of a module are used up, or numbers are
    asked for, all copies are reduced. They lie where they lay the last time, so the table of addresses is on the device
    already, and the host makes two launches.
    """

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
