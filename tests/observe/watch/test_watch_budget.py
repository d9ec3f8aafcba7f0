"""A budget of a watch, by a clock that only the test moves: the interval, what is told of it, a resumed run."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.errors import OptionError
from hookline.observe.watch.watch import TimeMark


class FakeClock:
    """Stands still until the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr("hookline.observe.watch.watch.perf_counter", found)
    return found


@pytest.mark.parametrize("share", [0, -1, True, "0.02", 2])
def test_a_budget_is_a_share(share):
    with pytest.raises(OptionError, match=r"0\.02"):
        hl.watch(nn.Linear(1, 1), budget=share)


def watched(clock: FakeClock, steps: int, first: Any = None, cost: float = 0.29) -> tuple[Any, list[int]]:
    """Steps of one second, and of `cost` more where the watch looks; which these were."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = hl.watch(model, "", optimizer=optimizer, budget=0.02)
    if first is not None:
        watch.load_state_dict(first)
    looked = []
    for step in range(watch.steps, watch.steps + steps):
        before = sum(watch.report()["fired"].values())
        clock.now += 1.0
        model(torch.ones(1, 2)).sum().backward()
        if sum(watch.report()["fired"].values()) > before:
            looked.append(step)
            clock.now += cost
        optimizer.step()
    watch.remove()
    return watch, looked


def test_a_watch_looks_at_as_many_steps_as_its_budget_allows(clock):
    """Every second step is compared with the others first; then one look in fifteen steps; a resumed run goes on."""
    watch, looked = watched(clock, 100)
    assert looked[:16] == list(range(0, 32, 2))
    assert {after - step for step, after in itertools.pairwise(looked[16:])} == {15}
    assert len(looked) > 19
    assert (watch.budget.share, watch.budget.actual, watch.budget.every) == (0.02, pytest.approx(0.29 / 15), 15)
    assert "budget: asked 2.00%, actual 1.93%; looks at 1 of 15 steps" in str(watch)
    parts = watched(clock, 53)
    rest = watched(clock, 47, parts[0].state_dict())
    assert parts[1] + rest[1] == looked
    assert watched(clock, 50, cost=0.0)[0].budget.every == 1


def test_marks_on_two_devices_are_compared_on_the_host(clock):
    """Their events cannot be: torch raises."""
    one, other = TimeMark(), TimeMark()
    one._event = other._event = Mock(elapsed_time=Mock(side_effect=ValueError("on two devices")))
    other._seconds = 3.0
    assert one.seconds_until(other) == 3.0
