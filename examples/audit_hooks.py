"""Find out which of several instruments changes a training: `hl.audit`. Then keep one inside a budget.

One of the hooks draws a random number for a sample, as many do; the audit names it, and the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl


def train() -> None:
    """Train as anyone would: model, optimizer and data are made here, from one seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(12):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


def keep_norm(model: nn.Module) -> Any:
    """Keep the norm of every output: harmless."""
    norms: list[Tensor] = []
    return model.register_forward_hook(lambda module, args, output: norms.append(output.detach().norm()))


def sample_rows(model: nn.Module) -> Any:
    """Keep two random rows of the hidden layer at every fifth forward, drawn from the run's own stream."""
    calls: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(output[torch.randperm(len(output))[:2]].detach() if len(calls) % 5 == 4 else output[:2].detach())

    return model.get_submodule("0").register_forward_hook(look)


def watch(model: nn.Module) -> Any:
    """Watch every layer, for at most two percent of the time of a step."""
    return hl.watch(model, budget=0.02)


if __name__ == "__main__":
    found = hl.audit(train, ["training_metrics", keep_norm, sample_rows, watch])
    print(found)
    print("guilty:", *(culprit.hooks[0] for culprit in found.culprits))
