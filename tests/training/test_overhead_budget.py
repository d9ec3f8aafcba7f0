"""Budgets of hooks and watches, by a clock that only the test moves: intervals, decisions, records, resumed runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from hookline.errors import OptionError
from hookline.observe import Budget
from hookline.observe.watch.overhead_budget import Need, TimeMark, stretch

PRE, POST = hl.HookPoint.PRE_STEP, hl.HookPoint.POST_STEP


class FakeClock:
    """Stands still until the test moves it; counts how often it was asked."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


class CostlyHook(hl.TrainingHook):
    """Takes some seconds of the clock, and notes its steps."""

    pure = True

    def __init__(self, name: str, clock: FakeClock, cost: float, *points: hl.HookPoint) -> None:
        self.name, self.hook_points = name, frozenset(points)
        self.clock, self.cost = clock, cost
        self.steps: list[int] = []

    def compute(self, ctx: hl.RunDataContext) -> None:
        """Take time."""
        self.steps.append(self.manager.global_step)
        self.clock.now += self.cost


def run(manager: hl.HookManager, clock: FakeClock, steps: int) -> None:
    """Steps of one second."""
    for _ in range(steps):
        manager.advance_step(0)
        manager.fire(PRE, epoch=0)
        clock.now += 1.0
        manager.fire(POST, epoch=0)


def hooks_of(clock: FakeClock, costly: float = 0.2) -> tuple[CostlyHook, CostlyHook]:
    """One that costs much before the step, one that costs little after it."""
    return CostlyHook("costly", clock, costly, PRE), CostlyHook("cheap", clock, 0.001, POST)


def managed(clock: FakeClock, costly: float = 0.2, **budget: Any) -> tuple[hl.HookManager, CostlyHook, CostlyHook, Any]:
    """A manager of these two with a budget of two percent."""
    hooks, sink = hooks_of(clock, costly), hl.sinks.MemorySink()
    limit = Budget(0.02, **{"window": 5, "clock": clock, **budget})
    return hl.HookManager(hooks=hooks, sinks=[sink], budget=limit), *hooks, sink


def test_the_interval_of_a_costly_hook_stretches_until_the_budget_holds():
    """The cheap one keeps its own; each decision is a record, with what was asked and what it is."""
    clock = FakeClock()
    manager, costly, cheap, sink = managed(clock)
    run(manager, clock, 120)
    assert cheap.steps == list(range(120))
    (decision,) = manager.budget.decisions
    assert decision.name == "costly"
    assert decision.every == 11  # 0.2 s into what the cheap one leaves of 0.02 s
    assert decision.cost_ms == pytest.approx(200)
    assert decision.step_ms == pytest.approx(1000)
    # Measured while it fired at every step; from the decision on, at every eleventh.
    gaps = [after - before for before, after in itertools.pairwise(costly.steps)]
    assert set(gaps[:4]) == {1}
    assert set(gaps[decision.step :]) == {11}
    assert manager.budget.actual <= 0.2 / 5 + 0.0011  # a window of five has one firing at most
    manager.flush_step_metrics(0)
    metrics = {name: value for record in sink.records for name, value in record.metrics.items()}
    assert metrics["budget/costly/every"] == [11.0]
    assert set(metrics["budget/asked"]) == {0.02}
    assert metrics["budget/actual"][0] == pytest.approx(0.201)
    spent = len(costly.steps[6:]) * 0.2 + len(cheap.steps[6:]) * 0.001
    assert spent / 114 < 0.02
    assert "asked 2.00%" in str(manager.budget)


def test_intervals_end_at_the_floor_and_shrink_when_there_is_room():
    """With at most 4 steps between two looks; when the hook costs next to nothing, it is as asked again."""
    clock = FakeClock()
    manager, costly, _, _ = managed(clock, at_least_every=4)
    run(manager, clock, 20)
    assert [one.every for one in manager.budget.decisions] == [4]
    assert costly.steps[-1] - costly.steps[-2] == 4
    costly.cost = 0.002
    run(manager, clock, 20)
    assert [one.every for one in manager.budget.decisions] == [4, 1]
    assert costly.steps[-1] - costly.steps[-2] == 1


