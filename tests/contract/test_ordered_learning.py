"""OrderedLearning's hooks over time: what is promised of loops, schedules, observers,
interventions and their context, line by line. Files of sinks and the command line have tests of their own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers_loops import left_by, rich_experiment
from helpers_training import differences
from torch import nn

import hookline as hl
from hookline import HookPoint


class Observer(hl.TrainingHook):
    """Notes when it fires."""

    def __init__(self, *points: HookPoint, name: str = "observer", **attributes: Any) -> None:
        self.name = name
        self.hook_points = set(points)
        self.contexts: list[hl.RunDataContext] = []
        vars(self).update(attributes)

    def compute(self, ctx):
        self.contexts.append(ctx)
        return {"count": len(self.contexts)}


def test_observers_at_all_five_points():
    """Two epochs of three batches with snapshot_every=2: order of firing, and step metrics as lists of three."""
    sink, hook = hl.sinks.MemorySink(), Observer(*HookPoint)
    experiment = rich_experiment(batches=3, evaluate=None)
    hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=[hook], sinks=[sink]), snapshot_every=2)
    epoch = ["PRE_EPOCH", *["PRE_STEP", "POST_STEP"] * 3, "POST_EPOCH"]
    assert [ctx.hook_point.name for ctx in hook.contexts] == [*epoch, "SNAPSHOT", *epoch]
    records = [(record.epoch, record.hook_point.name) for record in sink.records]
    flushed = ["PRE_EPOCH", "PRE_STEP", "POST_STEP", "POST_EPOCH"]
    assert records == [(0, name) for name in [*flushed, "SNAPSHOT"]] + [(1, name) for name in flushed]
    lists = [record.metrics["observer/count"] for record in sink.records if record.hook_point.is_step]
    assert [len(values) for values in lists] == [3, 3, 3, 3]
    assert (list(lists[0]), list(lists[1])) == ([2, 4, 6], [3, 5, 7])


@pytest.mark.parametrize(
    ("schedule", "active"),
    [
        (hl.StepSchedule("burst", stride=10, burst_length=3, warmup=5), [10, 11, 12, 20, 21, 22]),
        (hl.StepSchedule("stride", stride=5, warmup=3), [5, 10, 15, 20, 25]),
        (hl.StepSchedule("continual", warmup=10), list(range(10, 30))),
        (hl.StepSchedule("burst", stride=10, burst_length=3, warmup=11), [11, 12, 20, 21, 22]),
    ],
)
def test_schedules_are_kept_in_both_loops(schedule, active):
    """Warmup is a floor, not a shift of phase."""
    for loop in (
        lambda manager: hl.epoch_loop(rich_experiment(batches=10), epochs=3, manager=manager),
        lambda manager: hl.step_loop(rich_experiment(batches=10), steps=30, manager=manager),
    ):
        hook = Observer(HookPoint.POST_STEP, step_schedule=schedule)
        loop(hl.HookManager(hooks=[hook]))
        assert [ctx.step for ctx in hook.contexts] == active


def test_a_hook_with_windows_fires_inside_them():
    """Both bounds count; a hook without an entry for this loop never fires."""
    gated = Observer(HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)
    gated.loop_points = {"epoch": {HookPoint.POST_EPOCH: (None, 49), HookPoint.SNAPSHOT: (50, None)}}
    elsewhere = Observer(HookPoint.POST_EPOCH, name="elsewhere", loop_points={"step": {HookPoint.POST_STEP}})
    manager = hl.HookManager(hooks=[gated, elsewhere], loop_type="epoch")
    hl.epoch_loop(rich_experiment(batches=1), epochs=53, manager=manager, snapshot_every=1)
    fired = [(ctx.hook_point.name, ctx.epoch) for ctx in gated.contexts]
    assert fired == [("POST_EPOCH", epoch) for epoch in range(50)] + [("SNAPSHOT", epoch) for epoch in range(50, 53)]
    assert elsewhere.contexts == []


class Fired:
    """One firing at a snapshot, by hand, in a run that is under way: the state around it, and what it raised."""

    def __init__(self, experiment: hl.Experiment, *hooks: hl.TrainingHook, **options: Any) -> None:
        hl.epoch_loop(experiment, epochs=1)
        model, optimizer, scheduler = experiment.model, experiment.optimizer, experiment.scheduler
        self.manager = hl.HookManager(hooks=hooks, **options)
        guard = hl.guard.Guard(model, optimizer, scheduler, loader=experiment.loader)
        model_ctx = hl.ModelDataContext(model, optimizer, scheduler=scheduler, loader=experiment.loader, guard=guard)
        self.error: BaseException | None = None
        self.before = left_by(experiment)
        try:
            self.manager.fire(HookPoint.SNAPSHOT, hl.RunDataContext(HookPoint.SNAPSHOT, 0, model=model), model_ctx)
        except BaseException as error:
            self.error = error
        self.after = left_by(experiment)


class Corrupts(hl.InterventionHook):
    """Everything that an intervention can do wrong."""

    name = "corrupts"
    hook_points = {HookPoint.SNAPSHOT}
    raises: Any = None

    def __init__(self, experiment: hl.Experiment) -> None:
        self.experiment = experiment

    def intervene(self, run_ctx, model_ctx):
        experiment = self.experiment
        with torch.no_grad():
            for tensor in experiment.model.state_dict().values():
                tensor.fill_(999)
        experiment.optimizer.step()
        experiment.scheduler.step()
        experiment.model.eval()
        experiment.model[0].weight.requires_grad_(False)
        experiment.optimizer.zero_grad()
        torch.rand(7), np.random.rand(7), random.random()
        if self.raises is not None:
            raise self.raises
        return {"weight": experiment.model[0].weight.max()}


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_an_intervention_leaves_nothing_behind(error):
    """Weights, buffers, optimizer, scheduler, gradients, modes, random streams; one that raises neither.

    What it raises comes out, by default; metrics of observers of that firing are delivered.
    """
    experiment, sink = rich_experiment(), hl.sinks.MemorySink()
    hook = Corrupts(experiment)
    hook.raises = error
    fired = Fired(experiment, hook, Observer(HookPoint.SNAPSHOT), sinks=[sink])
    assert (fired.error is None) if error is None else (type(fired.error) is error)
    assert differences(fired.before, fired.after) == []
    assert sink.series("observer/count") == [(0, 1)]
    if error is None:
        assert fired.manager.get_last_metrics(HookPoint.SNAPSHOT)["corrupts/weight"] > 900


def test_the_state_that_is_compared_would_show_a_change():
    """Negative control: the same without a guard."""
    experiment = rich_experiment()
    hl.epoch_loop(experiment, epochs=1)
    before = left_by(experiment)
    Corrupts(experiment).intervene(None, None)
    changed = {name.split()[0] for name in differences(before, left_by(experiment))}
    assert changed == {name.split()[0] for name in before} - {"loader"}


def test_at_points_where_a_hook_observes_nothing_is_saved():
    """intervention_points={SNAPSHOT}: compute at POST_EPOCH, no save; any number of interventions share one save."""
    calls: list[str] = []
    guards: set[Any] = set()

    class Selective(hl.InterventionHook):
        hook_points = {HookPoint.POST_EPOCH, HookPoint.SNAPSHOT}
        intervention_points = {HookPoint.SNAPSHOT}

        def __init__(self, name):
            self.name = name

        def compute(self, ctx):
            calls.append(f"compute at {ctx.hook_point.name}, {[guard.num_saves for guard in guards]}")

        def intervene(self, run_ctx, model_ctx):
            guards.add(model_ctx.guard)
            calls.append(f"intervene at {run_ctx.hook_point.name}, {[guard.num_saves for guard in guards]}")

    manager = hl.HookManager(hooks=[Selective("one"), Selective("two")])
    assert manager.has_interventions_at(HookPoint.SNAPSHOT)
    assert not manager.has_interventions_at(HookPoint.POST_EPOCH)
    hl.epoch_loop(rich_experiment(), epochs=2, manager=manager)
    assert calls == [
        "compute at POST_EPOCH, []",
        "compute at POST_EPOCH, []",
        "intervene at SNAPSHOT, [1]",
        "intervene at SNAPSHOT, [1]",
        "compute at POST_EPOCH, [1]",
        "compute at POST_EPOCH, [1]",
        "intervene at SNAPSHOT, [2]",
        "intervene at SNAPSHOT, [2]",
    ]


def test_batch_gradients_are_those_of_autograd_and_leave_the_others_alone():
    found = []
    fails = [False]

    def loss_fn(model, batch):
        if fails[0]:
            raise ZeroDivisionError
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    class Asks(hl.InterventionHook):
        hook_points = {HookPoint.POST_STEP}

        def intervene(self, run_ctx, model_ctx):
            model, batch = model_ctx.model, run_ctx.batch_data
            held = [(p.grad, p.grad.clone()) for p in model.parameters()]
            torch.manual_seed(5)
            ours = model_ctx.compute_batch_gradients()
            torch.manual_seed(5)
            theirs = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
            found.extend(torch.equal(a, b) for a, b in zip(ours.values(), theirs, strict=True))
            fails[0] = True
            with pytest.raises(ZeroDivisionError):
                model_ctx.compute_batch_gradients(batch)
            fails[0] = False
            for parameter, (grad, value) in zip(model.parameters(), held, strict=True):
                found.append(parameter.grad is grad and torch.equal(grad, value))

    experiment = rich_experiment(batches=1)
    experiment.loss_fn = loss_fn
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[Asks()]))
    assert len(found) == 12
    assert all(found)


def test_checkpoints_of_an_intervention():
    """An unknown token is an error, discarding twice is not; a token may be used again."""
    seen = []

    class Saves(hl.InterventionHook):
        hook_points = {HookPoint.POST_EPOCH}

        def intervene(self, run_ctx, model_ctx):
            weight = model_ctx.model[0].weight
            start = weight.detach().clone()
            for full in (True, False):
                token = model_ctx.save_checkpoint(full=full)
                seen.append(token.startswith("ckpt_"))
                for _ in range(2):
                    model_ctx.apply_perturbation({"0.weight": torch.ones_like(weight)}, 2.0)
                    seen.append(torch.allclose(weight, start + 2.0))
                    model_ctx.restore_checkpoint(token)
                    seen.append(torch.equal(weight, start))
                model_ctx.discard_checkpoint(token)
                model_ctx.discard_checkpoint(token)
                with pytest.raises(ValueError, match="Unknown checkpoint token"):
                    model_ctx.restore_checkpoint(token)

    hl.epoch_loop(rich_experiment(), epochs=1, manager=hl.HookManager(hooks=[Saves()]))
    assert seen == [True] * 10


def test_shuffles_after_going_back_to_before_the_epoch_differ():
    """K of them, each another order; training goes on as if there had been none."""
    orders: list[list[float]] = []

    class Counterfactual(hl.InterventionHook):
        hook_points = {HookPoint.POST_EPOCH}
        needs_pre_epoch_state = True

        def intervene(self, run_ctx, model_ctx):
            for _ in range(3):
                model_ctx.restore_pre_epoch()
                loader = model_ctx.get_shuffled_loader()
                orders.append([row for batch in loader for row in batch[0][:, 0].tolist()])
                model_ctx.run_training_epoch(loader)

    def train(hooks):
        experiment = rich_experiment(batches=5)
        hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=hooks))
        return [p.detach() for p in experiment.model.parameters()]

    assert all(map(torch.equal, train([]), train([Counterfactual()])))
    assert len({tuple(order) for order in orders}) == 6
    assert len({tuple(sorted(order)) for order in orders}) == 1
