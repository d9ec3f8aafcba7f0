"""Add up the calls that a profile has recorded, per module and function, and lay them out as a table.

`Profile` calls it with the spans and visits of its recorder.

Autograd runs what a forward has made in the reverse order, so a backward pass goes through the calls as the forward
did, last one first. That tells what the marks do not. A call none of whose inputs takes a gradient (an embedding, say)
sees no gradient leave; it is over when another call begins, or the call around it is over. A call that sends its
gradient before all calls within it are over is over with the last of them. Each moment is one call's own, so own times
are never negative, and add up to the whole whatever the marks say.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookline.tables import Table

__all__ = ["Measured", "ProfileRow", "Span", "Stretch", "Visit", "rows_of", "stretches_of", "table_of"]


@dataclass(slots=True, eq=False)
class Span:
    """One call of one site."""

    name: str
    kind: str
    step: int
    call: int
    where: str | None = None
    """Of a function: the module it was called in."""
    parent: Span | None = None
    """The call around it, of the sites that are measured."""
    thread: int = 0
    start: Any = None
    end: Any = None
    """Marks of the clock; there is no end if the call raised."""
    visit: Visit | None = None
    """Its latest backward pass."""
    output_bytes: int = 0
    allocated: int | None = None

    def above(self) -> Iterator[Span]:
        """Yield the calls around it, the nearest first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent


@dataclass(slots=True, eq=False)
class Visit:
    """One backward pass at one call, or its forward once more within that pass."""

    span: Span
    task: int
    """The number of the pass."""
    thread: int
    start: Any
    """The mark when the first gradient of an output was there."""
    end: Any = None
    """The mark when the last gradient left for an input; None if none did."""
    seen: Any = None
    """If there is no end: the mark when the pass had come past all that the call has made."""
    repeats: bool = False
    """Whether activation checkpointing repeats the forward; then the marks are around that."""


class Stretch(NamedTuple):
    """A visit as it lies on the time line of its thread, in seconds since the profile began."""

    visit: Visit
    start: float
    end: float
    own: float
    """The part of that time that belongs to no visit within it."""


class Measured(NamedTuple):
    """All calls and visits that are over, in seconds since the profile began."""

    forwards: dict[Span, tuple[float, float]]
    """Start and end of every call, in the order they began in."""
    backwards: list[Stretch]


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
        self.opened = self.closed = math.nan
        self.own = 0.0

    def is_around(self, span: Span) -> bool:
        """Return whether ``span`` was called within the call of this visit."""
        return any(around is self.visit.span for around in span.above())


def stretches_of(visits: Sequence[Visit], when: Callable[[Any], float]) -> list[Stretch]:
    """Return the visits on their time lines, one line per thread; ``when`` gives the seconds of a mark."""
    threads: dict[int, list[_TimedVisit]] = defaultdict(list)
    for visit in visits:
        threads[visit.thread].append(_TimedVisit(visit, when))
    stretches: list[Stretch] = []
    for items in threads.values():
        _end_all(items)
        _widen(items)
        stretches += _sweep(items)
    return stretches


def _end_all(items: list[_TimedVisit]) -> None:
    """End visits without any end, since their pass was cut short, with what is known of that pass."""
    last: dict[int, float] = defaultdict(float)
    for item in items:
        known = item.end if math.isfinite(item.end) else item.start
        last[item.visit.task] = max(last[item.visit.task], item.start, known)
    for item in items:
        item.end = min(item.end, last[item.visit.task])


def _widen(items: list[_TimedVisit]) -> None:
    """Extend every visit to the end of those within it."""
    visits = [item for item in items if not item.visit.repeats and item.known]
    found = {(item.visit.task, item.visit.span): item for item in visits}
    for item in sorted(visits, key=lambda item: -item.depth):  # the innermost first
        for span in item.visit.span.above():
            around = found.get((item.visit.task, span))
            if around is not None:
                around.end = max(around.end, item.end)
                break


def _sweep(items: list[_TimedVisit]) -> Iterator[Stretch]:
    """Go along the time line with a stack of visits that are under way; the time belongs to its top."""
    items = [item for item in items if item.end > item.start]
    # At one moment: ends before beginnings, the inner end first, the outer beginning first.
    events = [(item.end, 0, -item.depth, item) for item in items]
    events += [(item.start, 1, item.depth, item) for item in items]
    events.sort(key=lambda event: event[:3])
    stack: list[_TimedVisit] = []
    last = 0.0
    for moment, begins, _, item in events:
        if stack:
            stack[-1].own += moment - last
        if begins:
            _end_others(stack, item, moment)
            item.opened = moment
            stack.append(item)
        elif item in stack:
            while stack[-1] is not item:
                stack.pop().closed = moment
            stack.pop().closed = moment
        last = moment
    for item in items:
        yield Stretch(item.visit, item.opened, item.closed, item.own)


def _end_others(stack: list[_TimedVisit], item: _TimedVisit, moment: float) -> None:
    """End the visits that ``item`` is not part of, but for those whose forward is repeated meanwhile."""
    repeats = item.visit.repeats
    while stack:
        top = stack[-1]
        if (repeats and not top.visit.repeats) or (top.visit.repeats == repeats and top.is_around(item.visit.span)):
            return
        stack.pop().closed = moment


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


def rows_of(measured: Measured) -> tuple[ProfileRow, ...]:
    """Return one row per site, in the order of their first calls."""
    forwards = measured.forwards
    forward = {span: end - start for span, (start, end) in forwards.items()}
    forward_own = dict(forward)
    backward_own: dict[Span | None, float] = defaultdict(float)
    for stretch in measured.backwards:
        span = stretch.visit.span
        backward_own[span if span in forwards else _around(span, forwards)] += stretch.own
    backward = {span: backward_own[span] for span in forwards}
    for span in reversed(forwards):  # what is inside comes later, so by now it is complete
        around = _around(span, forwards)
        if around is not None:
            forward_own[around] -= forward[span]
            backward[around] += backward[span]
    sums: dict[tuple[str, str], _SiteTotals] = {}
    for span in forwards:
        total = sums.setdefault((span.name, span.kind), _SiteTotals(span))
        times = forward[span], forward_own[span], backward[span], backward_own[span]
        total.add(span, *times, nested=_is_nested(span, forwards))
    return tuple(each.row() for each in sums.values())


def _is_nested(span: Span, forwards: dict[Span, Any]) -> bool:
    """Return whether it is part of another call of the same site, as in a model that calls itself."""
    return any((around.name, around.kind) == (span.name, span.kind) for around in span.above() if around in forwards)


def _around(span: Span, forwards: dict[Span, Any]) -> Span | None:
    """Return the nearest call around it that is measured: one that raised is not."""
    return next((around for around in span.above() if around in forwards), None)


_MAX_ROWS = 60
_MAX_NAME = 60


def table_of(rows: Sequence[ProfileRow], device: str, wall_ms: float, dropped: int) -> Table:
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
