"""Watch a model once for all who listen to its steps, and hand out the statistics of each step without waiting.

`alarm`, `BadOperationFinder` and `FlightRecorder` call `listen`. Whoever looks at the whole model serves all others on
it: they share one `Watch`, and each ends its steps when it likes. On a CPU the numbers of a step are there at once;
from a GPU they come by a copy that runs beside the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from hookline.observe.watch.bad_order import CalledPlace, CallOrder, FirstCalls
from hookline.observe.watch.local_gradients import LOCAL_GRADIENT
from hookline.observe.watch.row import BAD, FIRES
from hookline.observe.watch.watch import Watch, watch
from hookline.sites.targets import select

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hookline.hook_types import Target
    from hookline.observe.watch.place import WatchedPlace

__all__ = ["PlaceRow", "RowPart", "StepListener", "StepMonitor", "StepRows", "copy_to_host", "listen"]

_APART: Final = 64
"""Parts of a step that are told apart where no forward is in training mode: an evaluation before training makes no
step, and each holds a copy of the rows."""
_MOST_PARTS: Final = 1024
"""Parts that are kept for a listener that ends no step."""


class RowPart:
    """What was counted in one part of a step: in one micro-batch, if somebody listens to forwards."""

    def __init__(self, places: Sequence[WatchedPlace], rows: dict[torch.device, Tensor], order: CallOrder) -> None:
        self._places, self._rows, self.order = places, rows, order
        self._is_sent = False
        self.events: list[Any] = []
        """What tells that the rows have arrived on the host, once they were sent there."""

    def send(self) -> None:
        """Copy the rows to the host, once, without waiting."""
        if not self._is_sent:
            self._is_sent = True
            self._rows = {device: copy_to_host(values, self.events) for device, values in self._rows.items()}

    def of_places(self, owns: Callable[[WatchedPlace], bool], column: int = FIRES) -> list[PlaceRow]:
        """Return the places that had a tensor, by first calls; with ``column``, those that have something there."""
        arrays = {device: rows.numpy() for device, rows in self._rows.items() if bool(rows[:, column].any())}
        if not arrays:
            return []
        found = [
            PlaceRow(place, device, row.number, arrays[device][row.number])
            for place in self._places
            for device, row in place.rows.items()
            if device in arrays and row.number < len(arrays[device]) and arrays[device][row.number, column] > 0
        ]
        return sorted((each for each in found if owns(each.place)), key=lambda each: each.number)


class PlaceRow(NamedTuple):
    """The numbers of one place in one part of a step."""

    place: WatchedPlace
    device: torch.device
    number: int
    """That of its row: its position in the order in which places first had a tensor."""
    row: NDArray[np.float64]

    def called(self) -> CalledPlace:
        """Return it as `CallOrder` sorts it."""
        return CalledPlace(self.place.label, self.device, self.number, self.row[FIRES] == (self.row[BAD] or 1.0))


@dataclass(slots=True)
class StepRows:
    """The statistics of one step, and its loss; they are on the host once `is_there`."""

    number: int
    parts: list[tuple[RowPart, Any]]
    """Each with what the listener had said of its forward."""
    owns: Callable[[WatchedPlace], bool]
    """Tells the places that were asked for from those of other listeners."""
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
        for part, _ in self.parts:
            for place, _, _, row in part.of_places(self.owns):
                found[place] = found[place] + row if place in found else row
        return list(found.items())

    def bad_places(self, leave_out: Collection[str] = ()) -> FirstCalls:
        """Return the places that had NaN or infinity by their first bad calls."""
        bad: dict[str, CalledPlace] = {}
        num_candidates = 0
        for part, _ in self.parts:
            found = [each.called() for each in part.of_places(self.owns, BAD)]
            calls = part.order.sort(each for each in found if each.label not in leave_out)
            num_candidates = num_candidates or calls.num_candidates
            for each in calls.places:
                bad.setdefault(each.label, each)
        return FirstCalls(list(bad.values()), num_candidates)


class StepListener:
    """Hands out the statistics of the steps that one user ends.

    Args:
        monitor: What watches the model.
        owns: Tells the places that are asked for from those of other listeners.
        by_forward: Whether each forward is a part of its own.
    """

    def __init__(self, monitor: StepMonitor, owns: Callable[[WatchedPlace], bool], *, by_forward: bool) -> None:
        self._monitor, self._owns = monitor, owns
        self.by_forward = by_forward
        self.label: Any = None
        """What is said of the forwards that follow."""
        self.parts: list[tuple[RowPart, Any]] = []
        """What has come of the step under way; the monitor adds to it."""
        self._pending: deque[StepRows] = deque()

    @property
    def watch(self) -> Watch:
        """The watch, which others may share."""
        return self._monitor.watch

    def end_step(self, number: int, loss: Any = None) -> None:
        """Take the statistics since the last call as those of a step."""
        self._monitor.cut()
        parts, self.parts = self.parts, []
        for part, _ in parts:
            part.send()
        self._add(number, parts, loss)

    def note_loss(self, number: int, loss: Any) -> None:
        """Take the loss of a step that has ended; it comes by itself."""
        self._add(number, [], loss)

    def _add(self, number: int, parts: list[tuple[RowPart, Any]], loss: Any) -> None:
        events = [event for part, _ in parts for event in part.events]
        host = copy_to_host(loss.detach(), events) if isinstance(loss, Tensor) else loss
        self._pending.append(StepRows(number, parts, self._owns, host, events))

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
        self._monitor.leave(self, quiet=quiet)


def listen(
    model: nn.Module,
    target: Target = "*",
    *,
    on: Collection[str],
    stats: Collection[str],
    exclude: Target = None,
    by_forward: bool = False,
    **options: Any,
) -> StepListener:
    """Watch a model, by the hooks of another listener where they are enough, and return what hands out steps.

    Args:
        model: The model.
        target: Which modules.
        on: What of them, as for `watch`.
        stats: Which statistics.
        exclude: Modules to leave out.
        by_forward: Whether each forward of a step is told apart.
        options: As for `watch`, where this listener makes it.
    """
    is_whole = isinstance(target, str) and target == "*" and exclude is None
    is_shared = is_whole or LOCAL_GRADIENT not in on  # the parameters of a part have no names to know them by
    monitors = [each for each in _MONITORS if each.model is model and (is_whole or each.is_whole)] if is_shared else []
    monitor = monitors[0] if monitors else StepMonitor(model)
    monitor.ask(target, exclude, on, stats, options)
    names = {name for name, _ in select(model, target, exclude=exclude)} if is_shared and not is_whole else None

    def owns(place: WatchedPlace) -> bool:
        return place.kind in on and (names is None or place.name in names)

    listener = StepListener(monitor, owns, by_forward=by_forward)
    monitor.listeners.append(listener)
    if is_shared:
        _MONITORS.add(monitor)
    return listener


class StepMonitor:
    """The one watch of all who listen."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_whole = False
        """Whether all modules are watched."""
        self.watch: Watch
        self._asked: dict[str, Any] = {}
        """The options of the watch, all that its listeners have asked for."""
        self.listeners: list[StepListener] = []
        """Who statistics are handed to."""
        self._ordered_rows: dict[torch.device, int] = {}
        self._has_begun = False
        """Whether a forward has begun since the last part."""
        self._labels: dict[StepListener, Any] = {}
        self._forgotten = 0

    def ask(
        self, target: Target, exclude: Target, kinds: Collection[str], stats: Collection[str], options: dict[str, Any]
    ) -> None:
        """Watch what a listener asks for as well; a watch that has not all of it is replaced by one that has."""
        is_whole = self.is_whole or (isinstance(target, str) and target == "*" and exclude is None)
        wanted = {
            "on": tuple(dict.fromkeys([*self._asked.get("on", ()), *kinds])),
            "stats": tuple(dict.fromkeys([*self._asked.get("stats", ()), *stats])),
            **{name: value for name, value in {**self._asked, **options}.items() if name not in ("on", "stats")},
        }
        if self.listeners and (wanted, is_whole) == (self._asked, self.is_whole):
            return
        made = watch(self.model, "*" if is_whole else target, exclude=exclude if not is_whole else None, **wanted)
        if self.listeners:
            self.watch.remove(quiet=True)
        self.watch, self._asked, self.is_whole = made, wanted, is_whole
        self._ordered_rows, self._forgotten = {}, 0
        self._forget_step()
        made._passes.on_forward = self._begin_forward

    def _forget_step(self) -> None:
        """Drop what has come of the steps under way."""
        self._has_begun = False
        for listener in self.listeners:
            listener.parts = []

    def leave(self, listener: StepListener, *, quiet: bool) -> None:
        """Hand statistics to one less; the last one takes the hooks off."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            if not self.listeners:
                _MONITORS.discard(self)
                self.watch.remove(quiet=quiet)

    def _begin_forward(self) -> None:
        """Begin a part, with a forward that counts, if somebody tells forwards apart."""
        counts = [len(each.parts) for each in self.listeners if each.by_forward]
        if self.watch.times_forgotten != self._forgotten:  # it was an evaluation, and rows began anew
            self._forgotten = self.watch.times_forgotten
            self._forget_step()
        elif counts and (max(counts) < _APART or all(self.watch._passes.counter.mode())):
            self.cut()
        if not self._has_begun:
            self._labels = {each: each.label for each in self.listeners}
        self._has_begun = True

    def cut(self) -> None:
        """End a part: hand what was counted in it to all, and count from zero."""
        if not self._has_begun:
            return
        self._has_begun = False
        engine = self.watch._engine
        engine.flush()
        rows = {device: rows.copy() for device, rows in engine.device_rows.items()}
        self._ordered_rows = self._ordered_rows or {device: len(values) for device, values in rows.items()}
        order = CallOrder.take(engine.device_rows, self._ordered_rows)
        self.watch.reset()  # or one NaN would stay in the sums of its place
        part = RowPart(list(engine.places.values()), rows, order)
        for listener in self.listeners:
            listener.parts.append((part, self._labels.get(listener)))
            del listener.parts[:-_MOST_PARTS]


_MONITORS: Final[WeakSet[StepMonitor]] = WeakSet()
"""Those that somebody listens to."""


def copy_to_host(values: Tensor, events: list[Any]) -> Tensor:
    """Copy numbers to the host without waiting; what tells that they have arrived is added to ``events``."""
    if values.device.type == "cpu":
        return values.clone() if not values.dim() else values
    if values.device.type != "cuda":
        return values.cpu()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    events.append(event)
    return host
