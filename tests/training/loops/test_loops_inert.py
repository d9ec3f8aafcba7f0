"""The run with hooks and sinks is the run without, bit for bit; and what is not guarded shows."""

from __future__ import annotations

import functools
import random
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers_loops import left_by, noting, rich_experiment
from helpers_sinks import Slow, delivered
from helpers_training import differences

import hookline as hl
from hookline.lifecycle import manager as metric_output

STEPS = 25


class Noisy(hl.TrainingHook):
    """Draws from every stream, at every point."""

    hook_points = set(hl.HookPoint)

    def __init__(self, number: int) -> None:
        self.name = f"noisy_{number}"

    def compute(self, ctx):
        return {"drawn": torch.rand(3).sum().item() + np.random.normal() + random.random()}


class GoesThroughData(hl.TrainingHook):
    """Iterates the loader of the run, in the middle of an epoch too."""

    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.SNAPSHOT}
    step_schedule = hl.StepSchedule("stride", stride=4)

    def compute(self, ctx):
        return {"rows": sum(len(batch[0]) for batch in ctx.loader)}


class ExtraEpoch(hl.InterventionHook):
    """Trains an epoch on shuffled data, and leaves it at that."""

    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.SNAPSHOT}
    step_schedule = hl.StepSchedule("stride", stride=7)

    def intervene(self, run_ctx, model_ctx):
        before = torch.cat([p.detach().flatten().clone() for p in model_ctx.model.parameters()])
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        after = torch.cat([p.detach().flatten() for p in model_ctx.model.parameters()])
        return {"moved": (after - before).norm()}


class Perturbed(hl.InterventionHook):
    """Pushes the weights far away, switches modes, and leaves it at that."""

    hook_points = {hl.HookPoint.POST_STEP}
    step_schedule = hl.StepSchedule("stride", stride=3)

    def intervene(self, run_ctx, model_ctx):
        direction = {name: torch.randn_like(p) for name, p in model_ctx.model.named_parameters()}
        model_ctx.apply_perturbation(direction, 10.0)
        model_ctx.model.eval()
        return {"loss": sum(grad.norm() for grad in model_ctx.compute_batch_gradients().values())}


class Curved(hl.InterventionHook):
    """A Hessian product, now and then."""

    hook_points = {hl.HookPoint.POST_STEP}
    step_schedule = hl.StepSchedule("burst", stride=10, burst_length=2, warmup=5)

    def intervene(self, run_ctx, model_ctx):
        vector = {name: torch.randn_like(p) for name, p in model_ctx.model.named_parameters()}
        return {"norm": sum(product.norm() for product in model_ctx.hvp(vector).values())}


class NeedsAll(hl.InterventionHook):
    """Asks for everything that a loop keeps on demand; goes back to before the epoch where there is one."""

    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH, hl.HookPoint.SNAPSHOT}
    needs_grads = needs_prev_step_grads = needs_pre_epoch_state = True

    def intervene(self, run_ctx, model_ctx):
        if run_ctx.hook_point is hl.HookPoint.POST_EPOCH:
            model_ctx.restore_pre_epoch()
            model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        return {"loss": run_ctx.loss, "acc": run_ctx.val_acc, "target": run_ctx.target_grad["4.bias"]}


def hooks() -> list[Any]:
    """All of them."""
    observers = [*(Noisy(number) for number in range(10)), GoesThroughData()]
    return [*observers, ExtraEpoch(), Perturbed(), Curved(), NeedsAll()]