@pytest.mark.parametrize(("stride", "floor"), [(1, 50), (7, 50), (20, 100), (100, 300)])
def test_the_floor_holds_for_hooks_that_are_asked_for_rarely(stride, floor):
    """A window of five steps has one of every twentieth or none: their share of steps is that of the whole run."""
    clock = FakeClock()
    manager, costly, cheap, _ = managed(clock, costly=500.0, at_least_every=floor)
    costly.step_schedule = hl.StepSchedule.of(stride)
    manager = hl.HookManager(hooks=[costly, cheap], budget=manager.budget._budget)
    run(manager, clock, 4000)
    gaps = [after - before for before, after in itertools.pairwise(costly.steps)]
    assert floor - stride < max(gaps[-5:]) <= floor
    assert max(gaps) <= floor
    assert {after - before for before, after in itertools.pairwise(cheap.steps[-20:])} == {1}


def test_a_hook_that_is_asked_for_rarely_gets_the_whole_budget():
    """Three percent of a step at every hundredth step: two percent allow every second of these."""
    clock = FakeClock()
    _, costly, _, _ = managed(clock, costly=3.0)
    costly.step_schedule = hl.StepSchedule.of(100)
    manager = hl.HookManager(hooks=[costly], budget=Budget(0.02, window=5, clock=clock))
    run(manager, clock, 6000)
    assert {after - before for before, after in itertools.pairwise(costly.steps[-10:])} == {200}
    assert len(manager.budget.decisions) < 30


def test_a_hook_fires_at_all_points_of_a_step_or_at_none():
    """It may keep something from one to the other."""
    clock = FakeClock()
    both = CostlyHook("both", clock, 0.1, PRE, POST)
    manager = hl.HookManager(hooks=[both], budget=Budget(0.02, window=5, clock=clock))
    run(manager, clock, 60)
    assert manager.budget.decisions
    assert set(hl_counts(both.steps).values()) == {2}


def hl_counts(steps: list[int]) -> dict[int, int]:
    """How often each step occurs."""
    return {step: steps.count(step) for step in steps}


def test_decisions_can_be_made_again_and_a_resumed_run_goes_on_with_them():
    """Another clock, the same steps; and in two halves."""
    clock = FakeClock()
    manager, costly, _, _ = managed(clock)
    run(manager, clock, 40)
    decisions = manager.budget.decisions
    other = FakeClock()
    again, replayed, _, _ = managed(other, 5.0, decisions=decisions)
    run(again, other, 17)
    assert replayed.steps == costly.steps[: len(replayed.steps)]
    third = FakeClock()
    resumed, rest, _, _ = managed(third, 5.0, decisions=decisions)
    resumed.load_state_dict(again.state_dict())
    run(resumed, third, 23)
    assert replayed.steps + rest.steps == costly.steps
    assert [tuple(one)[:3] for one in resumed.budget.decisions] == [tuple(one)[:3] for one in decisions]
    fresh, unaware, _, _ = managed(third, 5.0, decisions=decisions)  # negative control: nothing is loaded
    fresh.continue_from(16)
    run(fresh, third, 23)
    assert replayed.steps + unaware.steps != costly.steps


def test_every_instrument_gets_an_equal_part_and_what_is_left_goes_to_the_others():
    """Three that need 1, 10 and 40 of a budget of 30; intervals do not swing by less than a quarter."""
    needs = {"c": Need(0.40, 0.1), "a": Need(0.001, 1.0), "b": Need(0.01, 1.0)}
    budget = Budget(0.03)
    assert stretch(needs, 1.0, budget, {}) == {"a": 1, "b": 1, "c": 3}
    assert stretch(needs, 1.0, budget, {"c": 4}) == {"a": 1, "b": 1, "c": 3}
    assert stretch(needs, 1.0, budget, {"c": 3, "b": 1}) == {"a": 1, "b": 1, "c": 3}
    assert stretch({"c": Need(0.07, 1)}, 1.0, budget, {"c": 2})["c"] == 3
    assert stretch({"c": Need(0.10, 1)}, 1.0, budget, {"c": 5})["c"] == 5  # 4 would do
    assert stretch({"c": Need(0.10, 0.0015)}, 1e-9, budget, {})["c"] == 1  # is asked for less often than at_least_every


