"""Hooks come on when something happens and go off again; a step that does not repeat is found at its first operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_house import House, differences, fingerprint, house_batch
from torch import Tensor, nn

import hookline as hl
from hookline.analyses import HessianHook
from hookline.debug import on_trigger, replay_check


class Counted(hl.TrainingHook):
    """Notes the steps at which it is called, and whether it was started."""

    hook_points = frozenset({hl.HookPoint.POST_STEP})

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.started = 0

    def start(self, model: nn.Module) -> None:
        self.started += 1

    def finish(self) -> None:
        self.started -= 1

    def compute(self, ctx: Any) -> dict[str, float]:
        self.seen.append(ctx.step)
        assert self.started == 1
        return {"step": float(ctx.step)}


class Losses(hl.Experiment):
    """Trains one number, to whose loss is added what is told for that step."""

    def __init__(self, added: dict[int, float]) -> None:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.0), list(range(30)))
        self.added = added

    def loss_fn(self, model: nn.Module, batch: int) -> Tensor:
        return model(torch.ones(2, 1)).square().mean() + self.added.get(batch, 0.0)


@pytest.mark.parametrize(
    ("when", "added", "steps"),
    [
        ("nan", {12: float("nan"), 14: float("nan")}, [13, 14, 15, 16, 17]),
        ("loss_spike", {12: 50.0}, [13, 14, 15]),
        ("loss_spike", dict.fromkeys(range(12, 30), 50.0), [13, 14, 15]),
        (lambda ctx: ctx.step == 4, {}, [5, 6, 7]),
    ],
    ids=["nan", "loss_spike", "new_level", "function"],
)
def test_hooks_are_on_for_the_next_steps_and_off_again(when: Any, added: dict[int, float], steps: list[int]) -> None:
    """A lifecycle hook and a watch; what happens again meanwhile counts from there. A loss that stays up rose once."""
    counted, watches = Counted(), []

    def make(model: nn.Module) -> hl.observe.Watch:
        watches.append(hl.watch(model, on="forward"))
        return watches[-1]

    trigger = on_trigger(when, do=[counted, make], steps=3)
    experiment = Losses(added)
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[trigger], sinks=[sink])
    hl.step_loop(experiment, steps=30, manager=manager, snapshot_every=0)
    assert counted.seen == steps
    assert counted.started == 0
    assert len(watches) == 1
    assert sum(watches[0].report()["fired"].values()) == len(steps)
    assert sink.latest[f"{trigger.name}/Counted/step"][-1] == steps[-1]
    hl.assert_no_hooks(experiment.model)


def test_options_of_a_trigger_that_cannot_work_are_refused() -> None:
    """When it is made."""
    for options, match in (
        ({"when": "nam", "do": Counted()}, "did you mean 'nan'"),
        ({"when": None, "do": Counted()}, "got None"),
        ({"when": "nan", "do": []}, "do= is empty"),
        ({"when": "nan", "do": Counted(), "steps": 0}, "steps="),
        ({"when": "nan", "do": HessianHook()}, "cannot be switched on"),
        ({"when": "nan", "do": "norms"}, "lifecycle hooks, or functions of the model"),
    ):
        with pytest.raises(hl.errors.OptionError, match=match):
            on_trigger(options.pop("when"), **options)


def _train(hooks: list[Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = House().train()
    losses = []

    class Steps(hl.Experiment):
        def loss_fn(self, model: nn.Module, batch: int) -> Tensor:
            loss = model(*house_batch(batch))["loss"]
            losses.append(loss.detach())
            return loss

    experiment = Steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), list(range(20)))
    hl.step_loop(experiment, steps=20, manager=hl.HookManager(hooks=hooks), snapshot_every=0)
    return fingerprint(model, experiment.optimizer, losses)


def test_a_run_with_triggers_idle_and_triggered_is_the_run_without() -> None:
    """To the last bit; negative control: what is switched on changes a weight."""

    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.head.weight.add_(1e-3)

    bare = _train([])
    assert differences(bare, _train([on_trigger("nan", do=Counted())])) == []
    watching = on_trigger(lambda ctx: ctx.step == 7, do=lambda model: hl.watch(model), steps=4)
    assert differences(bare, _train([watching])) == []
    assert watching.times == 1
    assert differences(bare, _train([on_trigger(lambda ctx: ctx.step == 7, do=spoil)])) != []


class Unsteady(nn.Module):
    """Adds a little that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        OUTSIDE["calls"] += 1
        return self.linear(x) * (1 + 1e-7 * (OUTSIDE["calls"] == 3))


OUTSIDE = {"calls": 0}


def test_a_step_that_does_not_repeat_is_told_with_the_first_operator_that_differs() -> None:
    """Equal runs are said to be equal; the run is as it was before, gradients and random streams included."""
    torch.manual_seed(0)
    OUTSIDE["calls"] = 0
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Sequential(nn.Tanh(), Unsteady()), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(4, 8)
    step(batch)
    OUTSIDE["calls"] = -100
    before = fingerprint(model, optimizer, [torch.zeros(1)])
    same = replay_check(step, model, optimizer, batch, times=3)
    assert same
    assert "3 runs of the step are equal" in str(same)
    assert same.compared > 60
    OUTSIDE["calls"] = 0
    found = replay_check(step, model, optimizer, batch, times=4)
    assert differences(before, fingerprint(model, optimizer, [torch.zeros(1)])) == []
    assert not found
    assert found.run == 2
    assert (found.operator, found.where) == ("aten.mul.Tensor", "forward of '2.1'")
    assert "in forward: return self.linear(x) * (1" in found.source
    hl.assert_no_hooks(model)
    with pytest.raises(hl.errors.OptionError, match="times="):
        replay_check(step, model, optimizer, batch, times=1)
