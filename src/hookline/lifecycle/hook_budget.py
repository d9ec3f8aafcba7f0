"""Keep the hooks of a manager inside a budget: time them at each step, and leave out firings where they cost too much.

`HookManager` makes a `HookBudget` for ``budget=``; its `FiringEngine` asks which hooks may fire, and tells of firings.
Watches cost time inside the step, where no firing is: each gets a part of the budget, and keeps to it by itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from hookline.lifecycle.choose_hooks import record_decisions
from hookline.lifecycle.registry import points_in_any_loop
from hookline.observe.watch.overhead_budget import (
    Budget,
    BudgetDecision,
    LookInterval,
    Need,
    TimeMark,
    first_interval,
    stretch,
)
from hookline.tables import ShownAsTable, Table
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.firing import Done
    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.plan import PlannedHook

__all__ = ["HookBudget"]


@dataclass(slots=True)
class _TimedStep:
    """The marks of one step: its beginning, that of the next one, and around each firing."""

    begin: TimeMark
    end: TimeMark | None = None
    firings: list[tuple[dict[str, float], TimeMark, TimeMark]] = field(default_factory=list)
    """For each firing the part of every hook in it, by the clock of the host."""

    def costs(self) -> tuple[float, dict[str, float]] | None:
        """Return the seconds of the step without hooks, and those of each hook; None until all have arrived."""
        whole = None if self.end is None else self.begin.seconds_until(self.end)
        times = [(parts, before.seconds_until(after)) for parts, before, after in self.firings]
        if whole is None:
            return None
        spent: dict[str, float] = {}
        for parts, seconds in times:
            if seconds is None:
                return None
            for name, part in parts.items():
                spent[name] = spent.get(name, 0.0) + seconds * part
        return max(0.0, whole - sum(spent.values())), spent


class HookBudget(ShownAsTable):
    """Decide how often each hook of a manager fires; ``manager.budget``, prints as a table of the decisions.

    It is about the hooks at the points of a step, and about watches. A hook that has several of these points fires at
    all or none of a step. Every watch gets an equal part of the budget, unless it has a budget of its own, and all
    other hooks of a step together get one such part.
    """

    def __init__(self, budget: Budget | float, hooks: Mapping[str, TrainingHook] | None = None) -> None:
        self._whole = budget if isinstance(budget, Budget) else Budget(budget)
        self.asked = self._whole.share
        """The share that was asked for."""
        self._hooks = {} if hooks is None else hooks
        self._watches = {name: one for name, hook in self._hooks.items() if (one := _watch_of(hook)) is not None}
        self._budget = self._share_out()
        self._begin()

    def _share_out(self) -> Budget:
        """Give the watches their parts; return what is left to the hooks of steps."""
        whole = self._whole
        takers = {name: one for name, one in self._watches.items() if one.budget is None}
        parts = len(takers) + (not self._hooks or any(map(_is_of_step, self._hooks.values())))
        part = replace(whole, share=whole.share / max(1, parts))
        for number, (name, one) in enumerate(takers.items(), start=int(len(takers) > 1)):
            given = whole.decisions and [each._replace(name="watch") for each in whole.decisions if each.name == name]
            one.take_budget(replace(part, decisions=given), first_interval(number))
            record_decisions(self._hooks[name], one)
        return part

    def _begin(self) -> None:
        budget = self._budget
        self._own_actual: float | None = None
        """The share that hooks of steps took since the last decision; None before the first window is over."""
        self._decisions: list[BudgetDecision] = []
        self._given = {} if budget.decisions is None else _by_step(budget.decisions)
        self._intervals: defaultdict[str, LookInterval] = defaultdict(lambda: LookInterval(budget.at_least_every))
        self._num_steps = 0
        """Those of the run that are over; a hook of stride 100 is asked for in one of a hundred, in a window never."""
        self._is_on: dict[str, tuple[int, bool]] = {}
        self._cost: dict[str, float] = {}
        self._steps: deque[_TimedStep] = deque()
        self._spent = self._trained = 0.0
        """Seconds of hooks, and of the steps without them, since the last decision."""
        self._fired_seconds = 0.0
        """Those of all firings of the run, at whatever point, that have arrived."""
        self._other_firings: deque[tuple[TimeMark, TimeMark]] = deque()
        """The marks around firings at other points than those of a step."""
        self._first_step: TimeMark | None = None
        self._clear_window()

    def _clear_window(self) -> None:
        self._bare: list[float] = []
        self._seconds: dict[str, list[float]] = {}

    def reset(self) -> None:
        """Forget the last run; watches go on with what they know."""
        self._begin()

    # -- what is known -----------------------------------------------------------------------------------------

    @property
    def actual(self) -> float | None:
        """The share that hooks and watches take since their last decisions; None as long as one of them is not known.

        In it are the firings in steps, and the looks of watches. What `not_counted` names is not in it, nor are the
        reports of watches; `whole_run` has these.
        """
        known = [None if one.budget is None else one.budget.actual for one in self._watches.values()]
        if self._intervals or not known:
            known.append(self._own_actual)
        found = [share for share in known if share is not None]
        return sum(found) if len(found) == len(known) else None

    @property
    def whole_run(self) -> float | None:
        """The share that hooks took since the run began, or was resumed; None as long as a watch does not know its own.

        In it are all firings, reports of watches too, and all looks, those before the first decision too. Not in it is
        what cannot be told from the step: setting up, and what hooks do inside a model at steps without a look.
        """
        looks = [one.budget.looked_seconds for one in self._watches.values() if one.budget is not None]
        known = [seconds for seconds in looks if seconds is not None]
        if self._first_step is None or len(known) < len(looks):
            return None
        spent = self._fired_seconds + sum(known)
        trained = self._steps[-1].begin.host_seconds - self._first_step.host_seconds - spent
        return spent / trained if trained > 0 else None

    @property
    def decisions(self) -> list[BudgetDecision]:
        """Every decision so far, by step; those of watches too."""
        found = list(self._decisions)
        for name, one in self._watches.items():
            found += [] if one.budget is None else [each._replace(name=name) for each in one.budget.decisions]
        return sorted(found, key=lambda each: each.step)

    @property
    def not_counted(self) -> list[str]:
        """The hooks whose cost is not, or not wholly, in `actual`.

        They have not fired in a step, or may put hooks into the model when they start.
        """
        others = {name: hook for name, hook in self._hooks.items() if name not in self._watches}
        return [name for name, hook in others.items() if hook.may_work_inside_steps or name not in self._intervals]

    # -- at each step ------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> dict[str, float]:
        """Begin a step; return metrics if something was decided or a window is over."""
        mark = TimeMark(self._budget.clock)
        if self._first_step is None:
            self._first_step = mark
        if self._steps:
            self._steps[-1].end = mark
            self._num_steps += 1
        self._steps.append(_TimedStep(mark))
        self._settle()
        if len(self._bare) < self._budget.window and step not in self._given:
            return {}
        self._spent += sum(map(sum, self._seconds.values()))
        self._trained += sum(self._bare)
        if self._trained > 0:
            self._own_actual = self._spent / self._trained
        found = self._decide(step)
        if found:  # what was measured at other intervals says nothing of these
            self._spent = self._trained = 0.0
        if (actual := self.actual) is not None:
            found |= {"budget/asked": self.asked, "budget/actual": actual}
            found |= {} if (whole_run := self.whole_run) is None else {"budget/whole_run": whole_run}
        self._clear_window()
        return found

    def choose(self, due: tuple[PlannedHook, ...], step: int) -> tuple[PlannedHook, ...]:
        """Return the hooks of ``due`` that may fire in this step."""
        chosen = tuple([planned for planned in due if self._may_fire(planned.name, step)])
        return due if len(chosen) == len(due) else chosen

    def mark(self) -> TimeMark:
        """Return the moment, for `charge`."""
        return TimeMark(self._budget.clock)

    def charge(self, done: Sequence[Done], before: TimeMark, *, is_step: bool) -> None:
        """Take what a firing took since ``before``, for the hooks that it called.

        Args:
            done: The hooks that it called.
            before: When it began.
            is_step: Whether it was at a point of a step; others count in `whole_run` alone.
        """
        if not self._steps or not done:
            return
        if not is_step:
            self._other_firings.append((before, self.mark()))
            return
        whole = sum(seconds for _, seconds, _, _ in done)
        parts: dict[str, float] = {}
        for planned, seconds, _, _ in done:
            part = seconds / whole if whole > 0 else 1 / len(done)
            parts[planned.name] = parts.get(planned.name, 0.0) + part
        self._steps[-1].firings.append((parts, before, self.mark()))

    def _may_fire(self, name: str, step: int) -> bool:
        at, is_on = self._is_on.get(name, (-1, False))
        if at != step:
            is_on = self._intervals[name].ask(step)
            self._is_on[name] = step, is_on
        return is_on

    # -- decisions ---------------------------------------------------------------------------------------------

    def _rate(self, name: str) -> float:
        """Return in which share of the steps of the run a hook was asked for."""
        return min(1.0, self._intervals[name].num_asked / max(1, self._num_steps))

    def _settle(self) -> None:
        """Take the steps whose times have arrived, the oldest first."""
        while self._steps and (found := self._steps[0].costs()) is not None:
            self._steps.popleft()
            self._bare.append(found[0])
            self._fired_seconds += sum(found[1].values())
            for name, seconds in found[1].items():
                self._seconds.setdefault(name, []).append(seconds)
        while self._other_firings:
            before, after = self._other_firings[0]
            if (taken := before.seconds_until(after)) is None:
                break
            self._other_firings.popleft()
            self._fired_seconds += taken

    def _decide(self, step: int) -> dict[str, float]:
        self._cost |= {name: fmean(times) for name, times in self._seconds.items()}
        step_seconds = median(self._bare) if self._bare else 0.0
        if self._budget.decisions is not None:
            wanted = {one.name: one.every for one in self._given.get(step, ())}
        else:
            needs = {name: Need(cost, self._rate(name)) for name, cost in self._cost.items()}
            before = {name: interval.every for name, interval in self._intervals.items()}
            wanted = stretch(needs, step_seconds, self._budget, before)
        found: dict[str, float] = {}
        for name, every in wanted.items():
            if every != self._intervals[name].every:
                self._intervals[name].every = every
                cost_ms = self._cost.get(name, 0.0) * 1e3
                self._decisions.append(BudgetDecision(step, name, every, cost_ms, step_seconds * 1e3))
                found |= {f"budget/{name}/every": float(every), f"budget/{name}/cost_ms": cost_ms}
        return found

    # -- a resumed run -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: the intervals, where each hook is in its own, the decisions."""
        return {
            "intervals": {name: interval.state_dict() for name, interval in self._intervals.items()},
            "num_steps": self._num_steps,
            "cost": dict(self._cost),
            "decisions": [tuple(one) for one in self._decisions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; what was measured of a window is measured anew."""
        self.reset()
        for name, interval in state["intervals"].items():
            self._intervals[name].load_state_dict(interval)
        self._num_steps = state["num_steps"]
        self._cost = dict(state["cost"])
        self._decisions = [BudgetDecision(*one) for one in state["decisions"]]

    def _table(self) -> Table:
        actual = "not known yet" if self.actual is None else f"{self.actual:.2%}"
        rows = [(str(d.step), d.name, str(d.every), f"{d.cost_ms:.3f}", f"{d.step_ms:.3f}") for d in self.decisions]
        without = f" (without: {', '.join(self.not_counted)})" if self.not_counted else ""
        whole_run = "" if self.whole_run is None else f"; whole run, reports included: {self.whole_run:.2%}"
        title = f"asked {self.asked:.2%}, actual {actual}{without}{whole_run}"
        header = ("from step", "hook", "every", "cost ms", "step ms")
        return Table(header if rows else (), rows, numbers=(0, 2, 3, 4), title=title)


def _watch_of(hook: TrainingHook) -> Any:
    """Return what keeps to a budget by itself: the watch that a hook reports, or the hook; None if it does not."""
    one = getattr(hook, "tracker", hook)
    return one if hasattr(one, "take_budget") else None


def _is_of_step(hook: TrainingHook) -> bool:
    return not points_in_any_loop(hook).isdisjoint({HookPoint.PRE_STEP, HookPoint.POST_STEP})


def _by_step(decisions: Sequence[BudgetDecision]) -> dict[int, list[BudgetDecision]]:
    found: dict[int, list[BudgetDecision]] = {}
    for one in decisions:
        found.setdefault(one.step, []).append(one)
    return found
