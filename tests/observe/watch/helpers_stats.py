"""What statistics should be, in float64, one number at a time; and the small models whose statistics are taken."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_COUNTS = ("zero_fraction", "nonfinite", "nan", "inf", "min", "max", "absmax", "finite_min", "finite_max")


def reference(tensors: list[Tensor], stats: tuple[str, ...]) -> dict[str, float]:
    """The statistics of all tensors together, each a firing."""
    parts = [_wide(tensor) for tensor in tensors]
    numbers = np.concatenate(parts) if parts else np.zeros(0)
    if not numbers.size:
        return {}
    finite = numbers[np.isfinite(numbers)]
    bad = sum(bool((~np.isfinite(part)).any()) for part in parts)
    with np.errstate(all="ignore"):
        mean = numbers.mean()
        squares = (numbers**2).sum()
        found = {
            "mean": mean,
            "std": math.sqrt(((numbers - mean) ** 2).mean()) if not bad else math.nan,
            "rms": math.sqrt(squares / numbers.size) if squares == squares else math.nan,
            "norm": math.sqrt(squares / len(parts)) if squares == squares else math.nan,
            "min": numbers.min(),
            "max": numbers.max(),
            "absmax": np.abs(numbers).max(),
            "zero_fraction": (numbers == 0).mean(),
            "nonfinite": float(bad),
            "nan": float(np.isnan(numbers).sum()),
            "inf": float(np.isinf(numbers).sum()),
        }
    if finite.size:
        found |= {"finite_min": finite.min(), "finite_max": finite.max()}
    for name in stats:
        if name.startswith("over:"):
            found[name] = float((np.abs(numbers) > float(name.removeprefix("over:"))).mean())
    wanted = [*stats, *(("nonfinite", "nan", "inf", "finite_min", "finite_max") if bad else ())]
    return {name: float(found[name]) for name in wanted if name in found}


def _wide(tensor: Tensor) -> np.ndarray[Any, Any]:
    numbers = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    return numbers.to(torch.float64).reshape(-1).numpy()


def assert_close(found: dict[str, Any], expected: dict[str, float], error: float = 1e-3) -> None:
    """The same names; counts and extremes exactly, the rest within the stated error, relative to the spread."""
    assert found.keys() == expected.keys()
    spread = expected.get("std", math.nan)
    for name, value in expected.items():
        got = found[name]
        if value != value:
            assert got != got, (name, got, value)
        elif math.isinf(value):
            assert got == value or name in ("mean", "rms", "norm"), (name, got, value)
        elif name in _COUNTS or name.startswith("over:"):
            assert got == value, (name, got, value)
        else:
            room = spread if name == "mean" and spread == spread else 0.0
            # Where the mean is ten million times the spread, float64 has no more digits for it.
            least = 1e-7 * abs(expected.get("mean", 0.0)) if name == "std" else 1e-300
            assert abs(got - value) <= error * max(abs(value), room) + least, (name, got, value)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def of(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The statistics of one place."""
    return {
        name.removeprefix(f"{prefix}/"): value for name, value in metrics.items() if name.rpartition("/")[0] == prefix
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()
