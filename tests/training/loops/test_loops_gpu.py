"""The loops on a GPU: nothing waits for the device unless a hook reads, and hooks leave no trace; else skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # of torch, once, that it does not see all
]

STEPS = 24


def make_experiment(**options: Any) -> hl.Experiment:
    """Dropout and BatchNorm on the device, AdamW, batches that are there already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    data = [(torch.randn(32, 16, device="cuda"), torch.randint(4, (32,), device="cuda")) for _ in range(8)]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled="scaler" in options):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    return hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data, loss_fn, **options)


class Looks(hl.TrainingHook):
    """Draws on the device and returns tensors that stay there."""

    hook_points = {hl.HookPoint.PRE_STEP, hl.HookPoint.POST_STEP}
    needs_prev_step_grads = True
    reads = False

    def compute(self, ctx):
        if self.reads and ctx.loss is not None:
            return {"loss": ctx.loss}
        return {"norm": ctx.model[0].weight.norm() + torch.rand((), device="cuda")}


class Shuffled(hl.InterventionHook):
    """Trains an epoch, perturbs, multiplies by the Hessian."""

    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.SNAPSHOT}
    step_schedule = hl.StepSchedule("stride", stride=5)

    def intervene(self, run_ctx, model_ctx):
        batch = None if run_ctx.batch_data is not None else run_ctx.loader[0]
        product = model_ctx.hvp(model_ctx.compute_batch_gradients(batch), batch)
        model_ctx.apply_perturbation(product, 1.0)
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        torch.rand(9, device="cuda")
        return {"weight": model_ctx.model[0].weight.norm()}


def left_by(experiment: hl.Experiment) -> dict[str, torch.Tensor]:
    """Weights, optimizer, random streams."""
    left = {name: value.clone() for name, value in experiment.model.state_dict().items()}
    for number, state in enumerate(experiment.optimizer.state.values()):
        left |= {f"{key} {number}": torch.as_tensor(value).clone() for key, value in state.items()}
    return left | {"cuda": torch.cuda.get_rng_state(), "cpu": torch.get_rng_state()}


def run(loop: str, experiment: hl.Experiment, manager: hl.HookManager | None) -> dict[str, torch.Tensor]:
    if loop == "epoch":
        hl.epoch_loop(experiment, epochs=STEPS // 8, manager=manager)
    else:
        hl.step_loop(experiment, steps=STEPS, manager=manager, snapshot_every=6)
    return left_by(experiment)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_run_with_hooks_on_a_gpu_is_the_run_without(loop, scaled):
    """Also with a GradScaler in half precision."""

    def options() -> dict[str, Any]:
        return {"scaler": torch.amp.GradScaler("cuda")} if scaled else {}

    plain = run(loop, make_experiment(**options()), None)
    sink = hl.sinks.MemorySink()
    hooked = run(loop, make_experiment(**options()), hl.HookManager(hooks=[Looks(), Shuffled()], sinks=[sink]))
    assert [name for name in plain if not torch.equal(plain[name], hooked[name])] == []
    assert {"Looks/norm", "Shuffled/weight"} <= sink.latest.keys()
