"""What is kept for hooks is right, and nothing is kept that no hook asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_loops import Noting, linear_experiment, noting
from torch import Tensor, nn

import hookline as hl
from hookline.guard.snapshot import Snapshot
from hookline.training.run import Gradients


class Gradient(Noting):
    """Keeps what lies in ``.grad`` after every step."""

    name = "gradient"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx):
        self.contexts.append({name: p.grad.clone() for name, p in ctx.model.named_parameters() if p.grad is not None})


def run(*hooks: hl.TrainingHook, epochs: int = 2, batches: int = 3, **options: Any) -> None:
    hl.epoch_loop(linear_experiment(batches), epochs=epochs, manager=hl.HookManager(hooks=hooks), **options)


def mean_of(gradients: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([each[name] for each in gradients]).mean(0)


def test_mean_gradients_are_the_mean_over_the_batches_of_the_epoch():
    """At the end of it and at its snapshot, and nowhere else."""
    hook, gradient = noting(needs_grads=True), Gradient()
    run(hook, gradient)
    for epoch in range(2):
        for point in ("POST_EPOCH", "SNAPSHOT"):
            found = hook.at(point)[epoch].accumulated_grads
            for name in ("weight", "bias"):
                expected = mean_of(gradient.contexts[3 * epoch : 3 * epoch + 3], name)
                torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=0)
    for point in ("PRE_EPOCH", "PRE_STEP", "POST_STEP"):
        assert all(ctx.accumulated_grads is None for ctx in hook.at(point))


def test_gradients_of_the_step_before_are_shown_at_both_points_of_a_step():
    """Of the first step there are none."""
    hook, gradient = noting(needs_prev_step_grads=True), Gradient()
    run(hook, gradient)
    for point in ("PRE_EPOCH", "POST_EPOCH", "SNAPSHOT"):
        assert all(ctx.prev_step_grads is None for ctx in hook.at(point))
    for point in ("PRE_STEP", "POST_STEP"):
        contexts = hook.at(point)
        assert contexts[0].prev_step_grads == {}
        for before, ctx in zip(gradient.contexts, contexts[1:], strict=False):
            assert all(torch.equal(before[name], ctx.prev_step_grads[name]) for name in ("weight", "bias"))
    assert not torch.equal(gradient.contexts[0]["weight"], gradient.contexts[1]["weight"])


def test_a_hook_outside_its_window_asks_for_nothing(monkeypatch):
    """Gradients are added up in epoch 1, earlier state is kept for epoch 2; for snapshots that do not come, never."""
    added, taken = [], []
    real_add, real_take = Gradients.add, Snapshot.of.__func__
    monkeypatch.setattr(Gradients, "add", lambda self: added.append(1) or real_add(self))
    monkeypatch.setattr(
        Snapshot, "of", classmethod(lambda cls, *args, **kwargs: taken.append(1) or real_take(cls, *args, **kwargs))
    )

    class Window(hl.InterventionHook):
        hook_points = {hl.HookPoint.POST_EPOCH, hl.HookPoint.SNAPSHOT}

        def __init__(self, name, epoch, **needs):
            self.name = name
            self.loop_points = {"epoch": {hl.HookPoint.POST_EPOCH: (epoch, epoch), hl.HookPoint.SNAPSHOT: (7, 7)}}
            vars(self).update(needs)

        def intervene(self, run_ctx, model_ctx):
            return {"epoch": run_ctx.epoch}

    hooks = [Window("gradients", 1, needs_grads=True), Window("state", 2, needs_pre_epoch_state=True)]
    run(*hooks, epochs=4, snapshot_every=5)
    assert (len(added), len(taken)) == (3, 1)


def test_steps_that_were_not_trained_do_not_count():
    """A mean over the others."""
    model = nn.Linear(1, 1, bias=False)
    grads = iter([1.0, 100.0, 3.0])
    experiment = hl.Experiment(model, loader=[0, 1, 2])

    def train_step(batch):
        model.weight.grad = torch.full((1, 1), next(grads))
        return False if batch == 1 else None

    experiment.train_step = train_step
    hook = noting("POST_EPOCH", needs_grads=True)
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook]))
    assert hook.contexts[0].accumulated_grads["weight"].item() == 2.0


@pytest.mark.parametrize("need", ["needs_grads", "needs_prev_step_grads"])
def test_a_step_that_leaves_no_gradients_is_warned_of(need):
    """Once; a mean of nothing would be silence."""
    experiment = linear_experiment(2)

    def train_step(batch):
        result = hl.Experiment.train_step(experiment, batch)
        experiment.optimizer.zero_grad()
        return result

    experiment.train_step = train_step
    hook = noting("POST_STEP", "POST_EPOCH", **{need: True})
    with pytest.warns(hl.HooklineWarning, match="zero them before the backward") as caught:
        hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=[hook]))
    assert len(caught) == 1
    assert {} in (hook.at("POST_EPOCH")[0].accumulated_grads, hook.at("POST_STEP")[1].prev_step_grads)


def test_narrow_gradients_are_added_up_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
    gradients = Gradients(model)
    for _ in range(512):
        assert gradients.add()
    assert gradients.take_mean()["weight"].item() == 1.0


def test_names_carry_no_wrappers_and_tied_weights_count_once():
    """DataParallel and torch.compile around a model whose first and last layer share their weight."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for wrapped in (model, nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert list(Gradients(wrapped).copy()) == ["0.weight", "0.bias", "1.bias"]


def test_the_target_gradient_is_found_when_a_hook_reads_it():
    """Once for a context, with the step; never for hooks that do not look."""
    asked = []

    def target_gradient(model, step):
        asked.append(step)
        return {"weight": torch.full((1, 2), float(step))}

    experiment = linear_experiment(3, target_gradient=target_gradient)
    hook = noting("POST_STEP")
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook]))
    assert asked == []
    assert hook.contexts[1].target_grad["weight"].tolist() == [[1.0, 1.0]]
    assert hook.contexts[1].target_grad is hook.contexts[1].target_grad
    assert asked == [1]
