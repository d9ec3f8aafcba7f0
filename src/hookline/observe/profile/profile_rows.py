"""The calls that a profile has measured, added up and laid out as a table.

Takes spans and visits from ``profile``, and what ``backward`` makes of the visits; hands rows and a table back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookline.tables import Table

__all__ = ["Measured", "ProfileRow", "Span", "Stretch", "Visit", "rows_of", "table_of"]


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
    """Marks of the clock; there is no end if the call was cut short."""
    visit: Visit | None = None
    """The backward pass that came by last."""
    output_bytes: int = 0
    allocated: int | None = None

    def above(self) -> Iterator[Span]:
        """The calls around it, the nearest first."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent


@dataclass(slots=True, eq=False)
class Visit:
    """One backward pass at one call, or its forward once more within that pass."""

    span: Span
    task: int
    """Which pass it is."""
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
    """How much of that time belongs to no visit within it."""


class Measured(NamedTuple):
    """Everything that is over, in seconds since the profile began."""

    forwards: dict[Span, tuple[float, float]]
    """Start and end of every call, in the order they began in."""
    backwards: list[Stretch]


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What one module or function has taken, all its calls together."""

    name: str
    """Dotted name of the module, empty for the model; or full name of the function."""
    kind: str
    """Its class; "function" for a function."""
    calls: int
    """How often it was called."""
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
    """By how much its forwards have raised what is allocated on the GPU; None elsewhere."""

    def numbers(self) -> dict[str, float]:
        """Everything that can be drawn as a curve."""
        numbers = {
            "calls": float(self.calls),
            "forward_ms": self.forward_ms,
            "forward_own_ms": self.forward_own_ms,
            "backward_ms": self.backward_ms,
            "backward_own_ms": self.backward_own_ms,
            "output_bytes": float(self.output_bytes),
        }
        if self.allocated_bytes is not None:
            numbers["allocated_bytes"] = float(self.allocated_bytes)
        return numbers


class _Sum:
    """The spans of one site, added up."""

    def __init__(self, first: Span) -> None:
        self.first = first
        self.calls = 0
        self.times = (0.0, 0.0, 0.0, 0.0)
        self.output_bytes = 0
        self.allocated: int | None = None

    def add(self, span: Span, *seconds: float, nested: bool) -> None:
        """One more call, with its four times; of a call within another one of the site, only its own are new."""
        self.calls += 1
        forward, own, backward, backward_own = seconds
        new = (0.0, own, 0.0, backward_own) if nested else (forward, own, backward, backward_own)
        a, b, c, d = (so_far + 1e3 * more for so_far, more in zip(self.times, new, strict=True))
        self.times = a, b, c, d
        self.output_bytes += span.output_bytes
        if span.allocated is not None:
            self.allocated = (self.allocated or 0) + (0 if nested else span.allocated)

    def row(self) -> ProfileRow:
        """What they come to."""
        first = self.first
        return ProfileRow(first.name, first.kind, self.calls, *self.times, self.output_bytes, self.allocated)


def rows_of(measured: Measured) -> tuple[ProfileRow, ...]:
    """One row per site, in the order of their first calls."""
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
    sums: dict[tuple[str, str], _Sum] = {}
    for span in forwards:
        total = sums.setdefault((span.name, span.kind), _Sum(span))
        times = forward[span], forward_own[span], backward[span], backward_own[span]
        total.add(span, *times, nested=_is_nested(span, forwards))
    return tuple(each.row() for each in sums.values())


def _is_nested(span: Span, forwards: dict[Span, Any]) -> bool:
    """Whether it is part of another call of the same site, as in a model that calls itself."""
    return any((around.name, around.kind) == (span.name, span.kind) for around in span.above() if around in forwards)


def _around(span: Span, forwards: dict[Span, Any]) -> Span | None:
    """The nearest call around it that is measured: one that was cut short is not."""
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
    cells = [_cells(row)[:columns] for row in ordered[:_MAX_ROWS]]
    foot = []
    if len(rows) > _MAX_ROWS:
        foot.append(f"… and {len(rows) - _MAX_ROWS} that took less; all of them are in .rows")
    forward, backward = (sum(getattr(row, f"{way}_own_ms") for row in rows) for way in ("forward", "backward"))
    sums = f"{forward:,.2f} ms forward and {backward:,.2f} ms backward, of {wall_ms:,.2f} ms ({device})"
    foot.append(f"own times add up to {sums}")
    if dropped:
        foot.append(f"{dropped:,} more calls were left out; raise max_spans=.")
    return Table(header[:columns], cells, numbers=range(2, columns), foot=foot)


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
