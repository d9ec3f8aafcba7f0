"""What listens to the steps of a model: several on one model, evaluations before training, the first bad call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.debug import find_bad_operations
from hookline.observe.watch import monitor


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: Any, steps: int = 4, bad: int = 2, batches: int = 2) -> None:
    """Accumulate gradients of some batches in each step; the last batch of step ``bad`` has NaN."""
    for step in range(steps):
        for batch in range(batches):
            x = torch.ones(2, 3) * (float("nan") if (step, batch) == (bad, batches - 1) else 1.0)
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.nan_to_num_(0.1)


def test_several_listen_to_one_model_and_one_leaves_without_the_others() -> None:
    """NaN in the second batch of step 2; evaluations with NaN before training are no part of a step."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, second = (hl.debug.alarm(model, optimizer=optimizer) for _ in range(2))
    finder = find_bad_operations(model, optimizer)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(torch.full((2, 3), float("nan")))
    model.train()
    first.remove()
    train(model, optimizer)
    assert first.troubles == []
    assert {(each.step, each.micro_batch) for each in second.troubles} == {(2, 1)}
    assert second.troubles[0].place == "0/forward"
    assert [(each.step, each.places[0]) for each in finder.reports] == [(2, "0/forward")]
    second.remove()
    finder.remove()
    hl.assert_no_hooks(model)


def test_parts_of_a_step_are_bounded_and_nothing_of_it_is_lost(monkeypatch: Any) -> None:
    """As in a long evaluation; the last part has what is left."""
    monkeypatch.setattr(monitor, "_MOST_PARTS", 3)
    model = nn.Identity()
    listener = monitor.listen(model, on=("forward",))
    for number in range(7):
        model(torch.tensor([float("nan") if number == 6 else 1.0]))
    listener.end_step(0)
    (step,) = listener.arrived(wait=True)
    assert [int(part.of_places()[0].row[0]) for part in step.parts] == [1, 1, 1, 4]
    assert [each.label for each in step.bad_places().places] == ["forward"]
    listener.remove()
    hl.assert_no_hooks(model)


class Spoils(nn.Module):
    """Writes NaN into what its child returns, and returns that."""

    def __init__(self, spoils: bool) -> None:
        super().__init__()
        self.child, self.spoils = nn.Identity(), spoils

    def forward(self, x: Any) -> Any:
        out = self.child(x + 0)
        return out.fill_(float("nan")) if self.spoils else out


def test_what_a_module_passes_on_counts_for_both_and_is_read_again_once_it_was_written_to() -> None:
    model = nn.Sequential(Spoils(False), Spoils(True))
    listener = monitor.listen(model, on=("forward",))
    for _ in range(2):
        model(torch.ones(3))
    listener.end_step(0)
    (step,) = listener.arrived(wait=True)
    fired = {place.label: int(place.row[0]) for part in step.parts for place in part.of_places()}
    assert fired == dict.fromkeys(("forward", "0/forward", "0.child/forward", "1/forward", "1.child/forward"), 1)
    assert [each.label for each in step.bad_places().places] == ["1/forward", "forward"]
    listener.remove()


def test_one_who_ends_no_step_does_not_hide_the_micro_batches_of_another(monkeypatch: Any) -> None:
    """As an alarm whose optimizer was made anew."""
    monkeypatch.setattr(monitor, "_MOST_PARTS", 3)
    model = small()
    idle = hl.debug.alarm(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hl.debug.alarm(model, optimizer=optimizer) as alarm:
        train(model, optimizer)
    assert {(each.step, each.micro_batch) for each in alarm.troubles} == {(2, 1)}
    idle.remove(quiet=True)


# -- which was the first ---------------------------------------------------------------------------------------


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


def test_the_order_is_of_each_micro_batch() -> None:
    """In the first micro-batch the dropout is bad already in its first call; in the second one it is not."""
    model = OneDropout(LogOfNegative())
    with hl.debug.alarm(model, on="forward") as alarm:
        model(torch.full((2, 4), float("nan")))
        model(torch.randn(2, 4))
        alarm.step()
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
    with hl.debug.alarm(model, on="forward") as alarm:
        model(torch.randn(2, 4))
        alarm.step()
    assert [(each.what, each.place) for each in alarm.troubles] == [("Inf", "middle/forward"), ("NaN", "drop/forward")]
