"""Measure, in the middle of training, what an epoch would have taught the model in another order.

A network learns to add two digits modulo 7; its data are sorted by their first digit. At some epochs a hook goes back
to before the epoch and trains it again three times in shuffled order. It reports how much of the epoch's mean gradient
agrees with the shuffled ones, and how much is due to the order. A second hook measures the curvature along the gradient
by a Hessian product. Both use the model and the optimizer of the run itself; the guard restores everything afterwards.
At the end the run is compared with one that had no hooks: they are equal to the last bit.

Run: python examples/interventions.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl

MODULUS, EPOCHS, SNAPSHOT_EVERY = 7, 61, 15


class Ordering(hl.InterventionHook):
    """Splits the mean gradient of an epoch into what any order would give, and what this order adds."""

    name = "ordering"
    hook_points = frozenset({hl.HookPoint.SNAPSHOT})
    needs_grads = needs_pre_epoch_state = True

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: hl.ModelDataContext) -> dict[str, Any]:
        """Train the epoch again, three times in other orders."""
        assert run_ctx.accumulated_grads is not None
        shuffled = []
        for _ in range(3):
            model_ctx.restore_pre_epoch()
            shuffled.append(flat(model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())))
        gradient, content = flat(run_ctx.accumulated_grads), torch.stack(shuffled).mean(0)
        along = content * (gradient @ content) / content.square().sum()
        return {
            "owed_to_order": (gradient - along).square().sum() / gradient.square().sum(),
            "alignment": torch.cosine_similarity(gradient, content, dim=0),
        }


class Curvature(hl.InterventionHook):
    """The second derivative of the loss along its gradient, on the current batch."""

    name = "curvature"
    hook_points = frozenset({hl.HookPoint.POST_STEP})
    step_schedule = hl.StepSchedule("burst", stride=100, burst_length=3, warmup=100)
    scope = "grads"  # it changes no weight, so none need be copied

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: hl.ModelDataContext) -> dict[str, Any]:
        """One gradient, one Hessian product."""
        gradient = model_ctx.compute_batch_gradients()
        product = model_ctx.hvp(gradient)
        return {"along_gradient": flat(gradient) @ flat(product) / flat(gradient).square().sum()}


def flat(gradients: Any) -> Tensor:
    """Gradients of all parameters, one after the other."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def make_experiment() -> hl.Experiment:
    """Sums of two digits modulo 7, in the order of the first digit; dropout makes every random number count."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2 * MODULUS, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, MODULUS)
    )
    a, b = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS)).T
    x = torch.cat([F.one_hot(a, MODULUS), F.one_hot(b, MODULUS)], dim=1).float()
    y = (a + b) % MODULUS

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        return {"val_acc": (model(x).argmax(1) == y).float().mean()}

    loader = DataLoader(TensorDataset(x, y), batch_size=MODULUS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    return hl.Experiment(model, optimizer, loader, scheduler=scheduler, evaluate=evaluate)


def train(manager: hl.HookManager | None) -> tuple[hl.Experiment, hl.training.LoopResult]:
    """The same run each time, but for its hooks."""
    experiment = make_experiment()
    result = hl.epoch_loop(experiment, epochs=EPOCHS, manager=manager, snapshot_every=SNAPSHOT_EVERY)
    return experiment, result


def main() -> None:
    """Train with hooks and without, show what they found, and compare."""
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[Ordering(), Curvature()], sinks=[sink])
    hooked, result = train(manager)
    plain, _ = train(None)
    print(manager.plan)
    print(f"\n{result.steps} steps, accuracy {result.metrics['val_acc']:.0%}\n")
    for (epoch, share), (_, alignment) in zip(
        sink.series("ordering/owed_to_order"), sink.series("ordering/alignment"), strict=True
    ):
        print(f"epoch {epoch:2}: {share:4.0%} of the gradient is owed to the order (cosine {alignment:+.2f})")
    for epoch, values in sink.series("curvature/along_gradient"):
        steps = ", ".join(f"step {step}: {value:.2f}" for step, value in zip(values.steps, values, strict=True))
        print(f"epoch {epoch:2}: curvature along the gradient at {steps}")
    pairs = zip(hooked.model.state_dict().items(), plain.model.state_dict().values(), strict=True)
    different = [name for (name, one), other in pairs if not torch.equal(one, other)]
    last = sum(receipt.saved_bytes for receipt in manager.hooks.receipts)
    print(f"\nthe last intervention had {last:,} bytes to put back")
    print(f"weights that differ from the run without hooks: {', '.join(different) or 'none'}")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
