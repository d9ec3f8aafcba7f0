"""Measure where the time of a step goes: forward and backward, by module and by function.

Users call `profile`. It puts the hooks of a `ProfileRecorder` on every site, and shows what they recorded as a table or
as metrics.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from hookline.errors import OptionError
from hookline.observe.profile.profile_hooks import CpuClock, ProfileRecorder, Span, Visit, clock_for
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.functions.attach_function import attach_to_functions
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import FUNCTION, MODULE, Kind
from hookline.sites.targets import Named, select
from hookline.sites.wrappers import unwrap
from hookline.tables import OFF, ON, ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Target
    from hookline.sites.hook_at_site import Attachment
    from hookline.sites.kinds import SiteType

__all__ = ["Profile", "ProfileRow", "profile"]


def profile(
    model: nn.Module,
    target: Target = "*",
    *,
    functions: Any = None,
    exclude: Target = None,
    backward: bool = True,
    max_spans: int = 200_000,
) -> Profile:
    """Measure where the time of a model goes.

    Recipe::

        with hookline.profile(model, "layers.#", functions="torch.nn.functional.*") as prof:
            model(x).sum().backward()
        print(prof)

    Times are those of the device the model is on: on a GPU they are taken by events in its stream, which are read
    when you ask for them, so the run does not wait. What a site spends in sites below it that are measured too is in
    its total and not in its own time, so own times add up to the whole. The hooks themselves take some microseconds
    per site; they count as own time of whatever is around it.

    The backward time of a site lasts from when gradients come to its outputs until they leave for its inputs. A site
    none of whose inputs takes a gradient (an embedding) counts as being at it until the next one begins, and what
    becomes of parameters before a module uses them may count for the module around it. A forward that activation
    checkpointing repeats is no call; its time is backward time of the modules that are repeated. A call that raises is
    counted for the model as a whole alone. In compiled code the hooks keep the compiler from joining what is on either
    side of them, so the parts of a compiled model cost more measured than not; functions do not show there.

    Args:
        model: The model. It is measured as a whole too, whatever the target.
        target: Which modules to measure, as in ``attach``.
        functions: Which functions to measure within the model, as in ``attach_function``; None for none.
        exclude: Modules to leave out.
        backward: Measure the backward pass as well.
        max_spans: How many calls to keep; later ones are counted in ``dropped`` and left out.
    """
    if not isinstance(max_spans, int):
        raise OptionError(f"max_spans= must be a whole number, got {max_spans!r}.")
    if max_spans < 1:
        raise OptionError(f"max_spans= must be at least 1, got {max_spans}.")
    model = unwrap(model)
    chosen = [named for named in select(model, target, exclude=exclude) if named[1] is not model]
    places = [] if functions is None else find_places(functions)
    found = Profile(ProfileRecorder(clock_for(model), max_spans, takes_backward=backward))
    try:
        found._attach(model, chosen, places)
    except BaseException:
        found.remove()
        raise
    found.reset()  # attaching took its time
    return found


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The times and sizes of one module or function, all its calls together."""

    name: str
    """Dotted name of the module, empty for the model; or full name of the function."""
    kind: str
    """Its class; "function" for a function."""
    calls: int
    """The number of its calls."""
    forward_ms: float
    """Time in its forwards; a call that it makes of itself is part of the one around it."""
    forward_own_ms: float
    """The same without what is measured below it."""
    backward_ms: float
    """Time in its backwards."""
    backward_own_ms: float
    """The same without what is measured below it."""
    output_bytes: int
    """Size of the tensors it has returned."""
    allocated_bytes: int | None
    """The bytes its forwards have added to what is allocated on the GPU; None elsewhere."""

    def numbers(self) -> dict[str, float]:
        """Return all its numbers by name."""
        given = dataclasses.asdict(self).items()
        return {key: float(value) for key, value in given if key not in ("name", "kind") and value is not None}


_NOTHING: Final = ProfileRow("", "", 0, 0.0, 0.0, 0.0, 0.0, 0, None)


