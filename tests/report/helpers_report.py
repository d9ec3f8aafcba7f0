"""Runs to make pages of: written as a run writes them, with values that a test can compute again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from hookline.records.log import Context, RecordLog
from hookline.records.sink import Record, StepSeries

EPOCH = 1_790_000_000.0  # when all of these runs began, in seconds since 1970
STARTED = "2026-09-21T14:13:20+00:00"
SECONDS_A_STEP = 0.25


def facts(name: str = "digits", strategy: str = "default", **more: Any) -> dict[str, Any]:
    """What run.json says of a run of 200 steps in 4 epochs."""
    return {
        "hookline": "0.1.0",
        "experiment": name,
        "strategy": strategy,
        "command": ["hookline", "run", name, "--with-hooks", "observers", "--seed", "7"],
        "config": {"epochs": 4, "learning_rate": 0.003, "hidden": [64, 64], "dropout": 0.1},
        "seed": 7,
        "device": "cpu",
        "dtype": "float32",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.2"},
        "git": {"commit": "4f1c2d9a7b", "dirty": False},
        "model": {"class": "SmallTransformer", "parameters": 226_442},
        "started": STARTED,
        "finished": "2026-09-21T14:14:10+00:00",
        "seconds": 50.0,
        "status": "finished",
        "hooks": {
            "training_metrics": _hook("observer", "Loss and accuracy of each epoch.", 4, 1.2),
            "norms": _hook("observer", "How large weights and their gradients are.", 200, 412.0, "total", "‖w‖₂"),
            "stats": _hook("watch", "Streaming statistics of every layer.", 200, 1630.5) | {"inside_steps": True},
            "counterfactual": _hook("intervention", "One epoch on shuffled data, undone.", 4, 5230.0),
        },
        "sinks": ["CSVSink", "JSONLSink"],
        "sink_errors": {},
        "result": {"epochs": 4, "steps": 200, "loss": 0.0312, "metrics": {"accuracy": 0.9711}},
        **more,
    }


def _hook(kind: str, description: str, fired: int, total: float, metric: str = "", formula: str = "") -> dict[str, Any]:
    metrics = [{"name": metric, "description": "All parameters together.", "formula": formula}] if metric else []
    cost = {"count": fired, "total_ms": total, "mean_ms": total / fired}
    return {"kind": kind, "description": description, "metrics": metrics, "fired": fired, "cost": cost}


def loss_at(step: int, seed: int = 0) -> float:
    """Falls from 2.3, with ripples, the same for whoever asks."""
    return 2.3 * math.exp(-step / 60) + 0.03 + 0.04 * math.sin(1.7 * step + seed)


def stat_at(layer: int, step: int, statistic: str) -> float:
    """What the statistics of a layer are at a step."""
    if statistic == "mean":
        return 0.1 * math.sin(0.05 * step + layer) - 0.01 * layer
    if statistic == "norm":
        return 10 ** (-0.15 * layer) * (1.5 + math.cos(0.02 * step + layer))
    return 0.5 + 0.02 * math.sin(step)  # zero_fraction


STATISTICS = ("mean", "norm", "zero_fraction")


def small_run(folder: Path, *, seed: int = 0, layers: int = 12, facts_of: dict[str, Any] | None = None) -> Path:
    """200 steps in 4 epochs: a loss, an evaluation, norms, a watch of some layers, a histogram, a list."""
    folder.mkdir(parents=True, exist_ok=True)
    log = RecordLog(folder / "records.jsonl")
    log.append(Context({"strategy": "default", "experiment_name": "digits"}))
    for epoch in range(4):
        steps = range(50 * epoch, 50 * epoch + 50)
        metrics = {"train/loss": StepSeries([loss_at(step, seed) for step in steps], steps)}
        metrics["norms/total"] = StepSeries([5 + step / 100 for step in steps], steps)
        for statistic in STATISTICS:
            for layer in range(layers):
                values = [stat_at(layer, step, statistic) for step in steps]
                metrics[f"stats/layers.{layer}.mlp/forward/{statistic}"] = StepSeries(values, steps)
        _append(log, metrics, epoch, "POST_STEP", steps[-1])
        _append(
            log,
            {"eval/loss": loss_at(steps[-1], seed) + 0.05, "eval/accuracy": 0.5 + 0.15 * epoch},
            epoch,
            "POST_EPOCH",
            steps[-1],
        )
        histogram = {"zero": 40, **{str(e): int(1000 * math.exp(-((e + 4 + epoch) ** 2) / 8)) for e in range(-12, 3)}}
        _append(
            log,
            {
                "stats/layers.0.mlp/forward/histogram": histogram,
                "spectrum/top": [9.0 - k - epoch / 4 for k in range(8)],
            },
            epoch,
            "SNAPSHOT",
            steps[-1],
        )
    log.close()
    (folder / "run.json").write_text(json.dumps(facts() if facts_of is None else facts_of))
    return folder


def ill_run(folder: Path) -> Path:
    """A run in which everything goes wrong once, at steps that the tests know."""
    folder.mkdir(parents=True, exist_ok=True)
    log = RecordLog(folder / "records.jsonl")
    steps = range(100)
    loss = [1.0 + 0.01 * math.sin(step) for step in steps]
    loss[60] = 9.0  # a spike
    metrics = {"train/loss": StepSeries(loss, steps)}
    for layer in range(6):
        norm = [1.0 + 0.1 * math.sin(step + layer) for step in steps]
        zero = [0.5] * 100
        if layer == 2:
            zero = [0.5] * 40 + [1.0] * 60  # dies at 40
        if layer == 3:
            norm = [
                value * (500 if step >= 70 else 1) for step, value in zip(steps, norm, strict=True)
            ]  # explodes at 70
        if layer == 4:
            norm = [value if step < 80 else math.nan for step, value in zip(steps, norm, strict=True)]  # NaN from 80
        metrics[f"stats/layers.{layer}/forward/norm"] = StepSeries(norm, steps)
        metrics[f"stats/layers.{layer}/forward/zero_fraction"] = StepSeries(zero, steps)
        gradient = [(1e-9 if layer == 0 else 1.0) * value for value in [1.0 + 0.1 * math.cos(step) for step in steps]]
        metrics[f"stats/layers.{layer}/backward/norm"] = StepSeries(gradient, steps)
    _append(log, metrics, 0, "POST_STEP", 99)
    log.close()
    return folder


def large_run(folder: Path, layers: int = 200, num_steps: int = 2000) -> Path:
    """Four statistics of many layers at many steps, with noise, as real ones have: 1.6 million numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    depth = np.arange(layers)[:, None]
    log = RecordLog(folder / "records.jsonl")
    chunk = 200
    for epoch, start in enumerate(range(0, num_steps, chunk)):
        steps = np.arange(start, start + chunk)
        noise = random.standard_normal((4, layers, chunk))
        tables = {
            "forward/mean": 0.2 * np.sin(depth / 9 + steps / 300) + 0.03 * noise[0],
            "forward/norm": np.exp(0.8 * np.sin(depth / 25) + steps / 1500 + 0.1 * noise[1]),
            "forward/zero_fraction": np.clip(0.5 + 0.3 * np.sin(depth / 40 - steps / 500) + 0.02 * noise[2], 0, 1),
            "backward/norm": 10 ** (-depth / 60 + 0.4 * np.cos(steps / 400) + 0.1 * noise[3] - 2),
        }
        loss = 3 * np.exp(-steps / 500) + 0.4 + 0.05 * random.standard_normal(chunk)
        metrics: dict[str, Any] = {"train/loss": StepSeries(loss.tolist(), steps.tolist())}
        for layer in range(layers):
            for name, values in tables.items():
                metrics[f"stats/layers.{layer}.mlp/{name}"] = StepSeries(values[layer].tolist(), steps.tolist())
        _append(log, metrics, epoch, "POST_STEP", int(steps[-1]))
        _append(log, {"eval/accuracy": 1 - 0.8 * math.exp(-epoch / 3)}, epoch, "POST_EPOCH", int(steps[-1]))
    log.close()
    (folder / "run.json").write_text(
        json.dumps(facts("deep", seconds=500.0, result={"epochs": 10, "steps": 2000, "loss": 0.41, "metrics": {}}))
    )
    return folder


def _append(log: RecordLog, metrics: dict[str, Any], epoch: int, point: str, step: int) -> None:
    log.append(Record(metrics, epoch, point, step, "default", 0, EPOCH + SECONDS_A_STEP * (step + 1)))
