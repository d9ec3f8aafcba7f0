"""One set of hooks serves all who listen to the steps of a model, and each hears what it would hear alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def num_hooks(model: nn.Module) -> int:
    """Return how many hooks of watches are on the model."""
    return sum(each.name == "watch" for each in hl.attached(model))


def train(model: nn.Module, optimizer: Any, steps: int = 4, bad: int = 2, batches: int = 2) -> None:
    """Accumulate gradients of some batches in each step; one batch of step ``bad`` has NaN."""
    for step in range(steps):
        for batch in range(batches):
            x = torch.ones(2, 3) * (float("nan") if (step, batch) == (bad, batches - 1) else 1.0)
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.nan_to_num_(0.1)


def heard(model: Any, order: list[str], folder: Path) -> dict[str, Any]:
    """Train with some listeners, put on in that order; what each of them has found."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made: dict[str, Any] = {}
    for name in order:
        if name == "alarm":
            made[name] = hl.observe.alarm(model, optimizer=optimizer, on=("forward", "backward"))
        elif name == "finder":
            made[name] = find_bad_operations(model, optimizer)
        else:
            made[name] = FlightRecorder(to=folder / "flight.json", target=["0"]).recording(model, optimizer)
    made["hooks"] = num_hooks(model)
    train(model, optimizer)
    found: dict[str, Any] = {"hooks": made.pop("hooks")}
    for name, one in made.items():
        if name == "alarm":
            found[name] = [(each.step, each.micro_batch, each.place, each.places) for each in one.troubles]
            one.remove()
        elif name == "finder":
            found[name] = [(each.step, each.places) for each in one.reports]
            one.remove()
        else:
            one.__exit__(None, None, None)
            found[name] = [sorted(each.statistics) for each in one._steps], one.written
    hl.assert_no_hooks(model)
    return found


@pytest.mark.parametrize("order", [["alarm", "finder", "recorder"], ["recorder", "finder", "alarm"]])
def test_hooks_are_on_once_and_everybody_hears_what_it_hears_alone(order: list[str], tmp_path: Path) -> None:
    """NaN in the second batch of step 2; a recorder of one module hears of that one alone, whoever came first."""
    alone = {name: heard(small(), [name], tmp_path) for name in order}
    together = heard(small(), order, tmp_path)
    for name in order:
        assert together[name] == alone[name][name], name
    assert together["alarm"][0][:3] == (2, 1, "0/forward")
    assert {step for step, *_ in together["alarm"]} == {2}
    assert together["recorder"][0] == [["0/backward", "0/forward"]] * 4
    assert 0 < together["hooks"] == max(found["hooks"] for found in alone.values())


def test_who_leaves_takes_no_hooks_from_those_who_stay() -> None:
    """The last one takes them off; an evaluation before training is no part of a step."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, second = hl.observe.alarm(model, optimizer=optimizer), hl.observe.alarm(model, optimizer=optimizer)
    with torch.no_grad():
        model.eval()(torch.full((2, 3), float("nan")))
    model.train()
    first.remove()
    train(model, optimizer, bad=1, batches=1)
    assert first.troubles == []
    assert (second.troubles[0].step, second.troubles[0].micro_batch) == (1, 0)
    second.remove()
    hl.assert_no_hooks(model)


def test_a_listener_that_ends_no_step_keeps_a_bounded_number_of_parts() -> None:
    """As one whose optimizer never steps while another's does."""
    from hookline.observe.watch.monitor import _MOST_PARTS, listen

    model: Any = nn.Linear(1, 1)
    quiet = listen(model, on=("forward",), stats=("nonfinite",))
    other = listen(model, on=("forward",), stats=("nonfinite",))
    for step in range(_MOST_PARTS + 10):
        model(torch.ones(1, 1))
        other.end_step(step)
    assert len(quiet.parts) == _MOST_PARTS
    quiet.remove()
    other.remove()
    hl.assert_no_hooks(model)