class Profile(ShownAsTable):
    """The measurements of one ``profile``; prints as a table.

    Recipe: ``with hookline.profile(model) as prof: ...``, then ``print(prof)``, ``prof.rows`` or
    ``prof.to_metrics()``.
    """

    def __init__(self, recorder: ProfileRecorder) -> None:
        self._recorder = recorder
        self._clock = recorder.clock
        self._handles = HandleSet()
        self._began = self._clock.mark()
        self._stopped: Any = None

    def reset(self) -> None:
        """Forget what was measured so far, and go on."""
        self._recorder.reset()
        self._began = self._clock.mark()
        if self._stopped is not None:
            self._stopped = self._began

    def remove(self) -> None:
        """Take the hooks off; what was measured stays."""
        if self._stopped is None:
            self._stopped = self._clock.mark()
        self._handles.remove(quiet=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # As with handles: a copied or unpickled model carries no hooks, so a profile it keeps has measured nothing.
        return _nothing_measured, ()

    # -- what was measured -------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[ProfileRow, ...]:
        """Every module and function that was called, in the order of their first calls."""
        spans = [span for span in tuple(self._recorder.spans) if span.end is not None]
        visits = tuple(self._recorder.visits)
        self._clock.settle()
        when = self._clock.since(self._began)
        return _rows_of({span: when(span.end) - when(span.start) for span in spans}, _own_seconds(visits, when))

    @property
    def total(self) -> ProfileRow:
        """The model as a whole."""
        return next((row for row in self.rows if row.name == ""), _NOTHING)

    @property
    def wall_ms(self) -> float:
        """Time from the beginning of the measurement to its end, or until now, whatever was done in it."""
        stopped = self._clock.mark() if self._stopped is None else self._stopped
        self._clock.settle()
        return 1e3 * self._clock.since(self._began)(stopped)

    @property
    def dropped(self) -> int:
        """Calls that were left out, because there were ``max_spans`` already."""
        return self._recorder.dropped

    def to_metrics(self) -> dict[str, float]:
        """Return the rows as numbers: ``"layers.0/forward_ms"`` and so on, ``"forward_ms"`` for the whole model."""
        metrics: dict[str, float] = {}
        for row in self.rows:
            prefix = f"{row.name}/" if row.name else ""
            metrics |= {f"{prefix}{key}": value for key, value in row.numbers().items()}
        return metrics

    def _table(self) -> Table:
        return _table_of(self.rows, self._clock.name, self.wall_ms, self.dropped)

    def _state(self) -> str:
        return ON if self._stopped is None else OFF

    # -- hooks -------------------------------------------------------------------------------------------

    def _attach(self, model: nn.Module, chosen: list[Named], places: list[Any]) -> None:
        recorder, whole = self._recorder, [("", model)]
        gradients: dict[Kind, Any] = {}
        if recorder.takes_backward:
            gradients = {Kind.BACKWARD_PRE: recorder.enter_backward, Kind.BACKWARD: recorder.leave_backward}
        modules: dict[Kind, Any] = {Kind.FORWARD_PRE: recorder.enter_module, **gradients}
        functions = {Kind.FORWARD_PRE: recorder.enter_function, Kind.FORWARD: recorder.leave_function, **gradients}
        for kind, hook in modules.items():
            self._handles.add(attach_to_modules(self._attachment(MODULE, kind, hook), model, whole + chosen))
        self._handles.add(
            attach_to_modules(self._attachment(MODULE, Kind.FORWARD, recorder.leave_module), model, chosen)
        )
        # However the model's own call ends, all calls within it have ended, too.
        always = self._attachment(MODULE, Kind.FORWARD, recorder.leave_module, always_call=True)
        self._handles.add(attach_to_modules(always, model, whole))
        for kind, hook in functions.items() if places else ():
            able = [place for place in places if not (kind.is_gradient and place.is_operator)]
            self._handles.add(attach_to_functions(self._attachment(FUNCTION, kind, hook), able, model))

    def _attachment(self, site_type: SiteType, kind: Kind, hook: Any, *, always_call: bool = False) -> Attachment:
        attachment = new_attachment(
            hook, kind, AttachOptions(observe=True, always_call=always_call, name="profile"), site_type=site_type
        )
        if kind is Kind.BACKWARD:
            attachment.clock = self._clock.mark
        return attachment


def _nothing_measured() -> Profile:
    found = Profile(ProfileRecorder(CpuClock(), 1, takes_backward=False))
    found.remove()
    return found


# -- the backward pass -----------------------------------------------------------------------------------------------
#
# Autograd runs what a forward has made in the reverse order, so a backward pass goes through the calls as the forward
# did, last one first. That tells what the marks do not. A call none of whose inputs takes a gradient (an embedding)
# sees no gradient leave; it is over when another call begins, or the call around it is over. A call that sends its
# gradient before all calls within it are over is over with the last of them. Each moment is one call's own, so own
# times are never negative, and add up to the whole whatever the marks say.


class _TimedVisit:
    """A visit on the time line of its thread."""

    def __init__(self, visit: Visit, when: Callable[[Any], float]) -> None:
        self.visit = visit
        self.depth = sum(1 for _ in visit.span.above())
        self.start = when(visit.start)
        self.known = visit.end is not None
        """Whether the end is exact, and not just an upper bound."""
        last = visit.end if self.known else visit.seen
        self.end = math.inf if last is None else when(last)

    def is_around(self, other: _TimedVisit) -> bool:
        """Return whether ``other`` is at a call within the call of this visit, or repeats its forward meanwhile."""
        if other.visit.repeats and not self.visit.repeats:
            return True
        same = self.visit.repeats == other.visit.repeats
        return same and any(around is self.visit.span for around in other.visit.span.above())


def _own_seconds(visits: Sequence[Visit], when: Callable[[Any], float]) -> dict[Span, float]:
    """Return the time of backward passes that is each call's own; ``when`` gives the seconds of a mark."""
    threads: dict[int, list[_TimedVisit]] = defaultdict(list)
    for visit in visits:
        threads[visit.thread].append(_TimedVisit(visit, when))
    own: dict[Span, float] = defaultdict(float)
    for items in threads.values():
        _end_all(items)
        _sweep([item for item in items if item.end > item.start], own)
    return own


def _end_all(items: list[_TimedVisit]) -> None:
    """End visits without any end, since their pass was cut short, and extend every visit to the end of those within."""
    last: dict[int, float] = defaultdict(float)
    for item in items:
        known = item.end if math.isfinite(item.end) else item.start
        last[item.visit.task] = max(last[item.visit.task], item.start, known)
    for item in items:
        item.end = min(item.end, last[item.visit.task])
    visits = [item for item in items if not item.visit.repeats and item.known]
    found = {(item.visit.task, item.visit.span): item for item in visits}
    for item in sorted(visits, key=lambda item: -item.depth):  # the innermost first
        around = (found.get((item.visit.task, span)) for span in item.visit.span.above())
        nearest = next((one for one in around if one is not None), item)
        nearest.end = max(nearest.end, item.end)


def _sweep(items: list[_TimedVisit], own: dict[Span, float]) -> None:
    """Go along the time line with a stack of visits that are under way; the time belongs to its top."""
    # At one moment: ends before beginnings, the inner end first, the outer beginning first.
    events = [(item.end, 0, -item.depth, item) for item in items]
    events += [(item.start, 1, item.depth, item) for item in items]
    events.sort(key=lambda event: event[:3])
    stack: list[_TimedVisit] = []
    last = 0.0
    for moment, begins, _, item in events:
        if stack:
            own[stack[-1].visit.span] += moment - last
        last = moment
        if begins:
            while stack and not stack[-1].is_around(item):
                stack.pop()
            stack.append(item)
        elif item in stack:
            del stack[stack.index(item) :]


# -- rows ------------------------------------------------------------------------------------------------------------


class _SiteTotals:
    """The spans of one site, added up."""

    def __init__(self, first: Span) -> None:
        self.first = first
        self.calls = self.output_bytes = 0
        self.ms = [0.0, 0.0, 0.0, 0.0]
        self.allocated: int | None = None

    def add(self, span: Span, *seconds: float, nested: bool) -> None:
        """Add a call with its four times; of a call within another one of the site, only its own times are new."""
        self.calls += 1
        for index, more in enumerate(seconds):
            if index % 2 or not nested:
                self.ms[index] += 1e3 * more
        self.output_bytes += span.output_bytes
        if span.allocated is not None:
            self.allocated = (self.allocated or 0) + (0 if nested else span.allocated)

    def row(self) -> ProfileRow:
        """Return the totals."""
        forward, forward_own, backward, backward_own = self.ms
        return ProfileRow(
            self.first.name, self.first.kind, self.calls, forward, forward_own, backward, backward_own,
            self.output_bytes, self.allocated,
        )  # fmt: skip


def _rows_of(forward: dict[Span, float], own: dict[Span, float]) -> tuple[ProfileRow, ...]:
    """Return one row per site, in the order of their first calls.

    Args:
        forward: The seconds of each call that has ended, in the order they began in.
        own: The seconds of backward passes at each call, without those at calls within it.
    """
    forward_own = dict(forward)
    backward_own: dict[Span | None, float] = defaultdict(float)
    for span, seconds in own.items():
        backward_own[span if span in forward else _around(span, forward)] += seconds
    backward = {span: backward_own[span] for span in forward}
    for span in reversed(forward):  # what is inside comes later, so by now it is complete
        around = _around(span, forward)
        if around is not None:
            forward_own[around] -= forward[span]
            backward[around] += backward[span]
    sums: dict[tuple[str, str], _SiteTotals] = {}
    for span in forward:
        total = sums.setdefault((span.name, span.kind), _SiteTotals(span))
        times = forward[span], forward_own[span], backward[span], backward_own[span]
        total.add(span, *times, nested=_is_nested(span, forward))
    return tuple(each.row() for each in sums.values())


def _is_nested(span: Span, measured: dict[Span, Any]) -> bool:
    """Return whether it is part of another call of the same site, as in a model that calls itself."""
    return any((around.name, around.kind) == (span.name, span.kind) for around in span.above() if around in measured)


def _around(span: Span, measured: dict[Span, Any]) -> Span | None:
    """Return the nearest call around it that is measured: one that raised is not."""
    return next((around for around in span.above() if around in measured), None)


_MAX_ROWS = 60
_MAX_NAME = 60


def _table_of(rows: Sequence[ProfileRow], device: str, wall_ms: float, dropped: int) -> Table:
    """Return ``rows`` in columns, the slowest first, with what they add up to."""
    if not rows:
        return Table(title=f"Nothing was measured in {wall_ms:.1f} ms: no call of the model has ended.")
    on_gpu = any(row.allocated_bytes is not None for row in rows)
    header = ("name", "type", "calls", "forward ms", "own", "backward ms", "own", "output MiB", "allocated MiB")
    ordered = sorted(rows, key=lambda row: -(row.forward_ms + row.backward_ms))
    columns = len(header) if on_gpu else len(header) - 1
    cells = [_cells(row)[:columns] for row in ordered]
    forward, backward = (sum(getattr(row, f"{way}_own_ms") for row in rows) for way in ("forward", "backward"))
    sums = f"{forward:,.2f} ms forward and {backward:,.2f} ms backward, of {wall_ms:,.2f} ms ({device})"
    foot = [f"own times add up to {sums}"]
    if dropped:
        foot.append(f"{dropped:,} more calls were left out; raise max_spans=.")
    rest = " that took less; all of them are in .rows"
    return Table(
        header[:columns], cells, numbers=range(2, columns), foot=foot, most=_MAX_ROWS, rest=rest, heat="column"
    )


def _cells(row: ProfileRow) -> tuple[str, ...]:
    times = (row.forward_ms, row.forward_own_ms, row.backward_ms, row.backward_own_ms)
    sizes = (row.output_bytes, row.allocated_bytes or 0)
    name = row.name or "(the model)"
    if len(name) > _MAX_NAME:
        name = f"{name[:20]}…{name[21 - _MAX_NAME :]}"
    return (
        name,
        row.kind,
        f"{row.calls:,}",
        *(f"{ms:,.2f}" for ms in times),
        *(f"{size / 2**20:,.2f}" for size in sizes),
    )
