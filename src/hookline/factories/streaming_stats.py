"""Add up statistics by the engine of ``watch`` while a model answers, where many small reductions become one.

``activation_stats`` and ``nan_alarm`` derive from `StreamingObserver`, which feeds a `Streaming`. In inference mode
torch does not say whether a tensor was changed in place, so an output cannot be noted and read later, as ``watch`` does
in training. A launch for each takes the host 140 µs next to an H200, more than many a layer has to do when it decodes;
a copy takes 10. So outputs on a GPU are copied, and reduced together after some forwards. Small ones on a CPU are
copied too (`_SmallTensors`): reducing a thousand numbers takes 23 µs, of which 20 are calls; keeping a copy takes 5 µs
with all that is around it, and 32 copies are reduced as one tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from hookline.factories.factory_hook import ByModule, Observer
from hookline.factories.served_batch import output_tensor, without_padding
from hookline.observe.watch.cpu_stats import add, measure, reduce
from hookline.observe.watch.pending_tensors import Note, PendingTensors, limit_of
from hookline.observe.watch.stats_engine import StatsEngine, WatchedPlace
from hookline.observe.watch.watch_hooks import give_up
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.watch.stat_columns import Layout
    from hookline.observe.watch.stat_rows import StatRow
    from hookline.sites.site_info import Site

__all__ = ["StreamedModule", "Streaming", "StreamingObserver"]

_TURNS: Final = 4
"""Forwards whose copies are reduced together. Each has rows of its own, as two programs must not add to the same one
at a time; the flush of 12 layers takes 200 µs of a forward if it comes with each, and 50 if with every fourth."""
_LONG: Final = 4
"""Calls of every module in one forward, above which it is taken for several."""
_MOST: Final = 256
"""Copies that are held at most: what one launch reads."""
_SHARE: Final = 16
"""Of what `limit_of` gives, one part in so many may be held: 1/1024 of the GPU's memory, of which a tensor that is
copied has a quarter at most. On an H200 that is 140 MiB and 35; larger ones are worth a launch of their own."""
_SMALL: Final = 4096
"""Numbers in a small tensor: 16 KiB of float32, half a MiB for a module."""
_SMALL_COUNT: Final = 32
"""Small tensors that are reduced as one."""
_CPU: Final = torch.device("cpu")


class StreamedModule:
    """Hold the rows and copies of one module, and count its calls."""

    __slots__ = ("calls", "small", "turns", "watched")

    def __init__(self, engine: StatsEngine, name: str) -> None:
        self.watched = engine.place(name, "")
        self.turns: tuple[WatchedPlace, ...] = ()
        """Where copies go, by forward; none before the first copy."""
        self.small = _SmallTensors()
        self.calls = 0

    @property
    def name(self) -> str:
        """Return the name of the module."""
        return self.watched.name

    def rows(self, device: torch.device) -> list[StatRow]:
        """Return all rows of the module on ``device``."""
        return [place.rows[device] for place in (self.watched, *self.turns) if device in place.rows]


ModuleT = TypeVar("ModuleT", bound=StreamedModule)


class StreamingObserver(Observer, Generic[ModuleT]):
    """Feed a `Streaming` with every ``every``-th output of each module that the hook is on."""

    def __init__(
        self, streaming: Streaming, kind: type[ModuleT], *, every: int = 1, add_residual: bool = False
    ) -> None:
        self._streaming = streaming
        self._modules = ByModule(lambda name: streaming.add_module(kind, name))
        self._every = every
        self._add_residual = add_residual
        self._first: ModuleT | None = None
        """The module that was called first: when it is called again, a forward is over."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Add the output of a module."""
        if _torch.in_recomputation():  # it was counted the first time
            return
        seen = self._modules.of(module, site)
        if self._first is None:
            self._first = seen
        elif seen is self._first:
            self._end_forward()
        count = seen.calls
        seen.calls = count + 1
        if count % self._every == 0:
            tensor = output_tensor(output, self._add_residual)
            if tensor is None:
                seen.watched.unread = "there is no tensor in its output"
            else:
                self._take(seen, tensor)

    def _end_forward(self) -> None:
        """Begin the next forward."""
        self._streaming.begin_forward()

    def _take(self, seen: ModuleT, tensor: Tensor) -> bool:
        """Add the statistics of ``tensor``; return False if that failed."""
        try:
            real = without_padding(tensor)
            if real is not None:
                self._add(seen, real)
        except Exception as error:  # an observer must not end the run
            give_up(seen.watched, tensor, error)
            return False
        return True

    def _add(self, seen: ModuleT, real: Tensor) -> None:
        self._streaming.take(seen, real)


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(StreamingObserver.__call__)


