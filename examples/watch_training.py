"""Find a dead layer: statistics of every layer while a model trains, at a few percent of its time.

One of the layers below has a bias from which its ReLU does not recover. Nothing raises, and the loss falls anyway. The
watch shows it: the outputs of that layer are zero, and the gradient behind its ReLU is zero as well.

Run: python examples/watch_training.py
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl

STEPS = 120


class Residual(nn.Module):
    """A layer beside a straight line, so that the rest of the model learns whatever becomes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.relu(self.up(x)))


def make_model() -> nn.Sequential:
    """Four layers, the third of them spoilt."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), *(Residual(64) for _ in range(4)), nn.Linear(64, 1))
    nn.init.constant_(model[3].up.bias, -20.0)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Learn a sum; the last loss."""
    data = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(256, 16, generator=data)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train under a watch, report to a sink now and then, and look at the table."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sink = hl.sinks.MemorySink()
    stats = ("mean", "std", "absmax", "zero_fraction", "dead_fraction")
    targets = ["#.up", "#.relu"]
    with hl.watch(model, targets, on=("forward", "backward"), stats=stats, optimizer=optimizer) as watch:
        for epoch in range(3):
            loss = train(model, optimizer, STEPS // 3)
            sink.emit(watch.to_metrics(), epoch, "POST_EPOCH")
            zeros = [f"{sink.latest[f'{layer}.relu/forward/zero_fraction']:.0%}" for layer in range(1, 5)]
            print(f"epoch {epoch}: loss {loss:.3f}, zeros by layer {', '.join(zeros)}")
            if epoch < 2:
                watch.reset()
        print()
        print(watch)
    dead = [name for name, value in sink.latest.items() if name.endswith("forward/dead_fraction") and value == 1.0]
    print(f"\nnever anything but zero: {', '.join(name.removesuffix('/forward/dead_fraction') for name in dead)}")
    print(f"steps that are not due (every=50) take {measure_off(model, optimizer):.2f} of the time without a watch")


def measure_off(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Steps that are not due, against steps without a watch; medians of turns."""
    ratios = []
    for _ in range(9):
        took = []
        for watched in (False, True):
            schedule = hl.StepSchedule("stride", stride=50, warmup=1)
            watch = hl.watch(model, every=schedule, optimizer=optimizer) if watched else hl.HandleSet()
            start = time.thread_time()
            train(model, optimizer, 10)
            took.append(time.thread_time() - start)
            watch.remove()
        ratios.append(took[1] / took[0])
    return sorted(ratios)[len(ratios) // 2]


if __name__ == "__main__":
    main()
