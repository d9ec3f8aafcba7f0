"""The engine of ``watch`` for hooks that are left on while a model answers: many small reductions become one.

Takes tensors of modules from ``activation_stats`` and ``nan_alarm``, hands the columns of their rows back. In inference
mode torch does not say whether a tensor was changed in place, so what a layer gives out cannot be noted and looked at
later, as ``watch`` does in training. A launch for each takes the host 140 µs next to an H200, more than many a layer
has to do when it decodes; a copy takes 10. So outputs on a GPU are copied, and reduced together after some forwards.
Small ones on a CPU are kept likewise (`small`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hookline.factories.small_tensors import Small
from hookline.observe.watch.pending_tensors import Note, PendingTensors, limit_of
from hookline.observe.watch.stats_engine import StatsEngine, WatchedPlace
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.observe.watch.stat_columns import Layout
    from hookline.observe.watch.stat_rows import StatRow

__all__ = ["Place", "Streaming"]

_TURNS: Final = 4
"""Forwards whose outputs are reduced together. Each has rows of its own, as two programs must not add to the same one
at a time; the flush of 12 layers takes 200 µs of a forward if it comes with each, and 50 if with every fourth."""
_LONG: Final = 4
"""Times that every module may come in one forward before it is taken for several."""
_MOST: Final = 256
"""Copies that are held at most: what one launch reads."""
_SHARE: Final = 16
"""Of what `limit_of` gives, one part in so many may be held: 1/1024 of the GPU's memory, of which a tensor that is
copied has a quarter at most. On an H200 that is 140 MiB and 35; larger ones are worth a launch of their own."""


class Place:
    """What is kept for one module."""

    __slots__ = ("small", "turns", "watched")

    def __init__(self, engine: StatsEngine, name: str) -> None:
        self.watched = engine.place(name, "")
        self.turns: tuple[WatchedPlace, ...] = ()
        """Where copies go, by forward; none before the first copy."""
        self.small = Small()

    @property
    def name(self) -> str:
        """The module's."""
        return self.watched.name

    def rows(self, device: torch.device) -> list[StatRow]:
        """All rows of the module on a device."""
        return [place.rows[device] for place in (self.watched, *self.turns) if device in place.rows]


class Streaming:
    """Statistics of any number of modules, added up where their tensors are.

    ``keeps``: whether tensors may be looked at later; if not, whoever asks at once is told at once. ``keeps_small``:
    whether small ones on a CPU may.
    """

    def __init__(self, layout: Layout, *, keeps: bool = True, keeps_small: bool = True) -> None:
        self.engine = StatsEngine(layout)
        self._keeps = keeps and not layout.by_unit
        self._keeps_small = self._keeps and keeps_small
        self._held: dict[torch.device, _Held] = {}
        self._turn = 0
        self._places = self._since = 0
        """How many modules there are, and how many tensors have come since a forward began."""

    @property
    def layout(self) -> Layout:
        """What is counted."""
        return self.engine.layout

    def place(self, name: str) -> Place:
        """A new module."""
        self._places += 1
        return Place(self.engine, name)

    def take(self, place: Place, tensor: Tensor) -> None:
        """Add the statistics of a tensor, now or later."""
        self._since += 1
        if self._since > _LONG * self._places + 16:  # what began the forward does not come again: an encoder, say
            self.begin_forward()
        if self._keeps and _torch.has_numbers(tensor) and self._kept(place, tensor):
            return
        if tensor.device not in place.watched.rows and _torch.capturing():
            place.watched.unread = "the first forward was recorded as a CUDA graph, where nothing can be made ready"
            return
        self.engine.take(place.watched, tensor)
        if place.watched.beside:
            self.engine.take_beside(place.watched, tensor)

    def _kept(self, place: Place, tensor: Tensor) -> bool:
        """Whether the tensor is kept for later."""
        if not self._keeps_small or not place.small.takes(tensor):
            return self._copied(place, tensor)
        if place.small.is_full:
            place.small.reduce(self.engine, place.watched)
        return True

    def _copied(self, place: Place, tensor: Tensor) -> bool:
        """Keep a copy of what inference mode has made, of a size that is worth it."""
        device = tensor.device
        # The first one is reduced at once: rows are made then, and the kernel that a CUDA graph may need as well.
        if device.type in _READ_AT_ONCE or not tensor.is_inference() or device not in place.watched.rows:
            return False
        held = self._held_on(device)
        if type(tensor) is not Tensor or tensor.nbytes > held.largest or _torch.capturing():
            return False
        with torch.inference_mode(False):
            copy = tensor.clone()  # which knows its version, as what is noted has to
        if not place.turns:
            place.turns = tuple(self.engine.place(place.name, f"turn {turn}") for turn in range(_TURNS))
        if not held.note(place.turns[self._turn], copy):
            return False
        if len(held) >= _MOST:
            held.flush()
        return True

    def _held_on(self, device: torch.device) -> _Held:
        found = self._held.get(device)
        return self._held.setdefault(device, _Held(self.engine, device)) if found is None else found

    def begin_forward(self) -> None:
        """The forward before is over: what was noted without a copy is held no longer, copies for some more."""
        self._since = 0
        self.engine.flush()
        self._turn = (self._turn + 1) % _TURNS
        if self._turn == 0:
            self.flush_copies()

    def flush_copies(self) -> None:
        """See to it that the copies are in the rows."""
        for held in list(self._held.values()):
            held.flush()

    def read(self, places: Sequence[Place]) -> list[dict[str, float]]:
        """The columns of each place: one transfer per device."""
        with self.engine.lock:
            for place in places:
                place.small.reduce(self.engine, place.watched)
            self.flush_copies()
            cells = self.engine.read()
            return [self._joined(place, cells) for place in places]

    def by_unit(self) -> dict[str, float]:
        """Every statistic by its name, if some are kept per unit: then nothing is kept for later."""
        with self.engine.lock:
            return self.engine.to_metrics()

    def _joined(self, place: Place, cells: dict[WatchedPlace, dict[str, float]]) -> dict[str, float]:
        """All rows of a place as one."""
        found = dict(cells[place.watched])
        for turn in place.turns:
            if turn.rows:
                found |= {name: found[name] + cells[turn][name] for name in self.layout.added}
                found |= {name: _larger(found[name], cells[turn][name]) for name in self.layout.kept}
        found["fires"] += place.small.fires
        return found

    def reset(self, places: Sequence[Place]) -> None:
        """Forget what was counted so far."""
        with self.engine.lock:
            for place in places:
                place.small.forget()
            for held in self._held.values():
                held.forget()
            self.engine.reset()


class _Held(PendingTensors):
    """The copies on one device."""

    def __init__(self, engine: StatsEngine, device: torch.device) -> None:
        def reduce(notes: Sequence[Note]) -> None:
            engine.take_all(notes)

        limit = limit_of(device) // _SHARE
        super().__init__(reduce, device, limit=limit)
        self.largest = limit // 4


_READ_AT_ONCE: Final = ("cpu", "mps", "meta")
"""Devices that do not work behind the host, as far as the engine is concerned."""


def _larger(one: float, other: float) -> float:
    return math.nan if one != one or other != other else max(one, other)
