"""Runs of ``hookline run`` that are killed and resumed, or that meet a full disk, with all their sinks on.

    python torture/command_runs.py --kills 100                # five sinks; SIGKILL at random moments
    python torture/command_runs.py --part disk --kills 10     # ten runs on a disk that is full for a while
    python torture/command_runs.py --part remote --kills 10   # W&B offline and MLflow in a local store

Each step gives a digest of the weights as a metric. So one comparison, with a run that was left alone, says both: every
step is in the destination once, and the weights had the same bits at every step. Every run is a process; all goes
through the command line, so that two versions of the package can be compared.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import json
import os
import random
import resource
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # children are forked, which does not go with OpenMP's threads
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_DISABLE_TELEMETRY="true", COLUMNS="160")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.nn.functional as F
from helpers_cases import Case, Part, run_part
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl

__all__ = ["PARTS", "Digest", "FullDisk", "Subject"]

KILLS = 4
"""Of one run."""
EPOCHS, BATCHES = 10, 6
FULL = range(10, 40)
"""The steps at which a disk is full."""
PATIENCE = 60.0
"""Seconds that a sink in another process may take after the run is over."""
FLAGS = {
    "kills": ("--hook-csv", "--hook-jsonl", "--hook-parquet", "--hook-tensorboard"),
    "disk": ("--hook-csv", "--hook-jsonl", "--hook-parquet", "--hook-tensorboard"),
    "remote": ("--hook-wandb", "torture", "--hook-mlflow"),
}
Points = list[tuple[int, int]]
"""Steps, each with the digest of the weights after it."""


# -- what is trained ---------------------------------------------------------------------------------------------


class Subject(hl.Experiment):
    """Dropout, AdamW, a scheduler and shuffled rows; slow enough to be killed at any moment."""

    name = "subject"

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(0)
        rows = TensorDataset(
            torch.randn(8 * BATCHES, 4, generator=made), torch.randint(2, (8 * BATCHES,), generator=made)
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(model, optimizer, DataLoader(rows, batch_size=8, shuffle=True), scheduler=scheduler)

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.01)
        return F.cross_entropy(model(batch[0]), batch[1])


class Digest(hl.TrainingHook):
    """Return a digest of the weights in 24 bits, which a float32 holds, and the step. Draw a number, too."""

    name = "digest"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        torch.rand(1)
        data = b"".join(value.detach().numpy().tobytes() for value in ctx.model.state_dict().values())
        return {"weights": int.from_bytes(hashlib.sha256(data).digest()[:3], "big"), "step": ctx.step}


class FullDisk(hl.TrainingHook):
    """Leave no byte on the disk of the run at the steps of `FULL`; without one of its own, let no file grow.

    What it returns makes each record larger than two pages, so that none fits into the last page of a file.
    """

    name = "full_disk"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx: hl.RunDataContext) -> dict[str, str]:
        disk, most = Path(os.environ["TORTURE_DISK"]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        filler = disk / "filler"
        if not disk.is_mount():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 if ctx.step in FULL else most, most))
        elif ctx.step in FULL:
            with suppress(OSError), filler.open("ab", buffering=0) as file:
                while True:
                    file.write(b"x" * 512)
        else:
            filler.unlink(missing_ok=True)
        return {"ballast": "x" * 1500}


# -- where the steps are found afterwards ------------------------------------------------------------------------


def _folder(disk: Path) -> Path:
    return disk / "subject" / "default"


def _log(run: Path) -> Points:
    found: Points = []
    for record in hl.records.read_log(run / "records.jsonl"):
        if series := getattr(record, "metrics", {}).get("digest/weights"):
            found += zip(series.steps, series, strict=True)
    return found


def _csv(run: Path) -> Points:
    with (run / "default.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["digest/weights"]]
    cells = [(row["digest/step"].split(";"), row["digest/weights"].split(";")) for row in rows]
    return [(int(step), int(value)) for steps, values in cells for step, value in zip(steps, values, strict=True)]


def _jsonl(run: Path) -> Points:
    lines = [json.loads(line) for line in (run / "default.jsonl").read_text().splitlines()]
    found = [line for line in lines if "digest/weights" in line]
    return [pair for line in found for pair in zip(line["digest/step"], line["digest/weights"], strict=True)]


def _parquet(run: Path) -> Points:
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(run / "default.parquet").to_pylist()
    return [(row["step"], int(row["value"])) for row in rows if row["name"] == "digest/weights"]


def _tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, int(event.value)) for event in events.Scalars("digest/weights")]


def _mlflow(run: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    ids = [
        found.info.run_id for one in client.search_experiments() for found in client.search_runs([one.experiment_id])
    ]
    points = [point for run_id in ids for point in client.get_metric_history(run_id, "digest/weights")]
    return sorted((point.step, int(point.value)) for point in points)


def _wandb(run: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Points = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in _pieces(path.read_bytes()):
            items = Record.FromString(data).history.item
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            if "digest/weights" in row:
                found.append((row["digest/step"], row["digest/weights"]))
    return found


def _pieces(data: bytes, block: int = 32_768) -> Iterator[bytes]:
    """Yield what a file of W&B holds: LevelDB's log format after a header of seven bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := block - place % block) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last piece
            yield whole
            whole = b""


