"""Watch a model once for all who listen to its steps, and hand out the statistics of each step without waiting.

`alarm`, `BadOperationFinder` and `FlightRecorder` of ``debug.first_bad`` call `listen`. Each gets a `StepListener` and
ends its steps when it likes. All listeners of a model share one `StepMonitor`, which has one `Watch` (watch.py). On a
CPU the numbers of a step are there at once. From a GPU they come by a copy that the host does not wait for.

A place is a `WatchedPlace` (engine.py). A part is what was counted from one forward to the next: one micro-batch. A
step has none, one or several. A `RowPart` says which of its bad places was the first, as far as that is known. Bad
means that the column `BAD` of its row is above 0. `BAD` and `FIRES` are numbers of columns: row.py has their order.

`StepMonitor` uses private parts of `Watch` (``_sites``, ``_switch``, ``_engine``, ``_passes``) and sets two calls,
``on_forget`` of `Watch` and ``on_forward`` of its `Passes` (hooks.py): change them together. The columns that are
copied are those that are added up; the readers in ``debug.first_bad`` take no others. What belongs to one listener is
kept in its `StepListener`, so that one does not change what another one sees. Only `label`, the name of the batch, is
shared: ``StepAlarm.note_batch`` sets it for all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.messages import listed
from hookline.observe.host_values import sent_to_host
from hookline.observe.watch.hooks import checked_kinds
from hookline.observe.watch.row import BAD, FIRES
from hookline.observe.watch.watch import nothing_watched
from hookline.sites import _torch
from hookline.sites.targets import check_model
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from hookline.hook_types import Target
    from hookline.observe.watch.engine import WatchedPlace

NAMED: Final = 3
"""How many places that may have been the first are named beside the one that is."""


@dataclass(frozen=True, eq=False, slots=True)
class PlaceRow:
    """The numbers of one place in one part of a step."""

    place: WatchedPlace
    device: torch.device
    number: int
    """That of its row: its position in the order in which places first had a tensor."""
    row: NDArray[np.float64]

    @property
    def label(self) -> str:
        """The name of the place in reports."""
        return self.place.label

    @property
    def is_first_call(self) -> bool:
        """Whether it is known to have been bad in its first call: it was bad in all of its calls, be it one or many."""
        return bool(self.row[FIRES] == self.row[BAD])


class FirstCalls(NamedTuple):
    """Places by their first bad call."""

    places: list[PlaceRow]
    """In order: the one that went bad first comes first."""
    num_candidates: int
    """How many of them, from the beginning of the list, may have been the first; 1 where the order is known."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """The places that may have been the first beside the one that is named; none where the order is known."""
        return tuple(place.label for place in self.places[1 : self.num_candidates])

    @property
    def first(self) -> str:
        """The place that is named, and in words which others may have been the first; empty if there is none."""
        named = self.places[0].label if self.places else ""
        return f"{named}, the first among it and {listed(self.doubts, NAMED)}" if self.doubts else named


# -- the monitor -----------------------------------------------------------------------------------------------------

_MOST_PARTS: Final = 256
"""Parts of a step that are told apart. Each has a copy of the rows, and an evaluation of many batches ends no step. All
forwards after these many are one more part."""


@dataclass(slots=True)
class RowPart:
    """What was counted in one part of a step: in one micro-batch.

    Statistics are added up per place, and a module may be called several times in one forward, a shared dropout for
    instance. On a CPU a row notes when it got its first bad call. Elsewhere only the counts are known, so several
    places may have been the first; they are told as such.
    """

    places: Sequence[WatchedPlace]
    """Those that the listener asked for."""
    rows: dict[torch.device, Tensor]
    bad_rows: dict[torch.device, list[int]]
    """The rows in the order of their first bad calls, on devices where that is noted."""
    ordered_rows: dict[torch.device, int]
    """How many rows are numbered in the order of calls: those of the first step. A later one may be called anywhere."""
    label: Any
    """The name of its batch, if one was given when its forward began."""
    events: list[Any]
    """What tells that the rows have arrived on the host."""

    def of_places(self, column: int = FIRES) -> list[PlaceRow]:
        """Return the places that had a tensor, by first calls; with ``column``, those that have something there."""
        arrays = {device: rows.numpy() for device, rows in self.rows.items() if bool(rows[:, column].any())}
        found = [
            PlaceRow(place, device, row.number, arrays[device][row.number])
            for place in (self.places if arrays else ())
            for device, row in place.rows.items()
            if device in arrays and row.number < len(arrays[device]) and arrays[device][row.number, column] > 0
        ]
        return sorted(found, key=lambda each: each.number)

    def sort(self, places: Iterable[PlaceRow]) -> FirstCalls:
        """Return bad places, as `of_places` gives them for `BAD`, by their first bad calls."""
        by_device: dict[torch.device, list[PlaceRow]] = {}
        for place in places:
            by_device.setdefault(place.device, []).append(place)
        first: list[PlaceRow] = []
        after: list[PlaceRow] = []
        for device, some in by_device.items():
            found = self._sort_noted(device, some) or self._sort_counted(device, some)
            first += found.places[: found.num_candidates]
            after += found.places[found.num_candidates :]
        return FirstCalls([*first, *after], len(first))

    def _sort_noted(self, device: torch.device, places: list[PlaceRow]) -> FirstCalls | None:
        """Return the order that was noted, if it was noted for all."""
        position = {number: place for place, number in enumerate(self.bad_rows.get(device, ()))}
        if any(place.number not in position for place in places):
            return None
        return FirstCalls(sorted(places, key=lambda place: position[place.number]), 1)

    def _sort_counted(self, device: torch.device, places: list[PlaceRow]) -> FirstCalls:
        """Return the order as far as it follows from the order of first calls.

        The place that comes first is the first one whose first call was bad. One whose first call came before that may
        have been bad earlier, in a later call; it is most often one that a bad tensor has come to.
        """
        by_number = sorted(places, key=lambda place: place.number)
        ordered = self.ordered_rows.get(device, math.inf)
        sure = next((place for place in by_number if place.is_first_call and place.number < ordered), None)
        begin = ordered if sure is None else sure.number
        doubtful = [place for place in by_number if place.number < begin or place.number >= ordered]
        first = doubtful if sure is None else [sure, *doubtful]
        return FirstCalls([*first, *(place for place in by_number if place not in first)], len(first))


@dataclass(slots=True)
class StepRows:
    """The statistics of one step, and its loss; they are on the host once `is_there`."""

    number: int
    parts: Sequence[RowPart]
    loss: Tensor | float | None
    events: list[Any]

    def is_there(self) -> bool:
        """Return whether all numbers have arrived."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Wait until they have."""
        for event in self.events:
            event.synchronize()

    def of_places(self) -> list[tuple[WatchedPlace, NDArray[np.float64]]]:
        """Return for each place that had a tensor the sums of its columns; by first calls."""
        found: dict[WatchedPlace, NDArray[np.float64]] = {}
        for part in self.parts:
            for each in part.of_places():
                found[each.place] = found[each.place] + each.row if each.place in found else each.row
        return list(found.items())

    def bad_places(self, leave_out: Collection[str] = ()) -> FirstCalls:
        """Return the places that had NaN or infinity by their first bad calls."""
        bad: dict[str, PlaceRow] = {}
        num_candidates = 0
        for part in self.parts:
            calls = part.sort(each for each in part.of_places(BAD) if each.label not in leave_out)
            num_candidates = num_candidates or calls.num_candidates
            for each in calls.places:
                bad.setdefault(each.label, each)
        return FirstCalls(list(bad.values()), num_candidates)


