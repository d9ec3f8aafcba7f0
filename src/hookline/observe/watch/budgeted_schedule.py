"""Stretch the schedule of a watch to a budget, by comparing steps with its hooks and steps without.

`watch` puts a `BudgetedSchedule` around its `StepSchedule` for ``budget=``. The `StepCounter` asks it once when a step
begins, which is when the step before is over: nothing else has to be timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Final

from hookline.distributed.ranks import is_distributed
from hookline.errors import OptionError
from hookline.lifecycle.overhead_budget import Budget, BudgetDecision, LookInterval, Need, TimeMark, stretch
from hookline.lifecycle.schedule import StepSchedule

__all__ = ["BudgetedSchedule", "budgeted"]

_LEFT_OUT: Final = 64
"""A watch that the budget lets look at every step still leaves one of so many out, to go on comparing."""
_LEAST: Final = 4
"""How many steps of each kind a decision needs."""


def budgeted(every: StepSchedule | int, budget: Budget | float, first: int = 2) -> BudgetedSchedule:
    """Return the schedule that ``every=`` and ``budget=`` of a watch mean."""
    if is_distributed():
        raise OptionError("budget= is for one process: every rank would decide by its own clock. Next: give every=.")
    return BudgetedSchedule(StepSchedule.of(every), budget if isinstance(budget, Budget) else Budget(budget), first)


class BudgetedSchedule:
    """Say which steps are due: those of a schedule, or as many of them as the budget allows.

    Until the first decision every second step is due, or what ``first`` says, so that both kinds are measured.
    """

    def __init__(self, schedule: StepSchedule, budget: Budget, first: int = 2) -> None:
        self.decisions: list[BudgetDecision] = []
        """Every decision so far."""
        self.actual: float | None = None
        """The share that the watch takes; None before it is known."""
        self._schedule, self._budget = schedule, budget
        self._interval = LookInterval(budget.at_least_every)
        self._interval.every = first
        self._kept = self._interval.state_dict()
        """The interval before the step under way, which a resumed run asks for again."""
        self._num_steps = 0
        """Steps of the run before the one under way."""
        self._every: int | None = None
        self._open: tuple[int, bool, TimeMark] | None = None
        """The step under way: its number, whether it is due, and its beginning."""
        self._ended: deque[tuple[bool, TimeMark, TimeMark]] = deque()
        self._clear_window()

    def _clear_window(self) -> None:
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._steps = 0

    def is_active(self, step: int) -> bool:
        """Return whether ``step``, which begins now, is due."""
        mark = TimeMark(self._budget.clock)
        if self._open is not None:
            number, was_due, begun = self._open
            if number == step:
                return was_due
            if step == number + 1:
                self._num_steps += 1
                self._kept = self._interval.state_dict()
                self._ended.append((was_due, begun, mark))
            self._open = None
        self._settle()
        self._decide(step)
        self._interval.load_state_dict({**self._kept, "every": self._interval.every})
        is_due = self._schedule.is_active(step) and self._interval.ask(step)
        if self._interval.every == 1 and self._interval.num_asked % _LEFT_OUT == 0:
            is_due = False
        self._open = step, is_due, mark
        return is_due

    def _settle(self) -> None:
        """Take the steps whose times have arrived."""
        while self._ended:
            was_due, begun, over = self._ended[0]
            seconds = begun.seconds_until(over)
            if seconds is None:
                return
            self._ended.popleft()
            self._times[was_due].append(seconds)
            self._steps += 1

    def _decide(self, step: int) -> None:
        given = self._budget.decisions
        if given is not None:
            for one in given:
                if one.step == step:
                    self._take(one)
            return
        if self._steps < self._budget.window or min(map(len, self._times.values())) < _LEAST:
            return
        bare = median(self._times[False])
        cost = max(0.0, median(self._times[True]) - bare)
        rate = min(1.0, self._interval.num_asked / self._num_steps)
        before = {} if self._every is None else {"watch": self._every}
        every = stretch({"watch": Need(cost, rate)}, bare, self._budget, before)["watch"]
        self.actual = cost * rate / every / bare if bare > 0 else None
        if every != self._every:
            self._take(BudgetDecision(step, "watch", every, cost * 1e3, bare * 1e3))
        self._clear_window()

    def _take(self, decision: BudgetDecision) -> None:
        self._every = self._interval.every = decision.every
        self.decisions.append(decision)

    def to_metrics(self) -> dict[str, float]:
        """Return what was asked for, what it costs, and at every how manieth step of its schedule the watch looks."""
        found = {"budget/asked": self._budget.share}
        if self.actual is not None:
            found["budget/actual"] = self.actual
        if self._every is not None:
            found["budget/every"] = float(self._every)
        return found

    def in_words(self) -> str:
        """Return one line about the budget."""
        actual = "not known yet" if self.actual is None else f"{self.actual:.2%}"
        every = self._interval.every
        return f"budget: asked {self._budget.share:.2%}, actual {actual}; looks at 1 of {every} steps of its schedule"

    def __repr__(self) -> str:
        return f"<{self.in_words()}; {len(self.decisions)} decisions>"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        interval = {**self._kept, "every": self._interval.every}
        decisions = [tuple(one) for one in self.decisions]
        return {"interval": interval, "steps": self._num_steps, "every": self._every, "decisions": decisions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; the step under way is asked for again."""
        self._open = None
        self._ended.clear()
        self._clear_window()
        self._kept, self._num_steps, self._every = dict(state["interval"]), state["steps"], state["every"]
        self._interval.load_state_dict(self._kept)
        self.decisions = [BudgetDecision(*one) for one in state["decisions"]]
