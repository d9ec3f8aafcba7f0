"""The first bad place is the one of the first bad call, also where a module is called several times in a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class LogOfNegative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0 - 1).log()


class OneDropout(nn.Module):
    """Calls one dropout before and after the layer that makes NaN."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.drop, self.middle = nn.Linear(4, 4), nn.Dropout(0.1), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.middle(self.drop(self.first(x))))


def step_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return optimizer, step


@pytest.mark.parametrize("compiled", [False, True])
def test_an_alarm_names_the_layer_between_two_calls_of_another(compiled: bool) -> None:
    model = OneDropout(LogOfNegative())
    optimizer, step = step_of(torch.compile(model) if compiled else model)
    with hl.observe.alarm(model, optimizer=optimizer) as alarm:
        step(torch.randn(2, 4))
    (trouble,) = alarm.troubles
    assert (trouble.place, trouble.what, trouble.doubts) == ("middle/forward", "NaN", ())


def test_the_order_is_of_each_micro_batch() -> None:
    """In the first micro-batch the dropout is bad already in its first call; in the second one it is not."""
    model = OneDropout(LogOfNegative())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.observe.alarm(model, on="forward", optimizer=optimizer) as alarm:
        model(torch.full((2, 4), float("nan")))
        model(torch.randn(2, 4))
        optimizer.step()
    assert [trouble.place for trouble in alarm.troubles] == ["first/forward", "middle/forward"]


class OnceInfinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() / 0


class ZeroTimes(nn.Module):
    """Called before and after; makes NaN of infinity."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def test_infinity_comes_before_the_nan_that_a_shared_module_makes_of_it() -> None:
    model = OneDropout(OnceInfinite())
    model.drop = ZeroTimes()  # type: ignore[assignment]
    optimizer, step = step_of(model)
    with hl.observe.alarm(model, on="forward", optimizer=optimizer) as alarm:
        step(torch.randn(2, 4))
    assert [(each.what, each.place) for each in alarm.troubles] == [
        ("Inf", "middle/forward"),
        ("NaN", "drop/forward"),
    ]
