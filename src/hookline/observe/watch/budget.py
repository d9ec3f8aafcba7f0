"""Look at as few steps as a budget asks for, by comparing steps with the hooks of a watch and steps without.

`watch` puts a `BudgetedSchedule` around its `StepSchedule` for ``budget=``. `Steps` tells it when a step begins, which
is when the step before is over: nothing else has to be timed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.distributed.ranks import is_distributed
from hookline.errors import OptionError

if TYPE_CHECKING:
    from hookline.when import StepSchedule

__all__ = ["BudgetedSchedule", "TimeMark"]

_TIMED: Final = 16
"""How many steps with a look, and how many without, are timed before the interval is set."""
_LONGEST: Final = 1000
"""How many steps may lie between two looks, if the schedule itself has no longer intervals."""


class TimeMark:
    """A moment, on the host, and in the stream of the current CUDA device where one is in use."""

    __slots__ = ("_event", "_seconds")

    def __init__(self) -> None:
        self._seconds = perf_counter()
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
    """Say which steps are due: those of a schedule, or as many of them as the budget allows.

    Every second one is, until enough were timed; then the interval is set, once. Nothing waits for a device.

    Args:
        schedule: The steps to choose from.
        share: What looks may take, as a share of the time of all steps.
    """

    def __init__(self, schedule: StepSchedule, share: float) -> None:
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise OptionError(f"budget= is a share of the time of a step: 0.02 is 2 %; got {share!r}.")
        if is_distributed():
            raise OptionError("budget= is for one process: ranks would decide by their own clocks. Next: give every=.")
        self.share = share
        """The share that was asked for."""
        self.actual: float | None = None
        """The share that looks take, once that is known."""
        self.every = 2
        """It looks at one of so many steps of the schedule."""
        self._schedule = schedule
        self._waited = _LONGEST
        """How many steps of the schedule have begun since the last look."""
        self._counts = [0, 0]
        """How many steps were timed, and how many of them are of the schedule."""
        self._open: tuple[int, bool, TimeMark] | None = None
        """The step under way, as long as steps are timed: its number, whether it is due, its beginning."""
        self._over: deque[tuple[bool, TimeMark, TimeMark]] = deque()
        """Steps that are over, whose times may not have arrived."""
        self._times: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of steps with a look, and without."""

    def begin(self, step: int) -> bool:
        """Begin `step`, when the one before is over; return whether it is due."""
        is_asked = self._schedule.is_active(step)
        if step == 0:  # also where steps are counted anew
            self._waited = _LONGEST
        if self.actual is None:
            now = TimeMark()
            self._take_times(step, now)
        is_due = is_asked and self._waited + 1 >= self.every
        self._waited = 0 if is_due else self._waited + is_asked
        if self.actual is None:
            self._counts = [self._counts[0] + 1, self._counts[1] + is_asked]
            self._open = step, is_due, now
        return is_due

    def _take_times(self, step: int, now: TimeMark) -> None:
        """Take the times that have arrived; set the interval, if there are enough."""
        if self._open is not None and step == self._open[0] + 1:
            self._over.append((*self._open[1:], now))
        while self._over and (seconds := self._over[0][1].seconds_until(self._over[0][2])) is not None:
            self._times[self._over.popleft()[0]].append(seconds)
        if min(map(len, self._times.values())) >= _TIMED:
            bare = max(median(self._times[False]), 1e-9)
            cost = max(0.0, median(self._times[True]) - bare)
            rate = self._counts[1] / self._counts[0]
            longest = max(1, math.floor(_LONGEST * rate))
            self.every = min(longest, max(1, math.ceil(cost * rate / (self.share * bare))))
            self.actual = cost * rate / self.every / bare

    def to_metrics(self) -> dict[str, float]:
        """Return what was asked for, and, once it is known, what it costs and the interval of looks."""
        asked = {"budget/asked": self.share}
        return asked if self.actual is None else asked | {"budget/actual": self.actual, "budget/every": self.every}

    def in_words(self) -> str:
        """Return one line about the budget."""
        actual = "not known yet" if self.actual is None else f"{self.actual:.2%}"
        return f"budget: asked {self.share:.2%}, actual {actual}; looks at 1 of {self.every} steps of its schedule"

    def __repr__(self) -> str:
        return f"<{self.in_words()}>"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"every": self.every, "actual": self.actual, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; where the interval was not set, steps are timed anew."""
        self.every, self.actual, self._waited = state["every"], state["actual"], state["waited"]
        self._open = None