READERS: dict[str, dict[str, Callable[[Path], Points]]] = {
    "kills": {"log": _log, "CSV": _csv, "JSONL": _jsonl, "Parquet": _parquet, "TensorBoard": _tensorboard},
    "disk": {"log": _log, "CSV": _csv, "JSONL": _jsonl, "Parquet": _parquet, "TensorBoard": _tensorboard},
    "remote": {"log": _log, "MLflow": _mlflow, "W&B": _wandb},
}


def _wrong(kind: str, run: Path) -> list[str]:
    """Return what differs from the run that was left alone, in words; wait for sinks that are behind."""
    end = time.monotonic() + PATIENCE
    while True:
        found = [text for name, read in READERS[kind].items() if (text := _difference(name, read, run))]
        if not found or time.monotonic() > end:
            return found
        time.sleep(1.0)


def _difference(name: str, read: Callable[[Path], Points], run: Path) -> str:
    try:
        points = read(run)
    except Exception as error:
        return f"{name} cannot be read: {type(error).__name__}: {error}"
    if points == _expected:
        return ""
    there = [step for step, _ in points]
    missing = sorted({step for step, _ in _expected} - set(there))
    twice = sorted({step for step in there if there.count(step) > 1})
    other = sorted({step for step, _ in set(points) - set(_expected)})
    return f"{name}: missing {missing}, twice {twice}, other bits {other}, in order {there == sorted(there)}"


# -- runs --------------------------------------------------------------------------------------------------------

_expected: Points = []
_seconds: dict[str, float] = {}
"""How long a run takes that is left alone, by part."""


def _start(disk: Path, *flags: str) -> int:
    """Start ``hookline run`` in a process; return its id."""
    if child := os.fork():
        return child
    _be_command(disk, "run", f"{__file__}:Subject", "--epochs", str(EPOCHS), "--hooks", f"{__file__}:Digest", *flags)


def _be_command(disk: Path, *words: str) -> NoReturn:
    status = 1
    try:
        sys.argv = ["hookline", *words, "--output-dir", str(disk), "--save-checkpoints", "3", "--no-report"]
        os.chdir(disk)
        os.environ["TORTURE_DISK"] = str(disk)
        with (disk.parent / "output.txt").open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            runpy.run_module("hookline", run_name="__main__", alter_sys=True)
        except SystemExit as left:
            status = int(left.code or 0)
        (disk.parent / "modules.txt").write_text("\n".join(sys.modules))
    finally:
        os._exit(status)