class StepListener:
    """Hands out the statistics of the steps that its user ends.

    Args:
        monitor: What watches the model.
        asked: The target, what to leave out, and the kinds.
        stats: The statistics that it reads.
    """

    def __init__(self, monitor: StepMonitor, asked: tuple[Target, Target, list[str]], stats: Sequence[str]) -> None:
        self.monitor = monitor
        self.asked = asked
        self.stats = stats
        self.places: list[WatchedPlace] = []
        """Those that it asked for."""
        self.parts: list[RowPart] = []
        """What has come of the step under way."""
        self._pending: deque[StepRows] = deque()
        """Steps whose numbers are on their way to the host."""

    def end_step(self, number: int, loss: Any = None) -> None:
        """Take the statistics since the last call as those of a step; send its numbers to the host without waiting."""
        self.monitor.end_step()
        parts, self.parts = self.parts, []
        events = [event for part in parts for event in part.events]
        host = copy_to_host(loss.detach(), events) if isinstance(loss, Tensor) else loss
        self._pending.append(StepRows(number, parts, host, events))

    def arrived(self, *, wait: bool = False, until: int = -1) -> list[StepRows]:
        """Return the steps whose numbers are on the host, the oldest first, each once; wait for those up to `until`."""
        found = []
        while self._pending and (wait or self._pending[0].number <= until or self._pending[0].is_there()):
            step = self._pending.popleft()
            step.wait()
            found.append(step)
        return found

    def coming(self) -> list[StepRows]:
        """Return the steps that have not been taken, and wait for their numbers; `arrived` returns them again."""
        found = list(self._pending)
        for step in found:
            step.wait()
        return found

    def remove(self, *, quiet: bool = False) -> None:
        """Listen no more; the last one takes the hooks off."""
        self.monitor.leave(self, quiet=quiet)


