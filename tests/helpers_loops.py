"""Experiments for tests of the loops, hooks that note what they see, and all that a run leaves behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl

__all__ = ["Noting", "left_by", "linear_experiment", "noting", "rich_experiment", "seed_everything"]


def seed_everything(seed: int = 0) -> None:
    """All three streams."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def rich_experiment(*, batches: int = 5, **options: Any) -> hl.Experiment:
    """Dropout, BatchNorm, AdamW, a scheduler, a loader that shuffles by a generator, an evaluation that draws."""
    seed_everything()
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3)
    )
    data = torch.Generator().manual_seed(1)
    dataset = TensorDataset(
        torch.randn(8 * batches, 6, generator=data), torch.randint(3, (8 * batches,), generator=data)
    )
    loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)

    def evaluate(model: nn.Module) -> dict[str, Any]:
        x, target = dataset.tensors
        noise = torch.randn_like(x) * np.random.rand() * random.random()
        return {"val_acc": (model(x + 0.01 * noise).argmax(1) == target).float().mean()}

    settings: dict[str, Any] = {"scheduler": scheduler, "evaluate": evaluate} | options
    return hl.Experiment(
        model, optimizer, loader, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), **settings
    )


def linear_experiment(batches: int = 3, lr: float = 0.1, **options: Any) -> hl.Experiment:
    """One layer, plain SGD, batches in a fixed order: everything can be worked out by hand."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(batches)]
    return hl.Experiment(model, torch.optim.SGD(model.parameters(), lr=lr), data, **options)


class Noting(hl.TrainingHook):
    """Notes every context that it is shown, and returns the count as ``seen``."""

    name = "noting"
    hook_points = set(hl.HookPoint)

    def __init__(self) -> None:
        self.contexts: list[hl.RunDataContext] = []

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        self.contexts.append(ctx)
        return {"seen": len(self.contexts)}

    @property
    def points(self) -> list[str]:
        """Where it fired."""
        return [ctx.hook_point.name for ctx in self.contexts]

    def at(self, point: str) -> list[hl.RunDataContext]:
        """The contexts of one point."""
        return [ctx for ctx in self.contexts if ctx.hook_point.name == point]


def noting(*points: str, **attributes: Any) -> Noting:
    """One that fires at those points, with attributes of a hook."""
    hook = Noting()
    hook.hook_points = {hl.HookPoint[name] for name in points} if points else set(hl.HookPoint)
    for name, value in attributes.items():
        setattr(hook, name, value)
    return hook


def left_by(experiment: hl.Experiment) -> dict[str, Tensor]:
    """Weights, buffers, gradients, modes, flags, optimizer, scheduler and all random streams, to the last bit."""
    model, optimizer = experiment.model, experiment.optimizer
    left = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        left[f"grad {name}"] = torch.zeros(()) if parameter.grad is None else parameter.grad.clone()
        for key, value in optimizer.state[parameter].items():
            left[f"optimizer {key} of {name}"] = torch.as_tensor(value).clone()
    left["mode"] = torch.tensor([module.training for module in model.modules()])
    left["requires_grad"] = torch.tensor([parameter.requires_grad for parameter in model.parameters()])
    left["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    if experiment.scheduler is not None:
        left["scheduler"] = torch.tensor(experiment.scheduler.last_epoch)
    left["torch"] = torch.get_rng_state()
    left["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    left["python"] = torch.tensor(random.getstate()[1])
    if getattr(experiment.loader, "generator", None) is not None:
        left["loader"] = experiment.loader.generator.get_state()
    return left
