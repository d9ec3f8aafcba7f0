"""Whose time it was, at each moment of the backward passes.

Takes the visits that a profile has noted, lays them on the time line of their thread, hands stretches of it back that
lie within one another as the calls did in the forward.

Autograd runs what a forward has made in the reverse order, so a backward pass goes through the calls as the forward
did, last one first. That tells what the marks do not. A call none of whose inputs takes a gradient (an embedding, say)
sees no gradient leave; it is over when another call has its turn, or the call around it is over. A call that sends its
gradient before all within it has had its turn is over with the last of that. Each moment is one call's own, so own
times are never negative, and add up to the whole whatever the marks say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hookline.observe.profile.profile_rows import Span, Stretch, Visit

__all__ = ["stretches_of"]


class _Item:
    """A visit on its way onto the time line."""

    def __init__(self, visit: Visit, when: Callable[[Any], float]) -> None:
        self.visit = visit
        self.depth = sum(1 for _ in visit.span.above())
        self.start = when(visit.start)
        self.known = visit.end is not None
        """Whether the end is where it is, and not just somewhere before."""
        last = visit.end if self.known else visit.seen
        self.end = math.inf if last is None else when(last)
        self.opened = self.closed = math.nan
        self.own = 0.0

    def is_around(self, span: Span) -> bool:
        """Whether that call was made within the one of this visit."""
        return any(around is self.visit.span for around in span.above())


def stretches_of(visits: Sequence[Visit], when: Callable[[Any], float]) -> list[Stretch]:
    """The visits on their time lines, one line per thread."""
    threads: dict[int, list[_Item]] = defaultdict(list)
    for visit in visits:
        threads[visit.thread].append(_Item(visit, when))
    stretches: list[Stretch] = []
    for items in threads.values():
        _end_all(items)
        _widen(items)
        stretches += _sweep(items)
    return stretches


def _end_all(items: list[_Item]) -> None:
    """What has no end at all, since the pass was cut short, ends with what is known of that pass."""
    last: dict[int, float] = defaultdict(float)
    for item in items:
        known = item.end if math.isfinite(item.end) else item.start
        last[item.visit.task] = max(last[item.visit.task], item.start, known)
    for item in items:
        item.end = min(item.end, last[item.visit.task])


def _widen(items: list[_Item]) -> None:
    """Have every visit end no sooner than those within it."""
    visits = [item for item in items if not item.visit.repeats and item.known]
    found = {(item.visit.task, item.visit.span): item for item in visits}
    for item in sorted(visits, key=lambda item: -item.depth):  # the innermost first
        for span in item.visit.span.above():
            around = found.get((item.visit.task, span))
            if around is not None:
                around.end = max(around.end, item.end)
                break


def _sweep(items: list[_Item]) -> Iterator[Stretch]:
    """Go along the time line with a stack of what is under way; the top of it has the time."""
    items = [item for item in items if item.end > item.start]
    # At one moment: ends before beginnings, the inner end first, the outer beginning first.
    events = [(item.end, 0, -item.depth, item) for item in items]
    events += [(item.start, 1, item.depth, item) for item in items]
    events.sort(key=lambda event: event[:3])
    stack: list[_Item] = []
    last = 0.0
    for moment, begins, _, item in events:
        if stack:
            stack[-1].own += moment - last
        if begins:
            _make_way(stack, item, moment)
            item.opened = moment
            stack.append(item)
        elif item in stack:
            while stack[-1] is not item:
                stack.pop().closed = moment
            stack.pop().closed = moment
        last = moment
    for item in items:
        yield Stretch(item.visit, item.opened, item.closed, item.own)


def _make_way(stack: list[_Item], item: _Item, moment: float) -> None:
    """Another call has its turn: what it is not part of is over, but for what has its forward repeated meanwhile."""
    repeats = item.visit.repeats
    while stack:
        top = stack[-1]
        if (repeats and not top.visit.repeats) or (top.visit.repeats == repeats and top.is_around(item.visit.span)):
            return
        stack.pop().closed = moment