class StepMonitor:
    """The one watch of a model for all who listen to its steps; each forward is a part of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.label: Any = None
        """The name of the batch of the forwards that follow."""
        self._watch = nothing_watched(model)
        self._listeners: list[StepListener] = []
        self._begun: list[Any] = []
        """The label of the forward that has begun since the last part, if one has."""
        self._ordered_rows: dict[torch.device, int] = {}

    def add(self, listener: StepListener) -> None:
        """Watch for one more listener.

        A new watch of all that is asked for takes the place of the old one: rows are numbered in the order of first
        calls, so no place can be added to a watch that has begun.
        """
        listeners = [*self._listeners, listener]
        made = nothing_watched(self._watch.model, [name for each in listeners for name in each.stats])
        try:
            places = [made._sites.choose(*each.asked) for each in listeners]
            made._switch()  # it follows no optimizer: listeners say when steps are over
        except BaseException:
            made.remove(quiet=True)
            raise
        self._end_part()
        made._passes.during.load_state_dict(self._watch._passes.during.state_dict())
        self._watch.remove(quiet=True)
        made._passes.on_forward, made.on_forget = self._begin_forward, self._forget_step
        self._watch, self._listeners, self._ordered_rows = made, listeners, {}
        for each, of_each in zip(listeners, places, strict=True):
            each.places = of_each

    def leave(self, listener: StepListener, *, quiet: bool) -> None:
        """Watch for one less; the last one takes the hooks off."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                _MONITORS.pop(id(self._watch.model), None)
                self._watch.remove(quiet=quiet)

    def end_step(self) -> None:
        """End a part, as somebody's step is over."""
        self._watch._passes.during.note_step()
        self._end_part()

    def _begin_forward(self) -> None:
        """Begin a part with a forward that counts."""
        if not _torch.capturing() and min(len(each.parts) for each in self._listeners) < _MOST_PARTS:
            self._end_part()
        self._begun = self._begun or [self.label]

    def _forget_step(self) -> None:
        """Drop what has come: it was an evaluation before training."""
        self._begun = []
        for each in self._listeners:
            each.parts = []

    def _end_part(self) -> None:
        """Hand out what was counted since the last part, and count from zero."""
        if not self._begun:
            return
        engine = self._watch._engine
        engine.flush()
        added = len(engine.layout.added)
        events: list[Any] = []
        rows = {device: copy_to_host(rows.copy()[:, :added], events) for device, rows in engine.device_rows.items()}
        self._ordered_rows = self._ordered_rows or {device: len(values) for device, values in rows.items()}
        bad_rows = {device: found for device, of in engine.device_rows.items() if (found := of.take_bad_order())}
        self._watch.reset()  # or one NaN would stay in the sums of its place
        label = self._begun.pop()
        for each in self._listeners:
            if len(each.parts) <= _MOST_PARTS:  # a listener that ends no step must not collect parts without end
                each.parts.append(RowPart(each.places, rows, bad_rows, self._ordered_rows, label, events))


_MONITORS: Final[WeakValueDictionary[int, StepMonitor]] = WeakValueDictionary()
"""By the identity of the model. A monitor keeps its model alive, and its listeners keep the monitor alive."""


def listen(
    model: nn.Module,
    target: Target = "*",
    *,
    on: Collection[str],
    exclude: Target = None,
    stats: Sequence[str] = ("norm",),
) -> StepListener:
    """Watch a model for one more listener, and return what hands out steps.

    Args:
        model: The model.
        target: Which modules, and with them the parameters below.
        on: What of them, as for `watch`.
        exclude: Modules and parameters to leave out.
        stats: The statistics that are read of each row; what is not finite is counted in any case.
    """
    check_model(model, target)
    kinds = checked_kinds(on)
    if {"param", "param_grad"} & set(kinds):
        raise OptionError("on= names what forwards and backwards make, not 'param' or 'param_grad': watch() has those.")
    model = unwrap(model)
    monitor = _MONITORS.setdefault(id(model), StepMonitor(model))
    listener = StepListener(monitor, (target, exclude, kinds), stats)
    monitor.add(listener)
    return listener


def copy_to_host(values: Tensor, events: list[Any]) -> Tensor:
    """Copy numbers to the host without waiting; what tells that they have arrived is added to ``events``."""
    if values.device.type != "cuda":
        return values.cpu() if values.dim() else values.cpu().clone()
    host: Tensor = sent_to_host(values)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    events.append(event)
    return host
