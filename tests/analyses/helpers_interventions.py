"""Experiments for tests of the built-in interventions, and what their hooks said, step by step."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.records.sink import StepSeries

__all__ = ["by_epoch", "by_step", "cosine", "left_by", "rich_experiment"]


def rich_experiment(**options: Any) -> hl.Experiment:
    """Dropout, BatchNorm, AdamW, a scheduler, a loader that shuffles by the stream of the run."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3)
    )
    data = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(40, 6, generator=data), torch.randint(3, (40,), generator=data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings: dict[str, Any] = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)} | options
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    return hl.Experiment(
        model, optimizer, loader, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), **settings
    )


def left_by(experiment: hl.Experiment) -> dict[str, Tensor]:
    """Weights, buffers, gradients, optimizer and random streams."""
    left = {f"weight {name}": value.clone() for name, value in experiment.model.state_dict().items()}
    for name, parameter in experiment.model.named_parameters():
        left[f"grad {name}"] = parameter.grad.clone()
        for key, value in experiment.optimizer.state[parameter].items():
            left[f"optimizer {key} of {name}"] = torch.as_tensor(value).clone()
    left["torch"] = torch.get_rng_state()
    left["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    left["python"] = torch.tensor(random.getstate()[1])
    return left


def by_step(sink: hl.sinks.MemorySink, hook: str) -> dict[int, dict[str, float]]:
    """What a hook said at single steps."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for record in sink.records:
        for key, series in record.metrics.items():
            if key.startswith(f"{hook}/"):
                assert isinstance(series, StepSeries)
                for step, value in zip(series.steps, series, strict=True):
                    found[step][key.removeprefix(f"{hook}/")] = value
    return dict(found)


def by_epoch(sink: hl.sinks.MemorySink, hook: str) -> dict[int, dict[str, float]]:
    """What a hook said when epochs were over."""
    found: dict[int, dict[str, float]] = {}
    for record in sink.records:
        metrics = {k.removeprefix(f"{hook}/"): v for k, v in record.metrics.items() if k.startswith(f"{hook}/")}
        if metrics:
            found[record.epoch] = metrics
    return found


def cosine(one: Any, other: Any) -> float:
    """By numpy, in float64."""
    one, other = np.asarray(one, np.float64).ravel(), np.asarray(other, np.float64).ravel()
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / lengths) if lengths else 0.0
