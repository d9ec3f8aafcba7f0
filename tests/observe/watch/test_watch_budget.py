"""Budgets of watches, by a clock that only the test moves: intervals, decisions, records, resumed runs."""

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


class FakeClock:
    """Stands still until the test moves it; counts how often it was asked."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


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


@pytest.mark.parametrize("share", [0, -1, True, "0.02", 2])
def test_a_budget_is_a_share(share):
    """Others are errors that show one."""
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
    assert len(found["budget/watch/actual"]) > len(first.budget.decisions)
    if shift:
        monkeypatch.setattr(type(first.budget), "_company", lambda self, begun, over: frozenset())
        monkeypatch.setattr("hookline.observe.watch.budgeted_schedule.first_interval", lambda number: 2)
        alone = two_watched(shift, share, 100)[:2]
        assert not all(one.budget.actual and one.budget.decisions[0].cost_ms >= 299 for one in alone)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_watches_of_a_model_begin_at_intervals_without_a_common_divisor(number):
    """Several begin with less than a half."""
    limit = Budget(0.02, window=1000, clock=FakeClock())
    model = nn.Linear(2, 2)
    own = [hl.watch(model, budget=limit) for _ in range(number)]

    def interval(watch: Any) -> int:
        first, second, *_ = [step for step in range(40) if watch.budget.is_active(step)]
        return second - first

    assert [interval(watch) for watch in own] == [2, 3, 5, 7, 11, 13][:number]
    for watch in own:
        watch.remove(quiet=True)


def test_a_run_with_a_budget_ends_with_the_same_bits():
    """An audit of a watch that skips steps; negative control: a hook that draws, and says it does not."""

    class Drawing(hl.TrainingHook):
        hook_points = frozenset({hl.HookPoint.POST_STEP})
        pure = True

        def compute(self, ctx: hl.RunDataContext) -> None:
            torch.rand(1)

    def train(hooks: list[str]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        clock = FakeClock()
        limit = Budget(0.02, window=3, clock=clock)
        watch = hl.watch(model, optimizer=optimizer, budget=limit) if "watch" in hooks else None
        manager = hl.HookManager(hooks=[Drawing()] if "drawing" in hooks else [])
        for step in range(24):
            manager.advance_step(0)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(5, 4)), torch.randint(2, (5,))).backward()
            optimizer.step()
            clock.now += 1 + 0.5 * (step % 2)
            manager.fire(hl.HookPoint.POST_STEP, epoch=0, model=model)
        assert watch is None or watch.budget.decisions

    assert hl.audit(train, ["watch"]).ok
    assert [one.hooks for one in hl.audit(train, ["watch", "drawing"]).culprits] == [("drawing",)]