def test_times_of_a_device_are_read_when_they_have_arrived():
    """An event that has not come yet gives None, and nobody waits for it."""

    class Event:
        def __init__(self, at: float) -> None:
            self.at, self.is_over = at, False

        def query(self) -> bool:
            return self.is_over

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    begin, end = TimeMark(FakeClock()), TimeMark(FakeClock())
    begin._event, end._event = Event(1000.0), Event(3500.0)
    assert begin.seconds_until(end) is None
    begin._event.is_over = True
    assert begin.seconds_until(end) is None
    end._event.is_over = True
    assert begin.seconds_until(end) == 2.5


@pytest.mark.parametrize("share", [0, -1, True, "0.02", 2, None])
def test_a_budget_is_a_share(share):
    """Others are errors that show one; None is no budget."""
    if share is None:
        assert hl.HookManager(budget=None).budget is None
        return
    with pytest.raises(OptionError, match=r"0\.02"):
        hl.HookManager(budget=share)
    with pytest.raises(OptionError, match=r"0\.02"):
        hl.watch(nn.Linear(1, 1), budget=share)


def watched(clock: FakeClock, steps: int, first: Any = None, **budget: Any) -> tuple[Any, list[int]]:
    """Steps of one second, and of 0.3 more where the watch looks; which these were."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = hl.watch(model, "", optimizer=optimizer, budget=Budget(0.02, **{"window": 8, "clock": clock, **budget}))
    if first is not None:
        watch.load_state_dict(first)
    looked = []
    for step in range(watch.steps, watch.steps + steps):
        fired = watch.report()["fired"].values()
        clock.now += 1.0
        before = sum(fired)
        model(torch.ones(1, 2)).sum().backward()
        if sum(watch.report()["fired"].values()) > before:
            looked.append(step)
            clock.now += 0.3
        optimizer.step()
    watch.remove()
    return watch, looked


def test_a_watch_looks_at_as_many_steps_as_its_budget_allows():
    """Every second step is compared with the others first; then one look in fifteen steps; the floor; a resumed run."""
    clock = FakeClock()
    watch, looked = watched(clock, 60)
    (decision,) = watch.budget.decisions
    assert (decision.name, decision.every) == ("watch", 15)
    assert decision.cost_ms == pytest.approx(300)
    assert looked[: decision.step // 2] == list(range(0, decision.step, 2))
    before = [step for step in looked if step < decision.step]
    late = [step for step in looked if step >= decision.step]
    assert {after - step for step, after in itertools.pairwise([before[-1], *late])} == {15}
    assert len(late) > 1
    metrics = watch.to_metrics()
    assert metrics["budget/asked"] == 0.02
    assert metrics["budget/actual"] == pytest.approx(0.02)
    assert metrics["budget/every"] == 15
    whole_run = 0.3 * len(looked) / 60
    assert metrics["budget/whole_run"] == pytest.approx(whole_run)
    assert whole_run > 1.5 * 0.02  # the looks before the first decision are in it
    text = f"budget: asked 2.00%, actual 2.00% now, {whole_run:.2%} of the whole run; looks at 1 of 15 steps"
    assert text in str(watch)
    assert watched(FakeClock(), 40, at_least_every=6)[0].budget.decisions[-1].every == 6
    parts = watched(FakeClock(), 23, decisions=watch.budget.decisions)
    rest = watched(FakeClock(), 37, parts[0].state_dict(), decisions=watch.budget.decisions)
    assert parts[1] + rest[1] == looked
    assert "budget/asked" not in hl.watch(nn.Linear(1, 1)).to_metrics()


def test_the_share_of_the_whole_run_has_the_first_looks_and_the_reports_in_it():
    """It is what the clock says: looks, firings of steps, and reports at a point that the budget does not stretch."""
    clock = FakeClock()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = hl.watch(model, "", on="forward", optimizer=optimizer)
    hooks = [watch, CostlyHook("small", clock, 0.01, POST), CostlyHook("report", clock, 0.5, hl.HookPoint.SNAPSHOT)]
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=hooks, sinks=[sink], budget=Budget(0.05, window=8, clock=clock), loop_type="step")
    looks = 0
    for step in range(101):
        manager.advance_step(0)
        clock.now += 1.0 + 0.3 * watch._rules.is_due()
        looks += watch._rules.is_due() and step < 100  # at the beginning of the last step 100 are over
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        manager.fire(POST, epoch=0)
        if step % 10 == 3:
            manager.fire(hl.HookPoint.SNAPSHOT, epoch=0)
    spent = 0.3 * looks + 0.01 * len([step for step in hooks[1].steps if step < 100]) + 0.5 * 10
    assert manager.budget.whole_run == pytest.approx(spent / 100)
    assert manager.budget.actual < 0.05 < manager.budget.whole_run
    assert f"whole run, reports included: {spent / 100:.2%}" in str(manager.budget)
    manager.flush_step_metrics(0)
    recorded = [value for record in sink.records for value in record.metrics.get("budget/whole_run", [])]
    assert recorded
    assert recorded[-1] == pytest.approx(spent / 100, rel=0.1)  # of the last window that was over
    manager.budget.reset()
    assert manager.budget.whole_run is None
    watch.remove()


def test_the_budget_of_a_manager_holds_for_its_watches_and_is_not_said_to_cost_nothing():
    """A watch and `stats` get parts, one with its own keeps it; what cannot be measured is named; decisions again."""
    clock = FakeClock()

    class Tracker:
        name = "tracker"

        def to_metrics(self) -> dict[str, float]:
            return {}

        def reset(self) -> None:
            """Count from zero."""

    def trained(**budget: Any) -> tuple[hl.HookManager, list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = hl.watch(model, "0", on="forward", optimizer=optimizer)
        limit = Budget(0.06, **{"window": 25, "clock": clock, **budget})
        hooks = [watch, Tracker(), CostlyHook("cheap", clock, 0.01, POST)]
        manager = hl.HookManager("stats", hooks, hook_config={"stats": {"every": 1, "on": "forward"}}, budget=limit)
        manager.start(model)
        looked = []
        for step in range(80):
            manager.advance_step(0)
            clock.now += 1.0 + 0.3 * watch._rules.is_due()
            looked += [step] * watch._rules.is_due()
            model(torch.ones(1, 2)).sum().backward()
            clock.now += 0.1 * manager.hooks["stats"]._watch._rules.is_due()
            optimizer.step()
            manager.fire(POST, epoch=0)
        manager.finish()
        watch.remove()
        return manager, looked

    manager, looked = trained()
    last = {one.name: one for one in manager.budget.decisions}
    assert set(last) == {"watch", "stats"}
    assert last["watch"].cost_ms == pytest.approx(300)
    assert last["stats"].cost_ms == pytest.approx(100)
    assert last["watch"].every == 15  # 0.3 s into a third of six percent of 1.01 s
    assert last["stats"].every == 5
    assert manager.budget.actual == pytest.approx(0.02 + 0.02 + 0.01, rel=0.05)
    assert str(manager.budget).startswith("asked 6.00%, actual ")
    assert "(without: tracker)" in str(manager.budget)
    assert "asked 2.00%" in repr(manager.hooks["watch"].tracker.budget)
    assert trained(decisions=manager.budget.decisions)[1] == looked
    own = hl.watch(nn.Linear(1, 1), budget=0.5)
    assert "asked 50.00%" in repr(hl.HookManager(hooks=[own], budget=0.02).hooks["watch"].tracker.budget)
    alone = hl.HookManager(hooks=[hl.watch(nn.Linear(1, 1))], budget=0.02)
    run(alone, clock, 50)
    assert "not known yet" in str(alone.budget)  # the model was never called


def two_watched(shift: int, share: float, steps: int) -> tuple[Any, Any, Any]:
    """Two watches of one model, the second made ``shift`` steps later, 0.3 s a look each; and the records."""
    clock, sink = FakeClock(), hl.sinks.MemorySink()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watches: list[Any] = []
    manager = hl.HookManager(sinks=[sink])
    for step in range(steps):
        if step in (0, shift) and len(watches) < 2:
            for _ in range(2 if shift == 0 else 1):
                limit = Budget(share, window=20, clock=clock)
                watches.append(hl.watch(model, "", on="forward", optimizer=optimizer, budget=limit))
            if step == 0:
                manager = hl.HookManager(hooks=[watches[0]], sinks=[sink])
        manager.advance_step(0)
        clock.now += 1.0 + 0.3 * sum(one._rules.is_due() for one in watches)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    manager.flush_step_metrics(0)
    for one in watches:
        one.remove(quiet=True)
    return *watches, sink


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("share", [0.15, 0.3])
def test_two_watches_of_a_model_do_not_take_each_others_looks_for_the_step(shift, share, monkeypatch):
    """At equal intervals, in turns or at the same steps; negative control: each as if it were alone.

    Every decision is a record, with what was asked for and what it takes.
    """
    first, second, sink = two_watched(shift, share, 700)
    for watch in (first, second):
        decisions = watch.budget.decisions
        assert decisions
        assert all(one.cost_ms >= 299 for one in decisions)
        assert decisions[0].cost_ms == pytest.approx(300)
        assert 0.3 / decisions[-1].every <= share + 1e-9
    found = {name: value for record in sink.records for name, value in record.metrics.items()}
    assert found["budget/watch/every"] == [float(one.every) for one in first.budget.decisions]
    assert found["budget/watch/cost_ms"] == [one.cost_ms for one in first.budget.decisions]
    assert set(found["budget/watch/asked"]) == {share}
    assert found["budget/watch/actual"][0] == pytest.approx(0.3 / first.budget.decisions[0].every)
    assert len(found["budget/watch/actual"]) > len(first.budget.decisions)  # with every window, as a manager's
    if shift:
        monkeypatch.setattr(type(first.budget), "_company", lambda self, begun, over: frozenset())
        monkeypatch.setattr("hookline.observe.watch.budgeted_schedule.first_interval", lambda number: 2)
        alone = two_watched(shift, share, 100)[:2]
        assert not all(one.budget.actual and one.budget.decisions[0].cost_ms >= 299 for one in alone)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_watches_begin_at_intervals_without_a_common_divisor(number):
    """Those of one model, and those that share a manager's budget, by one rule; several begin with less than a half."""
    limit = Budget(0.02, window=1000, clock=FakeClock())
    model = nn.Linear(2, 2)
    own = [hl.watch(model, budget=limit) for _ in range(number)]
    shared = [hl.watch(nn.Linear(2, 2)) for _ in range(number)]
    for place, watch in enumerate(shared):
        watch.name = f"watch{place}"
    hl.HookManager(hooks=shared, budget=limit)

    def interval(watch: Any) -> int:
        first, second, *_ = [step for step in range(40) if watch.budget.is_active(step)]
        return second - first

    assert [interval(watch) for watch in own] == [2, 3, 5, 7, 11, 13][:number]
    assert [interval(watch) for watch in shared] == ([2] if number == 1 else [3, 5, 7, 11, 13, 3][:number])
    for watch in [*own, *shared]:
        watch.remove(quiet=True)


