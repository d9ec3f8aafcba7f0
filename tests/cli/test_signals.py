"""A run that is stopped, in a process of its own, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_cli import TINY, facts_of, hookline, records_of, same_weights
from helpers_waiting import PATIENCE
from helpers_warm import WarmPopen

FLAGS = ("--epochs", "30", "--hooks", "norms", "path_length", "--hook-csv", "--silent", "--no-report")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run with slow steps, once it has written its first records."""
    process = WarmPopen(
        [sys.executable, "-m", "hookline", "run", TINY, *FLAGS, "--pause", "0.02", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = folder / "runs" / "tiny" / "forward" / "records.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not (log.exists() and log.read_text().count("\n") > 6):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    done = hookline("run", TINY, *FLAGS, "--pause", "0.02", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "tiny" / "forward"


def rows(folder: Path) -> list[dict]:
    return [{key: value for key, value in record.items() if key != "time"} for record in records_of(folder)]


def values(folder: Path) -> list[tuple]:
    """Every value of a run with its place: a stopped run writes the metrics of its steps in two records."""
    found = []
    for record in records_of(folder):
        for name, value in record["metrics"].items():
            steps = record.get("steps", {}).get(name)
            pairs = [(record["step"], value)] if steps is None else zip(steps, value, strict=True)
            found += [(record["point"], record["epoch"], name, step, str(one)) for step, one in pairs]
    return sorted(found)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_a_stopped_run_saves_and_goes_on_as_if_nothing_had_been(tmp_path, whole, number, code):
    """The exit code, the sentence with the command, and after it: weights as of one piece, every value once."""
    process = start(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert f"Stopped by {signal.Signals(number).name}, and saved. To continue: hookline run " in out
    assert "--resume" in out
    assert "Traceback" not in err
    folder = tmp_path / "runs" / "tiny" / "forward"
    assert facts_of(folder)["status"] == "stopped"
    assert facts_of(folder)["result"]["steps"] < 90
    done = hookline("run", TINY, "--resume", "--pause", "0.02", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_weights(folder, whole)
    assert values(folder) == values(whole)
    assert facts_of(folder)["status"] == "finished"


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, whole):
    """SIGKILL, with checkpoints every epoch; nothing is lost, nothing is there twice."""
    process = start(tmp_path, "--save-checkpoints")
    process.kill()
    process.communicate(timeout=PATIENCE)
    folder = tmp_path / "runs" / "tiny" / "forward"
    assert facts_of(folder)["status"] == "running"
    done = hookline("run", TINY, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_weights(folder, whole)
    assert rows(folder) == rows(whole)
    assert (folder / "forward.csv").read_text() == (whole / "forward.csv").read_text()


def test_two_runs_of_one_folder_at_once_are_refused(tmp_path):
    """The second is told who has it, and leaves the first alone."""
    process = start(tmp_path, "--epochs", "2000")
    try:
        done = hookline("run", TINY, "--resume", cwd=tmp_path)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert str(process.pid) in done.stderr
        assert "Traceback" not in done.stderr
        assert facts_of(tmp_path / "runs" / "tiny" / "forward")["status"] == "running"
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