class Streaming:
    """Add up statistics of any number of modules, on the devices of their tensors.

    ``keeps``: whether tensors may be reduced later; else each is reduced at once. ``keeps_small``: whether small ones
    on a CPU may.
    """

    def __init__(self, layout: Layout, *, keeps: bool = True, keeps_small: bool = True) -> None:
        self.engine = StatsEngine(layout)
        self._keeps = keeps and not layout.by_unit
        self._keeps_small = self._keeps and keeps_small
        self._held: dict[torch.device, _Held] = {}
        self._turn = 0
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

    def take(self, module: StreamedModule, tensor: Tensor) -> None:
        """Add the statistics of a tensor, now or later."""
        self._since += 1
        if self._since > _LONG * self._modules + 16:  # the first module is not called again: an encoder, say
            self.begin_forward()
        if self._keeps and _torch.has_numbers(tensor) and self._keep(module, tensor):
            return
        if tensor.device not in module.watched.rows and _torch.capturing():
            module.watched.unread = "the first forward was recorded as a CUDA graph, where nothing can be made ready"
            return
        self.engine.take(module.watched, tensor)
        if module.watched.beside:
            self.engine.take_beside(module.watched, tensor)

    def _keep(self, module: StreamedModule, tensor: Tensor) -> bool:
        """Keep a copy of the tensor for later; return False if it has to be reduced now."""
        if not self._keeps_small or not module.small.keep(tensor):
            return self._copy(module, tensor)
        if module.small.is_full:
            module.small.reduce(self.engine, module.watched)
        return True

    def _copy(self, module: StreamedModule, tensor: Tensor) -> bool:
        """Keep a copy of a tensor that inference mode has made on a GPU, if it is not too large."""
        device = tensor.device
        # The first one is reduced at once: rows are made then, and the kernel that a CUDA graph may need as well.
        if device.type in _READ_AT_ONCE or not tensor.is_inference() or device not in module.watched.rows:
            return False
        held = self._held_on(device)
        if type(tensor) is not Tensor or tensor.nbytes > held.largest or _torch.capturing():
            return False
        with torch.inference_mode(False):
            copy = tensor.clone()  # which has a version counter, as noted tensors need
        if not module.turns:
            module.turns = tuple(self.engine.place(module.name, f"turn {turn}") for turn in range(_TURNS))
        if not held.note(module.turns[self._turn], copy):
            return False
        if len(held) >= _MOST:
            held.flush()
        return True

    def _held_on(self, device: torch.device) -> _Held:
        found = self._held.get(device)
        return self._held.setdefault(device, _Held(self.engine, device)) if found is None else found

    def begin_forward(self) -> None:
        """Begin a forward: reduce what was noted without a copy, and copies every few forwards."""
        self._since = 0
        self.engine.flush()
        self._turn = (self._turn + 1) % _TURNS
        if self._turn == 0:
            self.flush_copies()

    def flush_copies(self) -> None:
        """Reduce all copies into the rows."""
        for held in list(self._held.values()):
            held.flush()

    def read(self, modules: Sequence[StreamedModule]) -> list[dict[str, float]]:
        """Return the columns of each module: one transfer per device."""
        with self.engine.lock:
            for module in modules:
                module.small.reduce(self.engine, module.watched)
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
        for turn in module.turns:
            if turn.rows:
                found |= {name: found[name] + cells[turn][name] for name in self.layout.added}
                found |= {name: _larger(found[name], cells[turn][name]) for name in self.layout.kept}
        found["fires"] += module.small.fires
        return found

    def reset(self, modules: Sequence[StreamedModule]) -> None:
        """Drop what was counted so far."""
        with self.engine.lock:
            for module in modules:
                module.small.forget()
            for held in self._held.values():
                held.forget()
            self.engine.reset()


class _Held(PendingTensors):
    """Hold the copies on one device."""

    def __init__(self, engine: StatsEngine, device: torch.device) -> None:
        def reduce(notes: Sequence[Note]) -> None:
            engine.take_all(notes)

        limit = limit_of(device) // _SHARE
        super().__init__(reduce, device, limit=limit)
        self.largest = limit // 4


_READ_AT_ONCE: Final = ("cpu", "mps", "meta")
"""Devices that the engine reads at once, as they do not run behind the host."""


def _larger(one: float, other: float) -> float:
    return math.nan if one != one or other != other else max(one, other)


class _SmallTensors:
    """Keep small tensors of one module on the CPU until there are enough to reduce."""

    __slots__ = ("_kept", "fires")

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque()
        self.fires = 0
        """Firings that the row has not counted, as it got several tensors at once."""

    def keep(self, tensor: Tensor) -> bool:
        """Keep a copy of ``tensor``; return False if it is not a small one."""
        if type(tensor) is not Tensor or tensor.numel() > _SMALL or tensor.device != _CPU or not tensor.dim():
            return False
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if not tensor.is_contiguous():
            return False
        self._kept.append(tensor.detach().clone())
        return True

    @property
    def is_full(self) -> bool:
        """Return whether there are enough to reduce."""
        return len(self._kept) >= _SMALL_COUNT

    def reduce(self, engine: StatsEngine, place: WatchedPlace) -> None:
        """Add what is kept to the row of ``place``."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        while True:
            try:
                tensor = self._kept.popleft()  # in one step: another thread may be at it
            except IndexError:
                break
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        row = engine.row(place, _CPU)
        for tensors in by_dtype.values():
            found = reduce(torch.cat([tensor.view(-1) for tensor in tensors]), engine.layout)
            if found.bad:  # the number of firings with bad values counts as well
                for tensor in tensors:
                    measure(tensor, engine.layout, row)
                continue
            add(found, row, engine.layout, 1.0)
            self.fires += len(tensors) - 1

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept.clear()
        self.fires = 0