def test_a_run_with_a_budget_ends_with_the_same_bits():
    """An audit of a manager and a watch that skip steps; negative control: a hook that draws, and says it does not."""

    class Drawing(CostlyHook):
        def compute(self, ctx: hl.RunDataContext) -> None:
            torch.rand(1)

    def train(hooks: list[str]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        clock = FakeClock()
        limit = Budget(0.02, window=3, clock=clock)
        watch = hl.watch(model, optimizer=optimizer, budget=limit) if "watch" in hooks else None
        kind = Drawing if "drawing" in hooks else CostlyHook
        chosen = [kind("costly", clock, 0.2, POST)] if {"drawing", "manager"} & set(hooks) else []
        manager = hl.HookManager(hooks=chosen, budget=limit)
        for step in range(12):
            manager.advance_step(0)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(5, 4)), torch.randint(2, (5,))).backward()
            optimizer.step()
            clock.now += 1 + 0.5 * (step % 2)
            manager.fire(POST, epoch=0, model=model)
        decided = [manager.budget.decisions, watch.budget.decisions if watch is not None else [1]]
        assert not hooks or all(decided) or "manager" not in hooks

    assert hl.audit(train, ["manager", "watch"]).ok
    assert [one.hooks for one in hl.audit(train, ["watch", "drawing"]).culprits] == [("drawing",)]
