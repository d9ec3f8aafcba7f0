"""A run that is killed with SIGKILL at random moments, again and again, ends as the one that never was."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import helpers_resume
import pytest
import torch
from helpers_resume import make, outcome, read_records, train
from helpers_training import differences
from helpers_waiting import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Makes processes from one that has imported torch and nothing else, which takes 30 ms instead of 3 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([helpers_resume.__name__, "torch._dynamo"])  # which the first step would import
    return context


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[tuple[str, int], tuple[dict[str, torch.Tensor], list[dict]]]:
    """What runs leave that are never killed and have no checkpoints."""
    found = {}
    for loop in ("epoch", "step"):
        for workers in (0, 2):
            folder = tmp_path_factory.mktemp(f"{loop}{workers}")
            experiment, manager = make(folder, workers)
            train(loop, experiment, manager)
            manager.close()
            found[loop, workers] = outcome(experiment, manager), read_records(folder)
    return found


def kill_at_random(
    processes: ForkServerContext, folder: Path, loop: str, workers: int, seed: int, *, forget: bool = False
) -> int:
    """Have it run until it is done; how often it was killed."""
    moments = random.Random(seed)
    kills = 0
    while not (folder / "outcome.pt").exists():
        progress = processes.Value("i", 0)
        process = processes.Process(target=helpers_resume.main, args=(str(folder), loop, workers, progress, forget))
        process.start()
        if kills < 3:
            _wait_for(process, progress, moments.randint(1, 9))
            time.sleep(moments.random() * 0.01)  # somewhere in the step, or while it is saved
            process.kill()
            kills += 1
        process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL)
    return kills


def _wait_for(process: ForkServerProcess, progress: object, steps: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while progress.value < steps and process.is_alive():
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.0005)


@pytest.mark.parametrize(("workers", "seed"), [(0, 0), pytest.param(0, 1, marks=pytest.mark.full), (2, 2)])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_run_that_is_killed_and_resumed_is_the_run_that_never_was(loop, workers, seed, processes, whole, tmp_path):
    """Weights, optimizer, streams, belongings, hooks, and the log line by line, timing apart."""
    kills = kill_at_random(processes, tmp_path, loop, workers, seed)
    expected, records = whole[loop, workers]
    assert kills == 3
    assert differences(expected, torch.load(tmp_path / "outcome.pt")) == []
    assert read_records(tmp_path) == records
    assert len(records) > 20
    assert not list((tmp_path / "checkpoints").glob("*.part*"))


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_without_the_random_streams_the_resumed_run_is_another(loop, processes, whole, tmp_path):
    """Negative control."""
    kill_at_random(processes, tmp_path, loop, 0, seed=0, forget=True)
    expected, records = whole[loop, 0]
    assert {"weight 0.weight", "torch"} <= set(differences(expected, torch.load(tmp_path / "outcome.pt")))
    assert read_records(tmp_path) != records