def _wait(child: int, seconds: float = float("inf")) -> int | None:
    """Return how the process ended; None if it still runs after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(found[1])
        time.sleep(0.002)
    return None


def _kill(child: int, *, others: bool) -> None:
    """Kill the process; if `others`, those that it has started as well."""
    started = [int(pid) for path in Path(f"/proc/{child}/task").glob("*/children") for pid in path.read_text().split()]
    for pid in [child, *(started if others else [])]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has_checkpoint(run: Path) -> bool:
    return any(not {"part", "tmp"} & set(path.name.split(".")) for path in run.glob("checkpoints/step_*"))


def prepare(kind: str) -> None:
    """Make the run that is left alone, twice: the first says what to import here, so that forked ones start at once."""
    for _ in range(2):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            disk = Path(name) / "disk"
            disk.mkdir()
            start = time.monotonic()
            if _wait(_start(disk, *FLAGS[kind])):
                raise RuntimeError((disk.parent / "output.txt").read_text()[-3000:])
            _seconds[kind] = time.monotonic() - start
            _expected[:] = _log(_folder(disk))
            for module in (disk.parent / "modules.txt").read_text().splitlines():
                with suppress(Exception):
                    importlib.import_module(module)
    if [step for step, _ in _expected] != list(range(EPOCHS * BATCHES)) or len(set(_expected)) < EPOCHS * BATCHES:
        raise RuntimeError(f"The run that was left alone has not every step once: {_expected}")


def kill_case(kind: str, number: int) -> Case:
    """Kill a run at random moments and resume it, until it ends; compare what it leaves."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        disk = Path(name) / "disk"
        run, kills, resumed = _folder(disk), 0, 0
        while True:
            is_resumed = _has_checkpoint(run)
            if not is_resumed:
                shutil.rmtree(disk, ignore_errors=True)
                disk.mkdir()
            resumed += is_resumed
            child = _start(disk, *(["--resume"] if is_resumed else FLAGS[kind]))
            seconds = rng.uniform(0.0, _seconds[kind]) if kills < KILLS else float("inf")
            # What runs beside it may have taken a record that no disk has; W&B and MLflow promise nothing for that.
            others = rng.random() < 0.5 and kind == "kills"
            if (status := _wait(child, seconds)) is not None:
                break
            _kill(child, others=others)
            _wait(child)
            kills += 1
        wrong = [] if status == 0 else [f"exit code {status}: {(disk.parent / 'output.txt').read_text()[-600:]}"]
        wrong += _wrong(kind, run)
    return Case(number, kills, wrong, counts={"runs": 1, "resumed from a checkpoint": resumed})


def disk_case(number: int) -> Case:
    """Fill the disk of a run for some steps; compare what it leaves."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        size = random.Random(number).randint(3000, 6000)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            status = _wait(_start(disk, f"{__file__}:FullDisk", *FLAGS["disk"]))
            output = (disk.parent / "output.txt").read_text()
            wrong = [] if status == 0 else [f"exit code {status}: {output[-600:]}"]
            wrong += [] if "space" in output or "too large" in output else ["nobody noticed that the disk was full"]
            wrong += _wrong("disk", _folder(disk))
        finally:
            if is_mounted:
                subprocess.run(["umount", "--lazy", str(disk)], check=False)
    return Case(number, 1, wrong, counts={"runs": 1, "disks of their own": int(is_mounted)})


def _part(kind: str, does: str, goal: int, run_case: Callable[[int], Case]) -> Part:
    return Part(f"command-{kind}", does, "records and bits", goal, 1, run_case, lambda: prepare(kind), batch=5)


PARTS = {
    "kills": _part(
        "kills",
        "SIGKILL at a random moment of `hookline run` with log, CSV, JSONL, Parquet and TensorBoard, then `--resume`",
        100,
        lambda number: kill_case("kills", number),
    ),
    "disk": _part("disk", "a disk that is full for 30 of 60 steps of `hookline run`", 10, disk_case),
    "remote": _part(
        "remote",
        "SIGKILL at a random moment of `hookline run` with W&B offline and MLflow, then `--resume`",
        10,
        lambda number: kill_case("remote", number),
    ),
}


def main() -> int:
    """Run one part; return 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), default="kills")
    parser.add_argument("--kills", type=int, default=100, help="at least so many kills, or full disks")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case: its seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run_part(PARTS[options.part], first=options.first, acts=options.kills, seconds=3600.0)
    print(f"{found.part.name}: cases {found.first} to {found.first + found.cases - 1}, {found.acts} acts, "
          f"{len(found.wrong)} wrong, {len(found.died)} dead, {dict(found.counts)}, {found.seconds:.0f} s")  # fmt: skip
    for case in found.wrong:
        print(f"  case {case.number}: {'; '.join(case.wrong)}")
    for number, how in found.died:
        print(f"  case {number} {how}")
    return 0 if found.is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
