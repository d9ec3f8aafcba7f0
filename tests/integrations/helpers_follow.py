"""A loop as users write them, and hooks that note what they see; tests of adapters share them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.integrations.follow import Follow

__all__ = ["Counting", "Loop", "Seen"]


class Seen(hl.TrainingHook):
    """Notes every point; draws random numbers, which must not count."""

    name = "seen"
    hook_points = set(hl.HookPoint)

    def __init__(self) -> None:
        self.contexts: list[hl.RunDataContext] = []

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        torch.randn(3)
        self.contexts.append(ctx)
        return {"step": float(-1 if ctx.step is None else ctx.step)}

    def places(self) -> list[tuple[str, int, int | None]]:
        return [(ctx.hook_point.name, ctx.epoch, ctx.step) for ctx in self.contexts]


class Loop:
    """A loop as users write them: dropout, BatchNorm, AdamW, a scheduler, an evaluation after each epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = DataLoader(TensorDataset(torch.randn(28, 6), torch.randint(3, (28,))), 4, shuffle=True)
        self.losses: list[float] = []

    def train(self, epochs: int = 3) -> Loop:
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.losses.append(float(loss.detach()))
            self.scheduler.step()
            self.evaluate()
        return self

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for x, _ in self.loader:
                self.model(x)
        self.model.train()

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def follow(self, hooks: Any, **options: Any) -> Follow:
        return hl.follow(self.model, self.optimizer, hooks, **options)

    def left(self) -> dict[str, Any]:
        state = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        grads = [parameter.grad for parameter in self.model.parameters()]
        return {"state": state, "grads": grads, "random": torch.get_rng_state(), "losses": self.losses}


class Counting(hl.TrainingHook):
    """Counts its firings, and goes on counting after a resume."""

    name = "counting"
    hook_points = {hl.HookPoint.PRE_EPOCH, hl.HookPoint.POST_STEP}

    def __init__(self) -> None:
        self.count = 0

    def compute(self, ctx: hl.RunDataContext) -> dict[str, int]:
        self.count += 1
        return {"count": self.count}

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
