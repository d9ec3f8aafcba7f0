"""Use lifecycle hooks in a loop of your own: an observer, and an intervention that trains on other data and is undone.

The five lines that a loop needs are marked. Every other epoch, the intervention measures how far one more epoch in
another order would move the weights. Its changes to model, optimizer and random streams are undone: the last line
compares the run with a run without hooks, to the last bit.

Run: python examples/lifecycle_hooks.py
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline import HookPoint, RunDataContext

EPOCHS = 5


class WeightNorm(hl.TrainingHook):
    """How long the weights are, every fourth step; the number stays a tensor until the epoch is over."""

    hook_points = frozenset({HookPoint.POST_STEP})
    step_schedule = hl.StepSchedule("stride", stride=4)
    pure = True  # draws no random number, so no stream has to be put back for it

    def compute(self, ctx: RunDataContext) -> dict[str, Tensor]:
        assert ctx.model is not None
        return {"norm": torch.cat([p.detach().flatten() for p in ctx.model.parameters()]).norm()}


class AnotherOrder(hl.InterventionHook):
    """Where one more epoch would lead, with the data in another order."""

    hook_points = frozenset({HookPoint.POST_EPOCH})

    def intervene(self, run_ctx: RunDataContext, model_ctx: hl.ModelDataContext) -> dict[str, float] | None:
        if run_ctx.epoch % 2:
            return None
        before = [p.detach().clone() for p in model_ctx.model.parameters()]
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        now = model_ctx.model.parameters()
        return {"moved": sum(float((p.detach() - q).norm() ** 2) for p, q in zip(now, before, strict=True)) ** 0.5}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train(manager: hl.HookManager) -> nn.Module:
    """A training loop as one writes it, with five lines for hooks; a context is made only if a hook is due."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=32, shuffle=True)
    tools = hl.ModelDataContext(model, optimizer, loader=loader, loss_fn=loss_of)  # 1
    for epoch in range(EPOCHS):
        for batch in loader:
            manager.advance_step()  # 2
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.fire("POST_STEP", partial(RunDataContext, HookPoint.POST_STEP, epoch, model=model))  # 3
        manager.flush_step_metrics(epoch)  # 4
        manager.fire("POST_EPOCH", partial(RunDataContext, HookPoint.POST_EPOCH, epoch, model=model), tools)  # 5
    return model


def main() -> None:
    """Train with hooks and without, and compare."""
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[WeightNorm, AnotherOrder], sinks=[sink])
    print(manager.plan, end="\n\n")
    hooked = train(manager)
    for record in sink.records:
        for name, value in record.metrics.items():
            steps = f" at steps {value.steps}" if isinstance(value, hl.records.StepSeries) else ""
            shown = ", ".join(f"{v:.3f}" for v in value) if isinstance(value, list) else f"{value:.3f}"
            print(f"epoch {record.epoch}  {name} = {shown}{steps}")
    (receipt,) = manager.hooks.receipts
    print(f"\nthe last intervention: {len(receipt.touched)} things touched, {len(receipt.restored)} put back")
    plain = train(hl.HookManager())
    same = all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), hooked.state_dict().values(), strict=True)
    )
    print(f"weights as without hooks, to the last bit: {same}")


if __name__ == "__main__":
    main()
