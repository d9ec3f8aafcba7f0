"""Experiment: building blocks, given or as methods or on any object; its step, its scheduler, its evaluation."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers_loops import linear_experiment, noting, rich_experiment
from torch import nn

import hookline as hl
from hookline.phases import phase


def trained_by_hand(
    experiment: hl.Experiment, batches: list[Any], *, group: int = 1, clip: float | None = None
) -> None:
    """What the loop is to come to."""
    model, optimizer = experiment.model, experiment.optimizer
    for start in range(0, len(batches), group):
        optimizer.zero_grad()
        parts = batches[start : start + group]
        for x, y in parts:
            (F.mse_loss(model(x), y) / len(parts)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [({}, {}), ({"accumulate": 2}, {"group": 2}), ({"clip_norm": 0.05}, {"clip": 0.05})],
    ids=["plain", "accumulate", "clip"],
)
def test_training_is_what_one_would_write(options, by_hand):
    """Bit for bit; five batches in groups of two leave a group of one."""
    looped, hand = linear_experiment(5, **options), linear_experiment(5)
    result = hl.epoch_loop(looped, epochs=1)
    trained_by_hand(hand, hand.loader, **by_hand)
    assert torch.equal(looped.model.weight, hand.model.weight)
    assert torch.equal(looped.model.bias, hand.model.bias)
    assert result.steps == (3 if "accumulate" in options else 5)


def test_with_accumulation_a_step_is_one_of_the_optimizer():
    """Points, schedule and mean gradients go by it; hooks are shown all its batches, and can have their gradient."""

    class Same(hl.InterventionHook):
        hook_points = {hl.HookPoint.POST_STEP}

        def intervene(self, run_ctx, model_ctx):
            return {"norm": model_ctx.compute_batch_gradients()["bias"].norm()}

    hook = noting("PRE_STEP", "POST_STEP")
    experiment = linear_experiment(5, lr=0.0, accumulate=2)
    sink = hl.sinks.MemorySink()
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook, Same()], sinks=[sink]))
    assert hook.points == ["PRE_STEP", "POST_STEP"] * 3
    assert [ctx.batch_idx for ctx in hook.at("PRE_STEP")] == [0, 2, 4]
    assert [len(ctx.batch_data) for ctx in hook.at("PRE_STEP")] == [2, 2, 1]
    [(_, norms)] = sink.series("Same/norm")
    assert norms[-1] == pytest.approx(experiment.model.bias.grad.norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SimpleNamespace(), "takes an Experiment, which has a model"),
        (lambda: hl.Experiment(nn.Linear(1, 1), loader=[]), "no optimizer: give it one, or .*train_step"),
        (lambda: linear_experiment(1, accumulate=0), "accumulate= must be .* got 0"),
        (lambda: linear_experiment(1, train_step=lambda batch: "loss"), "train_step.. returns the loss.* got a str"),
        (lambda: linear_experiment(1, loss_fn=lambda model, batch: model(batch[0])), r"gives one number, got \(4, 1\)"),
        (lambda: linear_experiment(1, loss_fn=nn.MSELoss()), "MSELoss takes output and target: hand over lambda"),
        (lambda: linear_experiment(1, clip_norm=-1.0), "clip_norm= is the largest norm, over 0, .* got -1.0"),
    ],
)
def test_what_cannot_be_trained_is_said(make, text):
    with pytest.raises(hl.errors.OptionError, match=text):
        hl.epoch_loop(make(), epochs=1)


class OneMoreEpoch(hl.InterventionHook):
    """Trains again from before the epoch, in the same order, and keeps the weights it came to."""

    hook_points = {hl.HookPoint.POST_EPOCH}
    needs_pre_epoch_state = True

    def __init__(self) -> None:
        self.reached: list[torch.Tensor] = []

    def intervene(self, run_ctx, model_ctx):
        model_ctx.restore_pre_epoch()
        loader = model_ctx.get_shuffled_loader() if run_ctx.loader is None else run_ctx.loader
        model_ctx.run_training_epoch(loader)
        self.reached.append(torch.cat([p.detach().flatten() for p in model_ctx.model.parameters()]))


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.05}, {"scheduler_per": "step"}, {"accumulate": 3}],
    ids=["plain", "clip", "schedule", "accumulate"],
)
def test_interventions_train_as_the_run_does(options):
    """The same epoch again comes to the same weights; also with clipping, a scheduler of steps, accumulation."""
    experiment = linear_experiment(4, **options)
    experiment.optimizer = torch.optim.AdamW(experiment.model.parameters(), lr=0.1)
    experiment.scheduler = torch.optim.lr_scheduler.ExponentialLR(experiment.optimizer, 0.5)
    hook, weights = OneMoreEpoch(), []
    experiment.on_epoch_end = lambda epoch, metrics: weights.append(
        torch.cat([p.detach().flatten().clone() for p in experiment.model.parameters()])
    )
    hl.epoch_loop(experiment, epochs=3, manager=hl.HookManager(hooks=[hook]))
    assert len(weights) == 3
    assert all(map(torch.equal, hook.reached, weights))


# -- scheduler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per", "lrs"), [(None, [1.0, 0.5]), ("epoch", [1.0, 0.5]), ("step", [0.125, 0.125 / 8])])
def test_the_scheduler_counts_epochs_or_steps(per, lrs):
    """As the loop does, unless it is told; at POST_EPOCH it has stepped."""
    experiment = linear_experiment(3, lr=2.0 if per != "step" else 1.0, scheduler_per=per)
    experiment.scheduler = torch.optim.lr_scheduler.ExponentialLR(experiment.optimizer, 0.5)
    hook = noting("POST_EPOCH")
    hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=[hook]))
    assert [ctx.lr for ctx in hook.contexts] == pytest.approx(lrs)


def test_a_scheduler_that_watches_a_plateau_is_given_the_loss():
    """It takes one; a constant loss lowers the rate."""
    experiment = linear_experiment(2)
    experiment.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(experiment.optimizer, factor=0.1, patience=1)
    experiment.train_step = lambda batch: torch.tensor(1.0)
    hl.epoch_loop(experiment, epochs=4)
    assert experiment.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Overflowing(nn.Module):
    """Its gradient is infinite at batches below zero."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight * torch.where(x < 0, torch.tensor(float("inf")), x)


