"""Stretch the schedule of a watch to a budget, by comparing steps with its hooks and steps without.

`watch` puts a `BudgetedSchedule` around its `StepSchedule` for ``budget=``. The `StepCounter` asks it once when a step
begins, which is when the step before is over: nothing else has to be timed. A step that another watch of the model
looks at is compared with such steps only, so that neither takes the other's cost for that of the step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final

from torch import nn

from hookline.distributed.ranks import is_distributed
from hookline.errors import OptionError
from hookline.observe.watch.overhead_budget import (
    Budget,
    BudgetDecision,
    LookInterval,
    Need,
    TimeMark,
    first_interval,
    stretch,
)
from hookline.when import StepSchedule

__all__ = ["BudgetedSchedule", "budgeted"]

_LEFT_OUT: Final = (64, 61, 59, 53, 47)
"""A watch that the budget lets look at every step still leaves one of so many out, to go on comparing; so does each of
several on one model. No two have a common divisor, or two watches would often leave out the same steps."""
_LEAST: Final = 4
"""How many steps of each kind a decision needs."""
_Company = frozenset[int]
_ALONE: Final[_Company] = frozenset()


_OF_MODELS: Final[weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[BudgetedSchedule]]] = weakref.WeakKeyDictionary()
"""For each model the schedules of its watches that are on."""


def budgeted(model: nn.Module, every: StepSchedule | int, budget: Budget | float) -> BudgetedSchedule:
    """Return the schedule that ``every=`` and ``budget=`` of a watch of ``model`` mean."""
    if is_distributed():
        raise OptionError("budget= is for one process: every rank would decide by its own clock. Next: give every=.")
    beside = _OF_MODELS.setdefault(model, weakref.WeakSet())
    budget = budget if isinstance(budget, Budget) else Budget(budget)
    return BudgetedSchedule(StepSchedule.of(every), budget, beside)


class BudgetedSchedule:
    """Say which steps are due: those of a schedule, or as many of them as the budget allows.

    Until the first decision the steps of `first_interval` are due, so that both kinds are measured.

    Args:
        schedule: The steps that the watch was asked for.
        budget: What it may cost.
        beside: The schedules of all watches of the model that are on.
    """

    def __init__(self, schedule: StepSchedule, budget: Budget, beside: weakref.WeakSet[BudgetedSchedule]) -> None:
        self.tell: Callable[[Mapping[str, float]], None] = lambda metrics: None
        """Called with what was asked for and what the watch takes, each time that is known, and with each decision."""
        taken = {one._number for one in beside}
        self._number: int = next(number for number in range(len(taken) + 1) if number not in taken)
        self._beside = beside
        self._begun: deque[tuple[float, bool]] = deque(maxlen=2)
        """When the last steps began, and whether they were due; other watches ask."""
        self.decisions: list[BudgetDecision] = []
        """Every decision so far."""
        self.actual: float | None = None
        """The share that looks take at the interval decided last; None before it is known."""
        self._schedule, self._budget = schedule, budget
        self._interval = LookInterval(budget.at_least_every)
        self._interval.every = first_interval(self._number)
        self._kept = self._interval.state_dict()
        """The interval before the step under way, which a resumed run asks for again."""
        self._num_steps = 0
        """Steps of the run before the one under way."""
        self._every: int | None = None
        self._open: tuple[int, bool, TimeMark] | None = None
        """The step under way: its number, whether it is due, and its beginning."""
        self._ended: deque[tuple[bool, _Company, TimeMark, TimeMark]] = deque()
        self._forget_costs()

    def _forget_costs(self) -> None:
        self._found: tuple[float, float] | None = None
        """The seconds of one look, and of a step without, as they were last compared."""
        self._looked_seconds = self._step_seconds = 0.0
        """Those of all looks, and of all steps without them, in the windows that are over."""
        self._clear_window()

    def _clear_window(self) -> None:
        self._times: defaultdict[tuple[bool, _Company], list[float]] = defaultdict(list)
        """By whether the watch looked, and which others did."""
        self._steps = 0

    def is_active(self, step: int) -> bool:
        """Return whether ``step``, which begins now, is due."""
        self._beside.add(self)
        mark = TimeMark(self._budget.clock)
        if self._open is not None:
            number, was_due, begun = self._open
            if number == step:
                return was_due
            if step == number + 1:
                self._num_steps += 1
                self._kept = self._interval.state_dict()
                self._ended.append((was_due, self._company(begun, mark), begun, mark))
            self._open = None
        self._settle()
        self._decide(step)
        self._interval.load_state_dict({**self._kept, "every": self._interval.every})
        is_due = self._schedule.is_active(step) and self._interval.ask(step)
        is_due = is_due and not self._leaves_out()
        self._open = step, is_due, mark
        self._begun.append((mark.host_seconds, is_due))
        return is_due

    def leave(self) -> None:
        """Take part no more: the watch comes off, or counts other steps from now on."""
        self._beside.discard(self)

    def _leaves_out(self) -> bool:
        every = self._interval.every
        compares = every == 1 or (len(self._beside) > 1 and 2 * every <= self._budget.at_least_every)
        return compares and self._interval.num_asked % _LEFT_OUT[self._number % len(_LEFT_OUT)] == 0

    def _company(self, begun: TimeMark, over: TimeMark) -> _Company:
        """Return which other watches of the model looked at a step: those that did in the middle of it.

        Some of them have been asked for their next step already when this one is asked.
        """
        middle = (begun.host_seconds + over.host_seconds) / 2
        others = [one for one in self._beside if one is not self and one._budget.clock is self._budget.clock]
        return frozenset(one._number for one in others if one._looked(middle))

    def _looked(self, moment: float) -> bool:
        return next((was_due for begun, was_due in reversed(self._begun) if begun <= moment), False)

    def _settle(self) -> None:
        """Take the steps whose times have arrived."""
        while self._ended:
            was_due, company, begun, over = self._ended[0]
            seconds = begun.seconds_until(over)
            if seconds is None:
                return
            self._ended.popleft()
            self._times[was_due, company].append(seconds)
            self._steps += 1

    def _decide(self, step: int) -> None:
        given = self._budget.decisions
        if given is not None:
            for one in given:
                if one.step == step:
                    self._take(one)
            return
        found = None if self._steps < self._budget.window else self._compared()
        if found is None:
            return
        self._found = cost, bare = found
        rate = min(1.0, self._interval.num_asked / self._num_steps)
        before = {} if self._every is None else {"watch": self._every}
        every = stretch({"watch": Need(cost, rate)}, bare, self._budget, before)["watch"]
        self.actual = cost * rate / every / bare if bare > 0 else None
        if every != self._every:
            self._take(BudgetDecision(step, "watch", every, cost * 1e3, bare * 1e3))
        else:
            self._tell()
        self._looked_seconds, self._step_seconds = self._seconds_so_far()
        self._clear_window()

    def _seconds_so_far(self) -> tuple[float, float]:
        """Return the seconds of all looks, and of all steps without them; windows under way by the last costs."""
        cost, bare = self._found or (0.0, 0.0)
        num_looks = sum(len(times) for (was_due, _), times in self._times.items() if was_due)
        return self._looked_seconds + num_looks * cost, self._step_seconds + self._steps * bare

    @property
    def whole_run(self) -> float | None:
        """The share that looks took since the run began, or was resumed, those before the first decision too."""
        looked, stepped = self._seconds_so_far()
        return looked / stepped if stepped > 0 else None

    def _compared(self) -> tuple[float, float] | None:
        """Return the seconds of one look, and of a step that no watch looks at; None as long as that is not known.

        Compared are steps that the same other watches looked at. Where the others look at the very steps of this one,
        it is charged with them all: too much is inside the budget, too little is not.
        """
        enough = {key: median(times) for key, times in self._times.items() if len(times) >= _LEAST}
        without = {company: seconds for (was_due, company), seconds in enough.items() if not was_due}
        if not without:
            return None
        bare = without.get(_ALONE, min(without.values()))
        costs = {c: seconds - without[c] for (was_due, c), seconds in enough.items() if was_due and c in without}
        if costs:
            least = min(costs, key=len)  # the fewer others look, the less is in what they take
            return max(0.0, costs[least]), bare
        looks = {company: times for (was_due, company), times in self._times.items() if was_due}
        if _ALONE not in without or sum(map(len, looks.values())) < _LEAST:
            return None
        return max(0.0, median(looks[min(looks, key=len)]) - bare), bare

    def _take(self, decision: BudgetDecision) -> None:
        self._every = self._interval.every = decision.every
        self.decisions.append(decision)
        self._tell({"every": float(decision.every), "cost_ms": decision.cost_ms})

    def _tell(self, decided: Mapping[str, float] | None = None) -> None:
        known = {"asked": self._budget.share, "actual": self.actual, "whole_run": self.whole_run}
        told = {name: value for name, value in known.items() if value is not None}
        self.tell({**told, **(decided or {})})

    def to_metrics(self) -> dict[str, float]:
        """Return what was asked for, what it costs, and the interval of looks, in steps of its schedule."""
        found = {"budget/asked": self._budget.share}
        if self.actual is not None:
            found["budget/actual"] = self.actual
        if (whole_run := self.whole_run) is not None:
            found["budget/whole_run"] = whole_run
        if self._every is not None:
            found["budget/every"] = float(self._every)
        return found

    def in_words(self) -> str:
        """Return one line about the budget."""
        actual = "not known yet" if self.actual is None else f"{self.actual:.2%}"
        every = self._interval.every
        whole_run = "" if self.whole_run is None else f" now, {self.whole_run:.2%} of the whole run"
        looks = f"looks at 1 of {every} steps of its schedule"
        return f"budget: asked {self._budget.share:.2%}, actual {actual}{whole_run}; {looks}"

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
        self._begun.clear()
        self._forget_costs()
        self._kept, self._num_steps, self._every = dict(state["interval"]), state["steps"], state["every"]
        self._interval.load_state_dict(self._kept)
        self.decisions = [BudgetDecision(*one) for one in state["decisions"]]
