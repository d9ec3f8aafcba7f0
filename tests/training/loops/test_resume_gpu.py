"""A run on a GPU with hooks, stopped and resumed, is the run without that never stopped; else skipped."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.training.checkpoints import Checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BATCHES = 5


def make_experiment(scaled: bool) -> hl.Experiment:
    """Dropout on the device, half precision with a scaler that starts too high, a loader that pins."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
    data = TensorDataset(torch.randn(32 * BATCHES, 16), torch.randint(4, (32 * BATCHES,)))
    loader = DataLoader(data, batch_size=32, shuffle=True, pin_memory=True)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = (part.cuda(non_blocking=True) for part in batch)
        with torch.autocast("cuda", torch.float16, enabled=scaled):
            return F.cross_entropy(model(x + 0.01 * torch.randn_like(x)).float(), y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=4) if scaled else None
    return hl.Experiment(model, optimizer, loader, loss_fn, scaler=scaler)


class Remembers(hl.TrainingHook):
    """Keeps a tensor on the device, and draws there."""

    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH}
    needs_grads = needs_prev_step_grads = True

    def __init__(self, *stops: int) -> None:
        self.stops = stops
        self.average: torch.Tensor | None = None

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        if ctx.hook_point.is_step and ctx.step in self.stops:
            signal.raise_signal(signal.SIGINT)
        weight = ctx.model[0].weight.detach()
        self.average = weight.clone() if self.average is None else self.average.lerp(weight, 0.1)
        grads = ctx.accumulated_grads or ctx.prev_step_grads or {}
        return {"average": self.average.norm(), "drawn": torch.rand((), device="cuda"), "grads": len(grads)}

    def get_state_tensors(self) -> dict[str, Any]:
        return {"average": self.average}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        self.average = tensors["average"]


def left_by(experiment: hl.Experiment, hook: Remembers) -> dict[str, torch.Tensor]:
    left = {name: value.clone() for name, value in experiment.model.state_dict().items()}
    for number, state in enumerate(experiment.optimizer.state.values()):
        left |= {f"{key} {number}": torch.as_tensor(value).clone() for key, value in state.items()}
    if experiment.scaler is not None:
        left["scale"] = torch.tensor(experiment.scaler.get_scale())
    return left | {"cuda": torch.cuda.get_rng_state(), "cpu": torch.get_rng_state(), "hook": hook.average}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_run_on_a_gpu_goes_on_where_it_was(loop, scaled, offload, tmp_path):
    """The streams of the device, the scaler and its count, a fused optimizer, the tensors of hooks on the device."""

    def run(*stops: int, **options: Any) -> tuple[Any, hl.training.LoopResult, list[Any]]:
        experiment, hook, sink = make_experiment(scaled), Remembers(*stops), hl.sinks.MemorySink()
        manager = hl.HookManager(hooks=[hook], sinks=[sink], offload_state=offload)
        if loop == "epoch":
            result = hl.epoch_loop(experiment, epochs=3, manager=manager, **options)
        else:
            result = hl.step_loop(experiment, steps=3 * BATCHES, manager=manager, snapshot_every=4, **options)
        return left_by(experiment, hook), result, sink.records

    plain = make_experiment(scaled)
    plain_hook = Remembers()
    if loop == "epoch":
        hl.epoch_loop(plain, epochs=3)
    else:
        hl.step_loop(plain, steps=3 * BATCHES, snapshot_every=4)
    bare = left_by(plain, plain_hook)
    expected, expected_result, _ = run()
    assert [name for name in bare if name != "hook" and not torch.equal(bare[name], expected[name])] == []
    for stops in ((1,), (4,), (7,), ()):
        torch.rand(3, device="cuda")
        left, result, _ = run(*stops, checkpoints=Checkpoints(tmp_path), resume=True)
        assert (result.interrupted is None) is (not stops)
    assert [name for name in expected if not torch.equal(expected[name].cpu(), left[name].cpu())] == []
    assert result == expected_result


def test_a_run_that_was_on_a_gpu_goes_on_without(tmp_path):
    """On the CPU, where its streams mean nothing: that is all that is lost."""
    checkpoints = Checkpoints(tmp_path, config={})
    experiment = make_experiment(scaled=False)
    hl.epoch_loop(experiment, epochs=1, checkpoints=checkpoints)
    weight = experiment.model[0].weight.detach().cpu()
    again = make_experiment(scaled=False)
    again.model.cpu()
    again.optimizer = torch.optim.AdamW(again.model.parameters(), lr=1e-2, fused=True)
    with pytest.warns(hl.HooklineWarning, match="complete"):
        hl.epoch_loop(again, epochs=1, checkpoints=checkpoints, resume=True)
    assert torch.equal(again.model[0].weight.detach(), weight)
    assert not again.optimizer.state[again.model[0].weight]["exp_avg"].is_cuda
