"""Look ahead: in the middle of training, find the best learning rate, and continue as if nothing was tried.

Every hundred steps each candidate trains thirty steps from the same model, optimizer and random streams, undone by
`rollback`. A second run that never looks ahead ends with the same weights, to the last bit.

python examples/rollback.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hookline as hl

CANDIDATES = (0.0003, 0.003, 0.03)


class Training:
    """A small regression with dropout and normalization, so that modes, buffers and random streams matter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 300)
        self.x = torch.randn(512, 8)
        self.y = self.x.square().sum(1, keepdim=True).sin()

    def step(self) -> None:
        """One step on a random batch."""
        rows = torch.randint(len(self.x), (64,))
        self.optimizer.zero_grad()
        mse_loss(self.model(self.x[rows]), self.y[rows]).backward()
        self.optimizer.step()
        self.scheduler.step()

    @torch.no_grad()
    def loss(self) -> float:
        """On all data, in evaluation mode; changes modes, which is why it is called inside a rollback."""
        self.model.eval()
        return mse_loss(self.model(self.x), self.y).item()


def look_ahead(training: Training, lr: float, steps: int = 30) -> float:
    """The loss after some steps at another learning rate."""
    with hl.rollback(training.model, training.optimizer, training.scheduler):
        for group in training.optimizer.param_groups:
            group["lr"] = lr
        for _ in range(steps):
            training.step()
        return training.loss()


def train(*, looking: bool) -> Training:
    """Three hundred steps."""
    training = Training()
    for step in range(300):
        if looking and step % 100 == 0:
            losses = {lr: look_ahead(training, lr) for lr in CANDIDATES}
            best = min(losses, key=lambda lr: losses[lr])
            print(
                f"step {step:>3}  "
                + "  ".join(f"{lr:g}: {loss:.4f}" for lr, loss in losses.items())
                + f"  best {best:g}"
            )
        training.step()
    return training


def main() -> None:
    """Train twice, and compare."""
    looked, plain = train(looking=True), train(looking=False)
    pairs = zip(looked.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    print(f"the same weights as without looking: {all(torch.equal(a, b) for a, b in pairs)}")
    with hl.rollback(looked.model, looked.optimizer) as receipt:
        looked.step()
        looked.model.eval()
    print(f"one step touches {len(receipt.touched)} things, among them {', '.join(receipt.touched[-3:])}")


if __name__ == "__main__":
    main()
