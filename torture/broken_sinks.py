"""Sinks that fail, hang and fill the disk beside a training run.

The log must hold every record, each sink that works must get every record once and in order, and the weights must be
those of the run without sinks. The disk is filled by the limit that the system sets to the size of a file.
"""

from __future__ import annotations

import functools
import json
import random
import resource
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_cases import Case, Part
from helpers_loops import left_by, rich_experiment
from helpers_sinks import Slow
from helpers_training import differences

import hookline as hl
from hookline.records import FanOut

__all__ = ["PART"]

STEPS = 30


class Counts(hl.TrainingHook):
    """Returns the number of its firing at every step."""

    name = "counts"
    hook_points = {hl.HookPoint.POST_STEP}

    def __init__(self) -> None:
        self.fired = 0

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        self.fired += 1
        return {"fired": self.fired}


class Failing(hl.MetricSink):
    """Fails at some of its records, by one kind of error."""

    def __init__(self, rng: random.Random) -> None:
        self.rate = rng.choice([0.1, 0.5, 1.0])
        self.error = rng.choice([OSError, RuntimeError, KeyError, ConnectionError])
        self.rng = random.Random(rng.random())

    def write(self, record: Any) -> None:
        if self.rng.random() < self.rate:
            raise self.error("on purpose")


class Drawing(hl.MetricSink):
    """Draws random numbers and fails."""

    def write(self, record: Any) -> None:
        torch.rand(1), np.random.rand(), random.random()
        raise ValueError("after it has drawn")


@contextmanager
def _disk_full(folder: Path, rng: random.Random) -> Iterator[Any]:
    """Have files of this process not grow beyond some bytes; yield what makes room again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randint(0, 3000), limits[1]))

    def make_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for child in _children():  # the process of slow sinks, which has the limit from here
            with suppress(ProcessLookupError):
                resource.prlimit(child, resource.RLIMIT_FSIZE, limits)

    try:
        yield make_room
    finally:
        make_room()


def _children() -> list[int]:
    """Return the processes that this one has started and that still run."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


class RoomAt(hl.TrainingHook):
    """Makes room on the disk after some steps."""

    name = "room"
    hook_points = {hl.HookPoint.POST_STEP}

    def __init__(self, step: int, make_room: Any) -> None:
        self.step, self.make_room = step, make_room

    def compute(self, ctx: hl.RunDataContext) -> None:
        if ctx.step == self.step:
            self.make_room()


def _broken(rng: random.Random, folder: Path) -> tuple[list[Any], list[Path]]:
    """Return sinks that break in some way, and the files of those that must not lose anything."""
    sinks: list[Any] = [Failing(rng) for _ in range(rng.randint(0, 3))] + [Drawing()] * rng.randint(0, 1)
    whole = [folder / "whole.jsonl"]
    sinks.append(hl.sinks.JSONLSink(whole[0]))
    if rng.random() < 0.15:  # a process of its own takes seconds
        sinks.append(Slow(str(folder / "slow.txt"), delay=rng.choice([0.0, 0.02])))
    rng.shuffle(sinks)
    return sinks, whole


def _train(hooks: list[Any], sinks: Any, log: Path | None) -> dict[str, Any]:
    experiment = rich_experiment()
    manager = hl.HookManager(
        hooks=hooks, sinks=FanOut(sinks, log=log) if log else sinks, on_error="raise", flush_every=1
    )
    hl.step_loop(experiment, steps=STEPS, manager=manager)
    manager.close()
    return left_by(experiment)


@functools.cache
def _bare() -> dict[str, Any]:
    return _train([], [], None)


def _fired(path: Path) -> list[int]:
    """Return the values of the metric in a file of records, in order."""
    found: list[int] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        value = record.get("metrics", record).get("counts/fired")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return found


def _missed_by_slow_sink(path: Path, is_full: bool) -> list[str]:
    """Return what a sink in a process of its own did not get: all in order, or on a full disk, the last record.

    There the sink may have half a line of a record that it was given again.
    """
    if is_full:
        has_last = path.exists() and f'"counts/fired": [{STEPS}]' in path.read_text()
        return [] if has_last else ["the slow sink has no last record"]
    return [] if _fired(path) == list(range(1, STEPS + 1)) else [f"the slow sink has {_fired(path)}"]


def run_case(number: int) -> Case:
    """Train beside broken sinks, and tell what was lost."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        sinks, whole = _broken(rng, folder)
        is_full = rng.random() < 0.4
        with _disk_full(folder, rng) if is_full else _disk_free() as make_room:
            hooks = [Counts(), RoomAt(rng.randint(1, STEPS - 2), make_room)]
            left = _train(hooks, sinks, folder / "records.jsonl")
        wrong = differences(_bare(), left)
        for path in [folder / "records.jsonl", *whole]:
            if _fired(path) != list(range(1, STEPS + 1)):
                lost = set(range(1, STEPS + 1)) - set(_fired(path))
                wrong.append(f"{path.name}: {len(lost)} records lost, {len(_fired(path))} there, full={is_full}")
        if any(isinstance(sink, Slow) for sink in sinks):
            wrong += _missed_by_slow_sink(folder / "slow.txt", is_full)
    return Case(number, STEPS, wrong, counts={"runs": 1, "full disks": int(is_full), "sinks": len(sinks)})


@contextmanager
def _disk_free() -> Iterator[Any]:
    yield lambda: None


PART = Part(
    name="sinks",
    does="sinks that fail, draw random numbers, hang or meet a full disk beside a training run of 30 steps",
    holds="records and bits",
    goal=6_000,
    quick=60,
    run_case=run_case,
    prepare=_bare,
    batch=20,
)
