"""One hook at one point, and all hooks of a point, in the order they run.

Made by ``plan`` from what hooks declare, asked by `HookManager` each time the point is fired. An order that cannot be
is an error when a manager is made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import HookNameError, HookOrderError, LifecycleError
from hookline.lifecycle.schedule import StepSchedule

if TYPE_CHECKING:
    from hookline.lifecycle.points import HookPoint
    from hookline.training.training_hook import TrainingHook, Window

__all__ = ["ALWAYS", "Entry", "Slot", "as_names", "check_names", "ordered"]

ALWAYS: Final = (None, None)
"""The window that is open at both ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A hook at a point."""

    hook: TrainingHook
    name: str
    point: HookPoint
    intervenes: bool
    """Whether ``intervene`` is called here, rather than ``compute``."""
    window: Window
    """First and last epoch, or step."""
    schedule: Any
    """At which steps; None is all."""

    def is_due_at(self, step: int) -> bool:
        """Whether its schedule has that step."""
        return self.schedule is None or bool(self.schedule.is_active(step))

    def is_open_at(self, number: int | None) -> bool:
        """Whether that epoch, or step, is in its window; not knowing which, it may be."""
        first, last = self.window
        return number is None or ((first is None or number >= first) and (last is None or number <= last))


class Slot:
    """The hooks of one point, in the order they run: those that observe, then those that intervene."""

    __slots__ = ("_parts", "entries", "is_scheduled", "is_windowed", "needs_reference", "point", "wakes")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        self.point = entries[0].point
        self._parts = _split(self.entries)
        self.is_scheduled = any(entry.schedule is not None for entry in entries)
        self.is_windowed = any(entry.window != ALWAYS for entry in entries)
        self.needs_reference = any(entry.hook.needs_reference_weights for entry in entries)
        self.wakes = -2
        """No step before this one is due, so that asking is one comparison; -2 is before the first."""

    def due(self, step: int) -> tuple[Entry, ...]:
        """Whose schedule has that step."""
        if not self.is_scheduled:
            return self.entries
        if step < 0:
            raise LifecycleError(_NO_STEP.format(name=next(e.name for e in self.entries if e.schedule is not None)))
        due = tuple([entry for entry in self.entries if entry.is_due_at(step)])
        if not due:
            self.wakes = min(_next_due(entry.schedule, step) for entry in self.entries)
        return due

    def parts(self, due: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """Those that observe and those that intervene, of those that are due."""
        return self._parts if due is self.entries else _split(due)


def _split(entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    return tuple(e for e in entries if not e.intervenes), tuple(e for e in entries if e.intervenes)


_NO_STEP: Final = (
    "Hook {name!r} has a step_schedule, but no step has begun, so it cannot be told whether it is due. "
    "Call manager.advance_step() at the start of each step."
)


def _next_due(schedule: Any, step: int) -> int:
    """The first step from this one on that is due."""
    if type(schedule) is not StepSchedule:
        return step  # somebody's own: it has to be asked each time
    step = max(step, schedule.warmup)
    length = {"continual": schedule.stride, "stride": 1, "burst": schedule.burst_length}[schedule.mode]
    late = step % schedule.stride
    return step if late < length else step + schedule.stride - late


# -- order ----------------------------------------------------------------------------------------------------


def check_names(hook: str, option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Names that ``before`` and ``after`` mention have to be those of hooks."""
    known = list(known)
    for name in names:
        if name == hook:
            raise HookOrderError(f"Hook {hook!r} asks to run {option} itself; take its name out of {option}=.")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise HookNameError(
                f"Hook {hook!r} asks to run {option} {name!r}, which is no hook.{meant} "
                f"Available: {', '.join(known) or 'none'}."
            )


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Observers, then interventions; among each by ``before`` and ``after``, then priority, then as given."""
    place = {entry.name: number for number, entry in enumerate(entries)}
    followers = _followers(entries, place)
    waits = [0] * len(entries)
    for numbers in followers:
        for number in numbers:
            waits[number] += 1
    rank = [(entry.intervenes, -entry.hook.priority, number) for number, entry in enumerate(entries)]
    ready = [rank[number] for number, waiting in enumerate(waits) if not waiting]
    heapq.heapify(ready)
    found: list[Entry] = []
    while ready:
        number = heapq.heappop(ready)[2]
        found.append(entries[number])
        for follower in followers[number]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, rank[follower])
    if len(found) < len(entries):
        circle = _circle({number for number, waiting in enumerate(waits) if waiting}, followers)
        names = ", ".join(repr(entries[number].name) for number in sorted(circle))
        raise HookOrderError(
            f"The hooks {names} at {entries[0].point.name} cannot each run before the other; look at their "
            "before= and after=."
        )
    return found


def _circle(waiting: set[int], followers: list[set[int]]) -> set[int]:
    """Those that wait for each other, without those that only wait for one of them."""
    while ends := {number for number in waiting if not followers[number] & waiting}:
        waiting = waiting - ends
    return waiting


def _followers(entries: Sequence[Entry], place: dict[str, int]) -> list[set[int]]:
    """For each entry, which others have to come after it."""
    followers: list[set[int]] = [set() for _ in entries]
    for number, entry in enumerate(entries):
        later = [(number, place[name]) for name in as_names(entry.hook.before) if name in place]
        earlier = [(place[name], number) for name in as_names(entry.hook.after) if name in place]
        for first, second in later + earlier:
            _check_kinds(entries[first], entries[second])
            followers[first].add(second)
    return followers


def _check_kinds(first: Entry, second: Entry) -> None:
    if first.intervenes and not second.intervenes:
        raise HookOrderError(
            f"Hook {first.name!r} intervenes at {first.point.name} and {second.name!r} observes there, so it cannot "
            f"run before it: observers always run first. Take {first.name!r} and {second.name!r} out of each other's "
            "before= and after=."
        )


def as_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """What ``before`` and ``after`` hold, if only one name is given as well."""
    return (names,) if isinstance(names, str) else tuple(names or ())
