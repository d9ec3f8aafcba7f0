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
from hookline.observe.watch.budget import TimeMark


class FakeClock:
    """Stands still until the test moves it; counts how often it was asked."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now


def test_times_of_a_device_are_read_when_they_have_arrived():
    """An event that has not come yet gives None, and nobody waits for it."""

    class Event:
        is_over = False

        def query(self) -> bool:
            return self.is_over

        def elapsed_time(self, later: object) -> float:
            return 2500.0

    begin, end = TimeMark(FakeClock()), TimeMark(FakeClock())
    begin._event, end._event = Event(), Event()
    for mark in (begin, end):
        assert begin.seconds_until(end) is None
        mark._event.is_over = True
    assert begin.seconds_until(end) == 2.5


@pytest.mark.parametrize("share", [0, -1, True, "0.02", 2])
def test_a_budget_is_a_share(share):
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
    assert decision.every == 15
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
    assert "budget: asked 2.00%, actual 2.00%; looks at 1 of 15 steps" in str(watch)
    assert watched(FakeClock(), 40, at_least_every=6)[0].budget.decisions[-1].every == 6
    parts = watched(clock, 23)
    rest = watched(clock, 37, parts[0].state_dict())
    assert parts[1] + rest[1] == looked
    assert "budget/asked" not in hl.watch(nn.Linear(1, 1)).to_metrics()


def test_intervals_shrink_when_there_is_room_and_decisions_are_records():
    """A watch that looks at every step leaves one out now and then, and sees when looks get dear."""
    clock, sink = FakeClock(), hl.sinks.MemorySink()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    limit = Budget(0.1, window=20, clock=clock)
    with hl.watch(model, "", on="forward", optimizer=optimizer, budget=limit) as watch:
        manager = hl.HookManager(hooks=[watch], sinks=[sink])
        for step in range(900):
            manager.advance_step(0)
            cost = 0.5 if step < 100 or step > 600 else 0.01
            clock.now += 1.0 + cost * watch._passes.is_due()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        manager.flush_step_metrics(0)
    every = [one.every for one in watch.budget.decisions]
    assert (every[0], min(every), every[-1]) == (5, 1, 5)
    found = {name: value for record in sink.records for name, value in record.metrics.items()}
    assert found["budget/watch/every"] == [float(each) for each in every]
    assert found["budget/watch/cost_ms"] == [one.cost_ms for one in watch.budget.decisions]
    assert len(found["budget/watch/actual"]) > len(every)


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