def test_with_a_scaler_hooks_see_gradients_unscaled_and_skipped_steps_do_not_count():
    """The scheduler waits for a step that overflowed, and the mean leaves it out."""
    model = Overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    experiment = hl.Experiment(
        model,
        optimizer,
        [torch.tensor([2.0]), torch.tensor([-1.0]), torch.tensor([4.0])],
        lambda model, batch: model(batch).sum(),
        scaler=scaler,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        scheduler_per="step",
    )
    hook = noting("POST_EPOCH", needs_grads=True)
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook]))
    assert hook.contexts[0].accumulated_grads["weight"].item() == 3.0
    assert experiment.scheduler.last_epoch == 2
    assert scaler.get_scale() == 512.0


def test_evaluation_leaves_training_as_it_was():
    """Modes of every module, random streams, gradients not recorded; trackers are paused."""
    experiment = rich_experiment(batches=2)
    experiment.model[1].eval()  # frozen on purpose
    phases, states = [], []

    def evaluate(model):
        phases.append((phase(), model.training, torch.is_grad_enabled()))
        states.append([torch.rand(1).item(), np.random.rand(), random.random()])
        return {"val_acc": 1.0}

    experiment.evaluate = evaluate
    seen = []

    def streams():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    experiment.scheduler.step = lambda: seen.append(streams())  # just before the evaluation
    experiment.on_epoch_end = lambda epoch, metrics: seen.append(streams())
    hl.epoch_loop(experiment, epochs=1)
    assert phases == [("eval", False, False)]
    assert seen[0] == seen[1]
    assert states[0] == [torch.rand(1).item(), np.random.rand(), random.random()]
    assert [module.training for module in experiment.model] == [True, False, True, True, True]


# -- the usual loss --------------------------------------------------------------------------------------------


def usual(model: Any, batch: Any) -> torch.Tensor:
    return hl.Experiment(nn.Linear(1, 1)).loss_fn(model, batch)


def test_without_a_loss_the_usual_one_is_taken():
    """Classes by cross entropy, values by squared error, dictionaries by what the model says."""
    out = torch.randn(4, 3)
    classes, values = torch.tensor([0, 2, 1, 1]), torch.randn(4, 3)
    assert torch.equal(usual(lambda x: x, (out, classes)), F.cross_entropy(out, classes))
    assert torch.equal(usual(lambda x: x, [out, values]), F.mse_loss(out, values))
    tokens = torch.randn(2, 5, 7)
    targets = torch.randint(7, (2, 5))
    assert torch.equal(usual(lambda x: x, (tokens, targets)), F.cross_entropy(tokens.flatten(0, 1), targets.flatten()))
    pixels, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    assert torch.equal(usual(lambda x: x, (pixels, labels)), F.cross_entropy(pixels, labels))
    assert usual(lambda **batch: SimpleNamespace(loss=batch["x"].sum()), {"x": torch.ones(3)}) == 3
    assert usual(lambda **batch: {"loss": batch["x"].sum()}, {"x": torch.ones(3)}) == 3


@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (lambda x: x, torch.ones(3), r"has to be \(inputs, target\) or a dictionary; got a Tensor"),
        (lambda x: {"y": x}, (torch.ones(3), torch.ones(3)), "has to give a tensor, got a dict"),
        (lambda x: x, (torch.ones(3, 1), torch.ones(3)), r"gives \(3, 1\), the target is \(3,\)"),
    ],
)
def test_where_there_is_no_usual_loss_it_is_said(model, batch, text):
    with pytest.raises(hl.errors.OptionError, match=text) as caught:
        usual(model, batch)
    assert "Give the experiment a loss_fn(model, batch)." in str(caught.value)


def test_the_usual_loss_takes_batches_to_the_device_of_the_model():
    """Loaders leave them on the CPU; a device that every machine has stands for a GPU."""
    model = nn.Linear(3, 2, device="meta")
    assert usual(model, [torch.ones(4, 3), torch.ones(4, 2)]).device.type == "meta"

    class Dictionary(nn.Linear):
        def forward(self, x, more):
            return {"loss": super().forward(x).sum(), "more": more}

    assert usual(Dictionary(3, 2, device="meta"), {"x": torch.ones(4, 3), "more": "text"}).device.type == "meta"
