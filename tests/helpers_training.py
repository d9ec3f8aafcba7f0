"""A small training run and what it leaves behind, for tests that compare a hooked run with a plain one bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Step", "differences", "nested_differences", "plain_step", "train"]

Step = Callable[[nn.Sequential, Tensor, Tensor], None]
"""Runs one forward and one backward."""


def plain_step(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
    """Without hooks."""
    F.cross_entropy(model(x), target).backward()


def train(step: Step, steps: int = 20) -> dict[str, Tensor]:
    """Train through dropout and BatchNorm with AdamW, from the same seed; weights, gradients, state, random stream."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        step(model, torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data))
        optimizer.step()
    left = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    for index, parameter in enumerate(model.parameters()):
        left[f"grad {index}"] = parameter.grad
        left |= {f"{key} {index}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    left["random"] = torch.get_rng_state()
    return left


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same to the last bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def nested_differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the places, such as ``/optimizer/state/0``, at which two nested states differ in a bit."""
    if isinstance(one, Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [found for key in one for found in nested_differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in nested_differences(*pair, f"{path}/{index}")]
    return [] if one == other else [path]
