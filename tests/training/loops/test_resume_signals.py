"""Ctrl-C and termination: the step is finished, the run saved; handlers are as before; the second press leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import helpers_resume
import pytest
import torch
from helpers_loops import left_by, linear_experiment
from helpers_resume import make, outcome, read_points, train
from helpers_training import differences
from helpers_waiting import PATIENCE
from helpers_warm import WarmPopen, run_warm

import hookline as hl
from hookline.errors import ResumeError
from hookline.training.checkpoints import Checkpoints


class Presses(hl.TrainingHook):
    """Sends a signal to its own process at a point of one epoch, or step."""

    def __init__(self, point: str, at: int, number: int = signal.SIGINT) -> None:
        self.hook_points = {hl.HookPoint[point]}
        self.at, self.number = at, number
        self.went_on = False

    def compute(self, ctx: hl.RunDataContext) -> dict[str, int]:
        if (ctx.step if ctx.hook_point.is_step else ctx.epoch) == self.at:
            signal.raise_signal(self.number)
            self.went_on = True
        return {"at": ctx.epoch}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_signal_lets_the_step_finish_and_saves(loop, number, tmp_path):
    """The hook that was running went on; the result says which signal; the handlers are those of before."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    hook = Presses("POST_STEP", 4, number)
    manager = hl.HookManager(hooks=[hook])
    options = {"manager": manager, "checkpoints": Checkpoints(tmp_path)}
    if loop == "epoch":
        result = hl.epoch_loop(linear_experiment(), epochs=5, **options)
    else:
        result = hl.step_loop(linear_experiment(), steps=15, **options)
    assert hook.went_on
    assert (result.interrupted, result.steps) == (signal.Signals(number).name, 5)
    assert Checkpoints(tmp_path).newest().name == "step_00000005.pt"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("point", ["PRE_EPOCH", "PRE_STEP", "POST_EPOCH", "SNAPSHOT"])
def test_a_signal_at_any_moment_leaves_a_run_that_goes_on(point, tmp_path):
    """What was under way is finished: the hooks of the moment, the evaluation, the end of the epoch."""
    expected = linear_experiment()
    hl.epoch_loop(expected, epochs=3)
    at = 4 if point == "PRE_STEP" else 1
    manager = hl.HookManager(hooks=[Presses(point, at)])
    stopped = hl.epoch_loop(linear_experiment(), epochs=3, manager=manager, checkpoints=Checkpoints(tmp_path))
    assert stopped.interrupted == "SIGINT"
    assert stopped.steps == {"PRE_EPOCH": 4, "PRE_STEP": 5, "POST_EPOCH": 6, "SNAPSHOT": 6}[point]
    experiment = linear_experiment()
    manager = hl.HookManager(hooks=[Presses(point, -1)])
    hl.epoch_loop(experiment, epochs=3, manager=manager, checkpoints=Checkpoints(tmp_path), resume=True)
    assert differences(left_by(expected), left_by(experiment)) == []


def test_a_signal_in_the_very_last_step_is_not_swallowed(tmp_path):
    """The run is complete all the same."""
    manager = hl.HookManager(hooks=[Presses("SNAPSHOT", 1)])
    result = hl.epoch_loop(linear_experiment(), epochs=2, manager=manager, checkpoints=Checkpoints(tmp_path))
    assert (result.interrupted, result.steps) == ("SIGINT", 6)


def test_the_second_press_leaves_at_once(tmp_path):
    """As Python would; what was saved before stays, and the run can be resumed."""
    raised = []

    class Twice(hl.TrainingHook):
        hook_points = {hl.HookPoint.POST_STEP}

        def compute(self, ctx):
            if ctx.step == 4:
                signal.raise_signal(signal.SIGINT)
                raised.append("once")
                signal.raise_signal(signal.SIGINT)
                raised.append("twice")

    options = {"manager": hl.HookManager(hooks=[Twice()]), "checkpoints": Checkpoints(tmp_path, every_steps=2)}
    with pytest.raises(KeyboardInterrupt):
        hl.epoch_loop(linear_experiment(), epochs=5, **options)
    assert raised == ["once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert Checkpoints(tmp_path).newest().name == "step_00000004.pt"
    result = hl.epoch_loop(linear_experiment(), epochs=5, checkpoints=Checkpoints(tmp_path), resume=True)
    assert result.steps == 15


@pytest.mark.parametrize(
    ("number", "workers"), [pytest.param(signal.SIGINT, 2, marks=pytest.mark.full), (signal.SIGTERM, 0)]
)
def test_a_process_with_workers_that_is_told_to_stop_is_resumed_as_if_it_never_was(number, workers, tmp_path):
    """The press goes to the whole group, as from a terminal; two runs in one folder are kept apart meanwhile."""
    program = [sys.executable, helpers_resume.__file__, str(tmp_path / "run"), "epoch", str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = WarmPopen([*program, "0.05"], stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    try:
        _wait_for(first, tmp_path / "run" / "checkpoints", steps=4)
        with pytest.raises(ResumeError, match=rf"process {first.pid} writes"):
            run_there(tmp_path)
        os.killpg(first.pid, number)
        output, _ = first.communicate(timeout=PATIENCE)
    finally:
        first.kill()
    assert output.strip() == signal.Signals(number).name
    assert first.returncode == 0
    run_warm([*program, "0"], check=True, timeout=PATIENCE, env=environment, stdout=subprocess.DEVNULL)
    whole = tmp_path / "whole"
    whole.mkdir()
    experiment, manager = make(whole, workers)
    train("epoch", experiment, manager)
    manager.close()
    assert differences(outcome(experiment, manager), torch.load(tmp_path / "run" / "outcome.pt")) == []
    assert read_points(whole) == read_points(tmp_path / "run")


def run_there(tmp_path: Path) -> None:
    """A run of this process in the folder of that one."""
    hl.epoch_loop(linear_experiment(), epochs=1, checkpoints=Checkpoints(tmp_path / "run" / "checkpoints"), resume=True)


def _wait_for(process: subprocess.Popen, folder: Path, steps: int) -> None:
    """Until it has made some steps."""
    deadline = time.monotonic() + PATIENCE
    while not any(int(path.stem[5:]) >= steps for path in folder.glob("step_*.pt")):
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.005)