def target_gradient(model, step):
    """Works with the model as if nobody else did."""
    model.zero_grad()
    model(torch.randn(8, 6)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def run_epochs(
    manager: hl.HookManager | None, **options: Any
) -> tuple[dict[str, torch.Tensor], hl.training.LoopResult]:
    experiment = rich_experiment(target_gradient=target_gradient, **options)
    result = hl.epoch_loop(experiment, epochs=STEPS // 5, manager=manager, snapshot_every=2)
    return left_by(experiment), result


def run_steps(manager: hl.HookManager | None, **options: Any) -> tuple[dict[str, torch.Tensor], hl.training.LoopResult]:
    experiment = rich_experiment(target_gradient=target_gradient, **options)
    result = hl.step_loop(experiment, steps=STEPS, manager=manager, snapshot_every=4)
    return left_by(experiment), result


LOOPS = pytest.mark.parametrize("run", [run_epochs, run_steps])


@functools.cache
def plain_run(run: Any, **options: Any) -> tuple[dict[str, torch.Tensor], hl.training.LoopResult]:
    """The run without hooks."""
    found: tuple[dict[str, torch.Tensor], hl.training.LoopResult] = run(None, **options)
    return found


@pytest.mark.product(
    1, run=[run_epochs, run_steps], options={"plain": {}, "accumulate": {"accumulate": 2}, "clip": {"clip_norm": 0.1}}
)
def test_a_run_with_hooks_is_the_run_without(run, options):
    """Weights, buffers, gradients, optimizer, scheduler, random streams, the loader's generator, the evaluation."""
    sink = hl.sinks.MemorySink()
    plain, plain_result = plain_run(run, **options)
    hooked, result = run(hl.HookManager(hooks=hooks(), sinks=[sink]), **options)
    assert differences(plain, hooked) == []
    assert (result.loss, result.steps) == (plain_result.loss, plain_result.steps)
    assert result.metrics["val_acc"] == plain_result.metrics["val_acc"]
    assert min(value for _, value in sink.series("ExtraEpoch/moved") if isinstance(value, float)) > 0.01
    assert {
        "noisy_9/drawn",
        "GoesThroughData/rows",
        "Perturbed/loss",
        "Curved/norm",
        "NeedsAll/target",
    } <= sink.latest.keys()


@LOOPS
def test_a_hook_that_falsely_claims_to_be_pure_shows(run):
    """Negative control: its draws shift the masks of dropout."""
    liar = Noisy(0)
    liar.pure = True
    plain, _ = plain_run(run)
    hooked, _ = run(hl.HookManager(hooks=[liar]))
    assert {"weight 0.weight", "torch", "numpy", "python"} <= set(differences(plain, hooked))


@LOOPS
def test_a_watch_sees_the_same_run_with_interventions_and_without(run):
    """Its steps are the optimizer's, those of interventions not among them."""

    def watched(*hooks, during="train"):
        experiment = rich_experiment()
        sink = hl.sinks.MemorySink()
        with hl.watch(
            experiment.model, on=("forward", "backward", "param_grad"), optimizer=experiment.optimizer, during=during
        ) as watch:
            manager = hl.HookManager(hooks=[*hooks, watch], sinks=[sink])
            if run is run_epochs:
                hl.epoch_loop(experiment, epochs=3, manager=manager)
            else:
                hl.step_loop(experiment, steps=15, manager=manager, snapshot_every=7)
        return [
            {name: value for name, value in record.metrics.items() if name.startswith("watch/")}
            for record in sink.records
            if any(name.startswith("watch/") for name in record.metrics)
        ]

    plain, hooked = watched(), watched(ExtraEpoch(), Perturbed(), Noisy(0))
    assert len(plain) == 3
    assert len(plain[1]) > 20
    assert plain == hooked
    assert plain != watched(ExtraEpoch(), during=("train", "intervention"))  # negative control


def draw(*args, **kwargs):
    """From all three streams, and seed one of them."""
    torch.rand(1)
    np.random.rand()
    random.random()
    torch.manual_seed(3)


class DrawingSink(hl.MetricSink):
    """Draws at every call, and fails at some records."""

    records = 0

    def write(self, record):
        draw()
        self.records += 1
        if self.records % 5 == 0:
            raise ValueError("on purpose")

    flush = draw


def test_a_sink_that_draws_random_numbers_leaves_the_run_as_it_is(monkeypatch, tmp_path):
    """Also one that fails after it has drawn; without the streams kept it would be noticed (negative control).

    Beside it are a log, a file and a sink in a process of its own.
    """

    def train(*sinks, **options):
        experiment = rich_experiment()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hl.HooklineWarning)
            with hl.HookManager(hooks=[noting("POST_STEP")], sinks=sinks, flush_every=1, **options) as manager:
                hl.epoch_loop(experiment, epochs=4, manager=manager)
        return left_by(experiment)

    sink, slow, plain = DrawingSink(), tmp_path / "slow.txt", train()
    sinks = sink, hl.sinks.JSONLSink(tmp_path / "m.jsonl"), Slow(str(slow))
    assert differences(plain, train(*sinks, log=tmp_path / "records.jsonl")) == []
    assert sink.records == sum("n" in line for line in delivered(slow)) >= 20
    monkeypatch.setattr(metric_output, "kept_rng", nullcontext)
    assert differences(plain, train(DrawingSink())) != []


class Random(hl.TrainingHook):
    """Draws wherever it is called."""

    hook_points = {hl.HookPoint.POST_STEP}
    needs_reference_weights = True
    __init__ = compute = reset = set_run_context = set_reference_weights = load_state_dict = draw

    def state_dict(self):
        return {"something": 1}


def test_hooks_may_draw_whenever_the_manager_calls_them():
    """When they are made, reset, told of the run, given reference weights, or loaded."""

    def streams():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]

    torch.manual_seed(0)  # not where `draw` leaves it
    before = streams()
    manager = hl.HookManager(hooks=[Random], reference_weights={})
    manager.reset_all()
    manager.set_run_context(strategy="s")
    manager.load_state_dict(manager.state_dict())
    manager.advance_step()
    manager.fire(hl.HookPoint.POST_STEP, epoch=0)
    assert streams() == before
    manager.get_hook("Random").compute()
    assert all(one != other for one, other in zip(streams(), before, strict=True))
