"""What is kept for hooks is right, and nothing is kept that no hook asked for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers_loops import Noting, linear_experiment, noting
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Made(TorchDispatchMode):
    """How many tensors as large as the weights were made, and not by a forward or backward or a step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.ops = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == self.size and func._schema.name in ("aten::clone", "aten::add_"):
            self.ops.append(func._schema.name)
        return out


def made_in(hook: Noting) -> list[str]:
    """Clones and additions of the size of the weights in a run whose own step makes none."""
    model = nn.Linear(7, 13, bias=False)
    experiment = hl.Experiment(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2, 7)] * 4)

    def train_step(batch):
        model.weight.grad = None
        model(batch).sum().backward()

    experiment.train_step = lambda batch: train_step(batch) or 0.0
    with _Made(7 * 13) as made:
        hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=[hook]), snapshot_every=2)
    return made.ops


def test_nothing_of_the_size_of_the_model_is_made_without_a_hook_that_needs_it():
    """Not a copy, not a sum; with one, there are."""
    assert made_in(noting()) == []
    assert (
        made_in(noting(needs_prev_step_grads=True)).count("aten::clone") == 7
    )  # eight steps, the first has none before
    schedule = hl.StepSchedule("stride", stride=3)
    assert made_in(noting("POST_STEP", needs_prev_step_grads=True, step_schedule=schedule)).count("aten::clone") == 2
    assert "aten::add_" in made_in(noting(needs_grads=True))


def test_a_hook_outside_its_window_asks_for_nothing(monkeypatch):
    """Gradients are added up in epoch 1, earlier state is kept for epoch 2; for snapshots that do not come, never."""
    added, taken = [], []
    real_add, real_take = Gradients.add, Snapshot.of.__func__
    monkeypatch.setattr(Gradients, "add", lambda self: added.append(1) or real_add(self))
    monkeypatch.setattr(
        Snapshot,
        "of",
        classmethod(lambda cls, *args, **kwargs: taken.append(1) or real_take(cls, *args, **kwargs)),
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


@pytest.mark.parametrize("loop", [hl.epoch_loop, hl.step_loop])
def test_if_no_step_was_trained_the_mean_is_empty(loop):
    """As when a GradScaler passes over all of them; a hook that has asked for gradients is not shown None."""
    experiment = linear_experiment(2, train_step=lambda batch: False)
    hook = noting("SNAPSHOT", needs_grads=True)
    loop(experiment, **{loop.__name__.replace("_loop", "s"): 1}, manager=hl.HookManager(hooks=[hook]))
    assert [ctx.accumulated_grads for ctx in hook.contexts] == [{}]


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


def test_a_resumed_run_has_no_step_before_its_first():
    """Which is nothing to warn of."""
    manager = hl.HookManager(hooks=[noting("POST_STEP", needs_prev_step_grads=True)])
    hl.epoch_loop(linear_experiment(2), epochs=1, manager=manager)
    hl.epoch_loop(linear_experiment(2), epochs=2, first_epoch=1, manager=manager)
    assert [len(ctx.prev_step_grads) for ctx in manager.hooks["noting"].contexts] == [0, 2, 0, 2]


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


def test_sparse_gradients_are_averaged_too():
    """Those of an embedding."""
    model = nn.Embedding(5, 2, sparse=True)
    gradients = Gradients(model)
    for row in (1, 3):
        model.zero_grad()
        model(torch.tensor([row])).sum().backward()
        gradients.add()
    assert gradients.take_mean()["weight"].sum(1).tolist() == [0, 1, 0, 1, 0]


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


def test_finding_the_target_gradient_leaves_no_trace():
    """Gradients, modes, random streams; weights are not its to change."""
    found = []

    def target_gradient(model, step):
        model.eval()
        model.zero_grad()
        model(torch.rand(3, 2)).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    class Reader(hl.TrainingHook):
        hook_points = {hl.HookPoint.POST_STEP}
        pure = True  # so that nobody else puts the random streams back

        def compute(self, ctx):
            before = (ctx.model.weight.grad, ctx.model.weight.grad.clone(), torch.get_rng_state())
            found.append(ctx.target_grad["bias"].item())
            assert ctx.model.weight.grad is before[0]
            assert torch.equal(ctx.model.weight.grad, before[1])
            assert torch.equal(torch.get_rng_state(), before[2])
            assert ctx.model.training

    experiment = linear_experiment(2, target_gradient=target_gradient)
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[Reader()]))
    assert found == [3.0, 3.0]

    def meddles(model, step):
        with torch.no_grad():
            model.weight.zero_()

    experiment = linear_experiment(2, target_gradient=meddles)
    with pytest.raises(hl.errors.GuardError, match="weight"):
        hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[Reader()]))


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_long_run_does_not_grow(loop):
    """Objects and tensors alive after 400 steps are those after 200; negative control: a hook that keeps losses."""

    class Asks(hl.InterventionHook):
        name = "asks"
        hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.SNAPSHOT}
        intervention_points = {hl.HookPoint.SNAPSHOT}
        needs_grads = needs_prev_step_grads = needs_pre_epoch_state = True
        kept: Any = None

        def compute(self, ctx):
            if self.kept is not None:
                self.kept.append(ctx.loss + torch.ones(1))
            return {"gradients": len(ctx.prev_step_grads), "loss": ctx.loss}

        def intervene(self, run_ctx, model_ctx):
            model_ctx.run_training_epoch(run_ctx.loader[:1])
            return {"gradients": len(run_ctx.accumulated_grads)}

    def growth(kept: list[Any] | None) -> tuple[int, int]:
        alive = []

        def count(position, metrics):
            if position + 1 in ((50, 100) if loop == "epoch" else (200, 400)):
                gc.collect()
                objects = gc.get_objects()
                alive.append((len(objects), sum(issubclass(type(each), Tensor) for each in objects)))

        experiment, hook = linear_experiment(4, lr=1e-3, should_stop=count), Asks()
        hook.kept = kept
        manager = hl.HookManager(hooks=[hook])
        if loop == "epoch":
            hl.epoch_loop(experiment, epochs=100, manager=manager, snapshot_every=5)
        else:
            hl.step_loop(experiment, steps=400, manager=manager, snapshot_every=20)
        (objects, tensors), (later_objects, later_tensors) = alive
        return later_objects - objects, later_tensors - tensors

    objects, tensors = growth(None)
    assert objects <= 20
    assert tensors <= 0
    assert min(growth([])) >= 190
