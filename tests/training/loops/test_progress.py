"""The progress of a loop: on a terminal, in a notebook, elsewhere; and that the run stays the same."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from helpers_loops import left_by, rich_experiment
from helpers_training import differences
from rich.console import Console
from torch import nn

import hookline as hl
from hookline.screen import RunProgress


def screen() -> Console:
    return Console(file=io.StringIO(), width=110, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})


class Noted(RunProgress):
    """Says how far it is after each step, by a clock that moves on by a second each time it is asked."""

    def __init__(self) -> None:
        super().__init__(screen(), clock=Ticks())
        self.lines: list[str] = []

    def draw(self) -> None:
        super().draw()
        self.lines.append(self._line())

    def stop(self, metrics: Any = None) -> None:
        if self.is_running:
            super().stop(metrics)
            self.lines.append(self._line())


class Ticks:
    """A clock that moves on by a second each time it is asked: every step is drawn."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_it_is_off_unless_asked_for(capsys: pytest.CaptureFixture[str]):
    hl.epoch_loop(rich_experiment(), epochs=1)
    assert capsys.readouterr().out == ""


def test_epochs_are_counted_where_the_loader_has_no_length():
    """Only the end of an epoch tells how many steps it had."""
    bar = Noted()
    x = torch.randn(8, 2)
    model = nn.Linear(2, 1)
    experiment = hl.Experiment(
        model, torch.optim.SGD(model.parameters(), lr=0.01), get_loader=lambda epoch: iter([(x, x[:, :1])] * 3)
    )
    hl.epoch_loop(experiment, epochs=2, progress=bar)
    assert "2/2 epochs" in bar.lines[-1]


def test_a_resumed_run_begins_where_it_was(tmp_path: Any):
    """Steps that an earlier process has made are done."""

    def fail(epoch: int, metrics: Any) -> None:
        if epoch == 1:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        hl.epoch_loop(rich_experiment(on_epoch_end=fail), epochs=3, checkpoints=hl.Checkpoints(tmp_path, every=1))
    bar = Noted()
    hl.epoch_loop(
        rich_experiment(on_epoch_end=lambda *_: None),
        epochs=3,
        checkpoints=hl.Checkpoints(tmp_path, every=1),
        resume=True,
        progress=bar,
    )
    assert "5/15 steps" in bar.lines[0]
    assert "15/15 steps" in bar.lines[-1]


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_run_that_is_shown_is_the_run_that_is_not(loop: str):
    """Weights, buffers, gradients, optimizer, scheduler and random streams, bit for bit; drawing at every step."""

    def left(progress: bool, spoil: bool = False) -> dict[str, torch.Tensor]:
        shown = progress and RunProgress(screen(), clock=Ticks())
        extra = {"should_stop": lambda *_: bool(torch.rand(()) < 0)} if spoil else {}
        experiment = rich_experiment(**extra)
        if loop == "epoch":
            hl.epoch_loop(experiment, epochs=5, progress=shown)
        else:
            hl.step_loop(experiment, steps=25, snapshot_every=5, progress=shown)
        return left_by(experiment)

    assert differences(left(True), left(False)) == []
    assert differences(left(True, spoil=True), left(False)) != []
