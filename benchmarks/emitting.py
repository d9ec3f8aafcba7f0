"""Rows about the way of a record: into the log and the sinks of this process, and what five sinks cost a step.

Takes records of 50 numbers, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import Row, Samples, Trial, interleave, ratios, spread, trial, typical
from subject import Setting
from torch import nn

import hookline as hl
from hookline.records import FanOut
from hookline.sinks import CSVSink, JSONLSink, TensorBoardSink, WandbSink

__all__ = ["emitting", "emitting_five"]

NUMBERS = 50
BATCH = 200
STEPS = 20


def made_record(number: int = 0) -> hl.records.Record:
    """Fifty numbers, all digits in use, as hooks give them."""
    chance = random.Random(number)
    metrics = {f"hook{n % 5}/metric_{n}": chance.random() for n in range(NUMBERS)}
    return hl.records.Record(metrics, number, hl.HookPoint.POST_EPOCH, number, "random", 0, time.time())


@contextmanager
def folder() -> Iterator[Path]:
    """A folder on the disk that tests use."""
    with tempfile.TemporaryDirectory(prefix="hookline-benchmark-") as name:
        yield Path(name)


def emitting(setting: Setting) -> Iterator[Row]:
    """The CPU time of the training thread; what is written is in the system's hands afterwards."""
    record = made_record()
    with (
        folder() as path,
        FanOut(log=path / "a.jsonl") as log,
        FanOut([JSONLSink(path / "b.sink.jsonl")], log=path / "b.jsonl") as both,
        hl.HookManager(log=path / "c.jsonl") as manager,
    ):
        calls: dict[str, Callable[[], object]] = {
            "log": lambda: log.write(record),
            "log again": lambda: log.write(record),
            "log and JSONLSink": lambda: both.write(record),
            "manager": lambda: manager.emit_metrics(record.metrics, 0, hl.HookPoint.POST_EPOCH),
        }
        trials = [trial(name, call, inner=5, batch=BATCH) for name, call in calls.items()]
        samples = interleave(trials, setting.rounds(40))
    yield _row(samples, "log", "`FanOut.write` of 50 numbers to the record log, one system call", 30.0)
    yield _row(samples, "log and JSONLSink", "the same with a `JSONLSink` beside the log")
    yield _row(samples, "manager", "`emit_metrics` of 50 numbers, checked, to the record log")


def _row(samples: Samples, name: str, words: str, at_most: float | None = None) -> Row:
    return Row(
        f"emitting, {name} (µs)",
        words,
        "1 µs",
        "no model",
        spread([seconds * 1e6 for seconds in samples[name]]),
        spread(ratios(samples, "log again", "log")),
        f"{typical(samples, name) * 1e6:.1f} µs",
        at_most=at_most,
    )


class Fifty(hl.TrainingHook):
    """Returns fifty numbers at every step."""

    name = "fifty"
    hook_points = frozenset({hl.HookPoint.POST_STEP})
    pure = True

    def __init__(self) -> None:
        self.metrics = {name.partition("/")[2]: value for name, value in made_record().metrics.items()}

    def compute(self, ctx: hl.RunDataContext) -> dict[str, float]:
        return self.metrics


def emitting_five(setting: Setting) -> Iterator[Row]:
    """Fifty numbers at every step: five sinks against none."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    with folder() as path, hl.HookManager(hooks=[Fifty()], loop_type="epoch") as bare:
        fan_out = FanOut(five_sinks(path), log=path / "records.jsonl", patience=600.0)
        with hl.HookManager(hooks=[Fifty()], sinks=fan_out, loop_type="epoch") as manager:
            manager.set_run_context(strategy="benchmark", run_dir=str(path))
            manager.emit_metrics({"ready": 1.0}, 0, hl.HookPoint.POST_EPOCH)
            fan_out.flush()  # the helper process is there, its packages imported
            step = _step()
            trials = [
                _stepping("none", step, bare),
                _stepping("none again", step, bare),
                _stepping("five", step, manager),
                _stepping("at once", step, manager, at_once=True),
            ]
            # With forty rounds the quartiles of the row lay 0.13 apart, and those of its A/A 0.08.
            samples = interleave(trials, setting.rounds(120))
            fan_out.flush()
            if fan_out.errors:
                raise RuntimeError(f"Sinks failed, so the figures mean nothing: {dict(fan_out.errors)}.")
    each = f"a hook returns 50 numbers at every step, flushed every {STEPS} steps"
    yield _five(samples, "five", f"{each}; CPU time of the training thread", 1.02)
    yield _five(samples, "five wall", f"{each}; by the clock on the wall, the helper process on another core")
    yield _five(samples, "at once", "a record of 50 numbers goes out at every step; CPU time of the training thread")


def five_sinks(path: Path) -> list[hl.MetricSink]:
    """Four; the log is the fifth."""
    return [
        JSONLSink(path / "metrics.jsonl"),
        CSVSink(path / "metrics.csv"),
        TensorBoardSink(str(path / "tensorboard")),
        WandbSink("benchmark", mode="offline", dir=str(path)),
    ]


def _five(samples: Samples, name: str, words: str, at_most: float | None = None) -> Row:
    kind = " wall" if name.endswith(" wall") else ""
    return Row(
        {
            "five": "a step with five sinks",
            "five wall": "a step with five sinks, wall",
            "at once": "a step with five sinks, a record at every step",
        }[name],
        f"log, JSONL, CSV, TensorBoard, W&B (offline); {words}",
        "the same without sinks and log",
        "MLP, about 5 ms a step",
        spread(ratios(samples, name, f"none{kind}")),
        spread(ratios(samples, f"none again{kind}", f"none{kind}")),
        f"{typical(samples, name) * 1e3:.3f} ms, without {typical(samples, f'none{kind}') * 1e3:.3f} ms",
        at_most=at_most,
    )


def _step() -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, target = torch.randn(192, 256), torch.randint(10, (192,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def _stepping(name: str, step: Callable[[], None], manager: hl.HookManager, *, at_once: bool = False) -> Trial:
    """The least of three stretches of steps, by both clocks."""
    point = hl.HookPoint.POST_STEP
    context = hl.RunDataContext(point, 0)
    metrics = dict(made_record().metrics)

    def stretch() -> tuple[float, float]:
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(STEPS):
            manager.advance_step(0)
            step()
            manager.fire(point, context)
            if at_once:
                manager.emit_metrics(metrics, manager.global_step, hl.HookPoint.POST_EPOCH)
        manager.flush_step_metrics(0)
        return (time.thread_time() - cpu) / STEPS, (time.perf_counter() - wall) / STEPS

    def run() -> dict[str, float]:
        found = [stretch() for _ in range(3)]
        return {name: min(cpu for cpu, _ in found), f"{name} wall": min(wall for _, wall in found)}

    return run
