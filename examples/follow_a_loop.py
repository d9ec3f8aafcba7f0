"""Put hooks into a loop by one line before it: `hl.follow`. The loop is not edited, and ends with the same bits.

The optimizer tells the steps, the loader the epochs, and ``backward()`` the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl


class UpdateSize(hl.TrainingHook):
    """Report how far each step moves the weights, relative to their length."""

    hook_points = frozenset({hl.HookPoint.PRE_STEP, hl.HookPoint.POST_STEP})

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any] | None:
        """Keep the weights before the step; compare them after it."""
        weights = torch.cat([parameter.detach().flatten() for parameter in ctx.model.parameters()])
        if ctx.hook_point is hl.HookPoint.PRE_STEP:
            self.before = weights
            return None
        return {"relative": (weights - self.before).norm() / self.before.norm()}


def train(*, follow: bool) -> nn.Module:
    """Train as anyone would; with one line more, if it is followed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=32, shuffle=True)

    sink = hl.sinks.MemorySink()
    run = hl.follow(model, optimizer, [UpdateSize, "training_metrics"], sinks=[sink], loader=loader) if follow else None

    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    if run is not None:
        run.close()
        show(sink)
    return model


def show(sink: hl.sinks.MemorySink) -> None:
    """Print the loss of each epoch, and how far its steps went on average."""
    moved = {epoch: sum(values) / len(values) for epoch, values in sink.series("UpdateSize/relative")}
    for epoch, loss in sink.series("training_metrics/loss"):
        print(f"epoch {epoch}: loss {loss:.3f}, a step moves the weights by {moved[epoch]:.2%}")


if __name__ == "__main__":
    followed, plain = train(follow=True), train(follow=False)
    same = all(torch.equal(a, b) for a, b in zip(followed.parameters(), plain.parameters(), strict=True))
    print(f"the same weights as without hooks, to the last bit: {same}")
