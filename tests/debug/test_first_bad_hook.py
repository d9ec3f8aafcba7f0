"""The first bad operation as a lifecycle hook: in the loops, in a loop that is followed, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_first_bad import Run, log_of_negative, root_of_zero
from helpers_house import House, differences, fingerprint, house_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.debug import FirstBadOperation, FlightRecorder
from hookline.integrations.loop_events import FirstStep


class Planting(hl.Experiment):
    """Trains the planted model by the loop's own step; counts its losses, which a second run must not show."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.model, run.optimizer, run.data)
        self.run, self.seen = run, []

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen.append(batch["ids"][0])
        return self.run.loss(model, batch)


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_both_loops_hand_over_their_steps(loop: str, tmp_path: Path) -> None:
    """The operator is named, the report is in the folder of the run, and the experiment's own list is as it was."""
    run = Run(root_of_zero)
    hook = FirstBadOperation(every=2)
    experiment = Planting(run)
    manager = hl.HookManager(hooks=[hook], sinks=[memory := hl.sinks.MemorySink()])
    context = {"run_dir": str(tmp_path)}
    if loop == "epoch":
        hl.epoch_loop(experiment, epochs=1, manager=manager, run_context=context)
    else:
        hl.step_loop(experiment, steps=4, manager=manager, snapshot_every=0, run_context=context)
    (report,) = hook.reports
    assert report.operation is not None
    assert (report.step, report.operation.operator) == (2, "aten.div.Tensor")
    assert (report.operation.module, report.operation.where) == ("layers.7.gate", "backward")
    assert experiment.seen == [0, 1, 2, 3]
    (written,) = json.loads((tmp_path / "first_bad_operation.json").read_text())
    assert written["operation"]["node"] == "SqrtBackward0"
    assert written["headline"] == report.headline()
    assert memory.latest["first_bad_operation/bad_steps"][-1] == 2
    hl.assert_no_hooks(run.model)


def test_a_followed_loop_has_its_forward_run_again() -> None:
    """By name, without a word about the loss; the backward too."""
    for planted, operator in ((log_of_negative, "aten.log.default"), (root_of_zero, "aten.div.Tensor")):
        run = Run(planted)
        hooks = ["first_bad_operation"]
        loader = DataLoader(run.data, batch_size=None)
        with hl.follow(run.model, run.optimizer, hooks, loader=loader) as followed:
            for batch in loader:
                run.step(batch)
        found = followed.manager.hooks["first_bad_operation"].reports
        assert [(each.step, each.operation.operator, each.operation.module) for each in found] == [
            (2, operator, "layers.7.gate")
        ]


def test_the_step_has_its_number_where_a_script_is_followed_from_its_first_step_on() -> None:
    """The forward of step 0 is over when the optimizer makes the model known; the step counts all the same."""
    run, runs = Run(log_of_negative), []

    def begin(optimizer: Any, first: FirstStep) -> bool:
        runs.append(hl.follow(run.model, optimizer, ["first_bad_operation"], loader=first.loader))
        first.hand_over(runs[0])
        return True

    waiting = FirstStep(begin)
    try:
        for batch in DataLoader(run.data, batch_size=None):
            run.step(batch)
    finally:
        waiting.remove()
        runs[0].close()
    assert [each.step for each in runs[0].manager.hooks["first_bad_operation"].reports] == [2]


def _train(hooks: list[Any], *, draws: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = House().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    class Steps(hl.Experiment):
        def loss_fn(self, model: nn.Module, batch: int) -> Tensor:
            loss = model(*house_batch(batch))["loss"]
            losses.append(loss.detach())
            return loss

    manager = hl.HookManager(hooks=hooks)
    hl.step_loop(Steps(model, optimizer, list(range(10))), steps=20, manager=manager, snapshot_every=0)
    return fingerprint(model, optimizer, losses)


class Drawing(hl.TrainingHook):
    """Draws from the run's own stream in the middle of every step."""

    hook_points = frozenset({hl.HookPoint.POST_STEP})
    wraps_steps = True

    def around_step(self, step: Any, batch: Any) -> Any:
        torch.rand(1)
        return step(batch)

    def compute(self, ctx: Any) -> None:
        return None


def test_a_run_with_the_hook_is_the_run_without_to_the_last_bit(tmp_path: Path) -> None:
    """Twenty steps with dropout, BatchNorm and AdamW; negative control: a hook that draws around each step."""
    bare = _train([])
    assert differences(bare, _train([FirstBadOperation(every=3)])) == []
    assert differences(bare, _train([FlightRecorder(to=tmp_path / "flight.json")])) == []
    assert differences(bare, _train([Drawing()])) != []
