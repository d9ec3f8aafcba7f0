"""Stretch the schedule of a watch to a budget, by comparing steps with its hooks and steps without.

`watch` puts a `BudgetedSchedule` around its `StepSchedule` for ``budget=``. `Steps` asks it once when a step begins,
which is when the step before is over: nothing else has to be timed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from hookline.distributed.ranks import is_distributed
from hookline.errors import OptionError

if TYPE_CHECKING:
    from hookline.when import StepSchedule

__all__ = ["Budget", "BudgetDecision", "BudgetedSchedule", "TimeMark"]

_FIRST: Final = 2
"""The interval before the first decision."""
_LEFT_OUT: Final = 64
"""A watch that may look at every step still leaves one of so many out, to go on comparing."""
_LEAST: Final = 4
"""How many steps of each kind a decision needs."""


class BudgetDecision(NamedTuple):
    """Say from which step on a watch looks how often."""

    step: int
    """The first step that it is about."""
    every: int
    """The new interval, in steps that its schedule has; 1: as asked."""
    cost_ms: float
    """What one look takes."""
    step_ms: float
    """What a step takes without any."""


@dataclass(frozen=True)
class Budget:
    """What a watch may cost.

    Recipe: ``hookline.watch(model, budget=0.02)``, or ``budget=Budget(0.02, at_least_every=500)``.

    Intervals stretch until the cost is inside the budget, and shrink again when there is room. The times are those of
    the device where CUDA is in use, read when they have arrived; nothing waits for them.
    """

    share: float
    """The cost as a share of the time of a step without the watch."""
    at_least_every: int = 1000
    """How many steps may lie between two looks at most; a watch that is asked for less often is not stretched."""
    window: int = 20
    """How many steps are measured before each decision."""
    clock: Callable[[], float] = time.perf_counter
    """Returns seconds."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not is_number or not 0 < self.share <= 1:
            raise OptionError(f"budget= is a share of the time of a step: 0.02 is 2 %; got {self.share!r}.")
        for name in ("at_least_every", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name}= of a Budget is a number of steps of at least 1; got {value!r}.")


class TimeMark:
    """A moment, on the host, and in the stream of the current CUDA device where one is in use."""

    __slots__ = ("_event", "_seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._seconds = clock()
        self._event: Any = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_until(self, later: TimeMark) -> float | None:
        """Return how long it took until ``later``; None as long as the device has not come so far."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        if not (self._event.query() and later._event.query()):
            return None
        try:
            return float(self._event.elapsed_time(later._event)) / 1e3
        except (RuntimeError, ValueError):  # on two devices
            return later._seconds - self._seconds


class BudgetedSchedule:
    """Say which steps are due: those of a schedule, or as many of them as the budget allows."""

    def __init__(self, schedule: StepSchedule, budget: Budget | float) -> None:
        if is_distributed():
            raise OptionError("budget= is for one process: ranks would decide by their own clocks. Next: give every=.")
        self.tell: Callable[[Mapping[str, float]], None] = lambda metrics: None
        """Called with what was asked for and what the watch takes, each time that is known, and with each decision."""
        self.decisions: list[BudgetDecision] = []
        """Every decision so far."""
        self.actual: float | None = None
        """The share that looks take at the interval decided last; None before it is known."""
        self._schedule = schedule
        self._budget = budget if isinstance(budget, Budget) else Budget(budget)
        self._counts = {"steps": 0, "asked": 0, "waited": self._budget.at_least_every}
        """Steps before the one under way, those of the schedule among them, and these since the last look."""
        self._open: tuple[int, bool, bool, TimeMark] | None = None
        """The step under way: its number, whether it is of the schedule, whether it is due, its beginning."""
        self._ended: deque[tuple[bool, TimeMark, TimeMark]] = deque()
        self._times: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of steps with and without a look."""

    @property
    def every(self) -> int:
        """The interval of looks, in steps of the schedule."""
        return self.decisions[-1].every if self.decisions else _FIRST

    def is_active(self, step: int) -> bool:
        """Return whether ``step``, which begins now, is due."""
        if self._open is not None and self._open[0] == step:
            return self._open[2]
        mark = TimeMark(self._budget.clock)
        if self._open is not None:
            self._end(step, mark)
        self._decide(step)
        counts, is_asked = self._counts, self._schedule.is_active(step)
        is_left_out = self.every == 1 and counts["asked"] % _LEFT_OUT == _LEFT_OUT - 1
        is_due = is_asked and counts["waited"] + 1 >= self.every and not is_left_out
        self._open = step, is_asked, is_due, mark
        return is_due

    def _end(self, step: int, mark: TimeMark) -> None:
        """Count the step that was under way when ``step`` begins, and take the times that have arrived."""
        assert self._open is not None
        number, was_asked, was_due, begun = self._open
        if step == number + 1:
            counts = self._counts
            counts["steps"] += 1
            counts["asked"] += was_asked
            counts["waited"] = 0 if was_due else counts["waited"] + was_asked
            self._ended.append((was_due, begun, mark))
        while self._ended and (seconds := self._ended[0][1].seconds_until(self._ended[0][2])) is not None:
            self._times[self._ended.popleft()[0]].append(seconds)

    def _decide(self, step: int) -> None:
        times, budget = self._times, self._budget
        if min(map(len, times.values())) < _LEAST or sum(map(len, times.values())) < budget.window:
            return
        bare = median(times[False])
        cost = max(0.0, median(times[True]) - bare)
        rate = self._counts["asked"] / self._counts["steps"]
        longest = max(1, math.floor(budget.at_least_every * rate))
        allowed = budget.share * bare
        every = min(longest, max(1, math.ceil(cost * rate / allowed))) if allowed > 0 else longest
        old = self.decisions[-1].every if self.decisions else 1
        every = every if every > old or 4 * every <= 3 * old else old  # so that it does not swing
        self.actual = cost * rate / every / bare if bare > 0 else None
        told = {"asked": budget.share} if self.actual is None else {"asked": budget.share, "actual": self.actual}
        if not self.decisions or every != old:
            self.decisions.append(BudgetDecision(step, every, cost * 1e3, bare * 1e3))
            told |= {"every": float(every), "cost_ms": cost * 1e3}
        self.tell(told)
        self._times = {True: [], False: []}

    def to_metrics(self) -> dict[str, float]:
        """Return what was asked for, what it costs, and the interval of looks, in steps of its schedule."""
        found = {"budget/asked": self._budget.share}
        if self.actual is not None:
            found["budget/actual"] = self.actual
        if self.decisions:
            found["budget/every"] = float(self.every)
        return found

    def in_words(self) -> str:
        """Return one line about the budget."""
        actual = "not known yet" if self.actual is None else f"{self.actual:.2%}"
        looks = f"looks at 1 of {self.every} steps of its schedule"
        return f"budget: asked {self._budget.share:.2%}, actual {actual}; {looks}"

    def __repr__(self) -> str:
        return f"<{self.in_words()}; {len(self.decisions)} decisions>"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"counts": dict(self._counts), "decisions": [tuple(one) for one in self.decisions]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; the step under way is asked for again."""
        self._open = None
        self._ended.clear()
        self._times = {True: [], False: []}
        self._counts = dict(state["counts"])
        self.decisions = [BudgetDecision(*one) for one in state["decisions"]]
