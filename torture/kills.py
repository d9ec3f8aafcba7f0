"""Runs that are killed with SIGKILL at random moments and resumed, again and again, until they are done.

Each must leave what a run leaves that was never killed: weights, optimizer, streams, hooks, and the log line by line.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import helpers_resume
import torch
from helpers_cases import Case, Part
from helpers_training import differences

__all__ = ["PART"]

KILLS = 4
"""Of one run."""
_expected: dict[tuple[str, int], tuple[dict[str, Any], list[dict[str, Any]]]] = {}


def prepare() -> None:
    """Make the runs that are never killed, one for each loop and number of loader processes."""
    for loop in ("epoch", "step"):
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                experiment, manager = helpers_resume.make(Path(folder), workers)
                helpers_resume.train(loop, experiment, manager)
                manager.close()
                _expected[loop, workers] = (
                    helpers_resume.outcome(experiment, manager),
                    helpers_resume.read_records(Path(folder)),
                )


def run_case(number: int) -> Case:
    """Kill a run several times, and compare what it leaves in the end."""
    rng = random.Random(number)
    loop, workers = rng.choice(["epoch", "step"]), rng.choice([0, 0, 2])
    with tempfile.TemporaryDirectory() as name:
        folder, kills = Path(name), 0
        while not (folder / "outcome.pt").exists():
            is_killed = _run_once(folder, loop, workers, rng, is_last=kills == KILLS)
            kills += is_killed
            if not is_killed and not (folder / "outcome.pt").exists():
                return Case(number, kills, [f"the resumed run failed after {kills} kills"])
        left, records = torch.load(folder / "outcome.pt"), helpers_resume.read_records(folder)
        parts = [str(path.name) for path in (folder / "checkpoints").glob("*.part*")]
    expected, lines = _expected[loop, workers]
    wrong = [f"{loop}, {workers} workers: {name}" for name in differences(expected, left)]
    if records != lines:
        wrong.append(f"{loop}: {len(records)} records instead of {len(lines)}, or others")
    wrong += [f"a half-written checkpoint is left: {part}" for part in parts]
    return Case(number, kills, wrong, counts={"runs": 1, "records compared": len(records)})


def _run_once(folder: Path, loop: str, workers: int, rng: random.Random, *, is_last: bool) -> bool:
    """Start or resume the run in a process; kill it somewhere unless it is the last time. Return if it was killed."""
    progress = multiprocessing.Value(ctypes.c_int, 0)
    child = os.fork()
    if not child:
        _be_run(folder, loop, workers, progress)
    steps = rng.randint(0, 9)
    while not is_last and progress.value < steps:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.0005)
    if not is_last:
        time.sleep(rng.random() * 0.01)  # somewhere in the step, or while it is saved
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _be_run(folder: Path, loop: str, workers: int, progress: Any) -> NoReturn:
    status = 1
    try:
        helpers_resume.main(folder, loop, workers, progress)
        status = 0
    finally:
        os._exit(status)


PART = Part(
    name="kills",
    does="SIGKILL at a random moment of a training run with checkpoints, then resume, four times for each run",
    holds="bits and records",
    goal=100,
    quick=4,
    run_case=run_case,
    prepare=prepare,
    batch=10,
)
