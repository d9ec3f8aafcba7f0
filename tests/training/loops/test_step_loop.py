"""step_loop: schedules and flushing as in the epoch loop, which the source's own step loop forgot."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers_loops import linear_experiment, noting
from torch import nn

import hookline as hl


def test_points_are_post_step_and_snapshot():
    """Nothing before a step; a snapshot every third step, the first included."""
    hook = noting()
    hl.step_loop(linear_experiment(2), steps=5, manager=hl.HookManager(hooks=[hook]), snapshot_every=3)
    assert hook.points == ["POST_STEP", "SNAPSHOT", "POST_STEP", "POST_STEP", "POST_STEP", "SNAPSHOT", "POST_STEP"]
    assert [ctx.step for ctx in hook.at("POST_STEP")] == [0, 1, 2, 3, 4]
    assert [ctx.step for ctx in hook.at("SNAPSHOT")] == [0, 3]
    assert [ctx.epoch for ctx in hook.at("POST_STEP")] == [0, 0, 1, 1, 2]
    assert [ctx.batch_idx for ctx in hook.at("POST_STEP")] == [0, 1, 0, 1, 0]


def test_step_metrics_go_out_at_each_snapshot_and_at_the_end():
    """All of them, once; before the snapshot's own."""
    sink, hook = hl.sinks.MemorySink(), noting("POST_STEP", "SNAPSHOT")
    hl.step_loop(linear_experiment(2), steps=6, manager=hl.HookManager(hooks=[hook], sinks=[sink]), snapshot_every=2)
    found = [(record.step, record.hook_point.name, record.metrics["noting/seen"]) for record in sink.records]
    assert {record.epoch for record in sink.records} == {None}
    assert found == [
        (0, "POST_STEP", [1]),
        (0, "SNAPSHOT", 2),
        (2, "POST_STEP", [3, 4]),
        (2, "SNAPSHOT", 5),
        (4, "POST_STEP", [6, 7]),
        (4, "SNAPSHOT", 8),
        (5, "POST_STEP", [9]),
    ]


def test_evaluation_comes_before_the_first_step_and_at_snapshots():
    """The first is reported apart, as there is a snapshot at step 0 as well."""
    sink, hook = hl.sinks.MemorySink(), noting("SNAPSHOT")
    values = iter(range(9))
    experiment = linear_experiment(2, evaluate=lambda model: {"val_acc": next(values)})
    manager = hl.HookManager(hooks=[hook], sinks=[sink])
    result = hl.step_loop(experiment, steps=5, manager=manager, snapshot_every=2)
    assert sink.series("initial/val_acc") == [(0, 0)]
    assert sink.series("eval/val_acc") == [(0, 1), (2, 2), (4, 3)]
    assert [ctx.val_acc for ctx in hook.contexts] == [1.0, 2.0, 3.0]
    assert result.metrics == {"val_acc": 3}


def test_what_a_step_tells_of_itself_goes_to_the_sinks():
    """With the metrics of steps; an accuracy is in the context as well, the loss there alone."""
    sink, hook = hl.sinks.MemorySink(), noting("POST_STEP")
    experiment = linear_experiment(2)
    experiment.train_step = lambda batch: {"loss": torch.tensor(0.5), "train_acc": 0.75, "tokens": 8}
    manager = hl.HookManager(hooks=[hook], sinks=[sink])
    hl.step_loop(experiment, steps=2, manager=manager, snapshot_every=5)
    assert sink.series("train/tokens") == [(0, [8]), (1, [8])]
    assert "train/loss" not in sink.latest
    assert [(ctx.loss, ctx.train_acc) for ctx in hook.contexts] == [(0.5, 0.75)] * 2


def test_the_scheduler_steps_with_the_steps_that_were_trained():
    """By default; a step that gives False was none, one that has no loss to tell was one."""
    experiment = linear_experiment(2)
    experiment.scheduler = torch.optim.lr_scheduler.LambdaLR(experiment.optimizer, lambda step: 1 / (1 + step))
    results = iter([1.0, False, None])
    hook = noting("POST_STEP")

    def train_step(batch):
        experiment.optimizer.step()
        return next(results)

    experiment.train_step = train_step
    hl.step_loop(experiment, steps=3, manager=hl.HookManager(hooks=[hook]))
    assert [ctx.lr for ctx in hook.contexts] == pytest.approx([0.05, 0.05, 0.1 / 3])
    assert [ctx.loss for ctx in hook.contexts] == [1.0, None, None]


def test_early_stop_is_asked_after_every_step():
    """With the loss where it is."""
    experiment = linear_experiment(2, should_stop=lambda step, metrics: step == 2 and metrics["loss"] is not None)
    result = hl.step_loop(experiment, steps=9)
    assert (result.steps, result.epochs, result.stopped_early) == (3, 2, True)
    assert isinstance(result.loss, float)


def test_mean_gradients_are_those_since_the_last_snapshot():
    """In a loop without epochs."""
    hook = noting("SNAPSHOT", needs_grads=True)
    seen = []

    class Grads(type(hook)):
        name = "grads"
        hook_points = {hl.HookPoint.POST_STEP}

        def compute(self, ctx):
            seen.append(ctx.model.weight.grad.clone())

    manager = hl.HookManager(hooks=[hook, Grads()])
    hl.step_loop(linear_experiment(2), steps=6, manager=manager, snapshot_every=2)
    for (first, last), ctx in zip(pairwise([-1, 0, 2, 4]), hook.contexts, strict=True):
        expected = torch.stack(seen[first + 1 : last + 1]).mean(0)
        torch.testing.assert_close(ctx.accumulated_grads["weight"], expected, atol=1e-6, rtol=0)


def test_a_run_without_data_makes_steps_all_the_same():
    """train_step(None), if it brings its own."""
    model, batches = nn.Linear(1, 1), []
    experiment = hl.Experiment(model, train_step=lambda batch: batches.append(batch))
    assert hl.step_loop(experiment, steps=3).steps == 3
    assert batches == [None] * 3


def test_a_scheduler_that_counts_epochs_has_no_place_here():
    with pytest.raises(hl.errors.OptionError, match="no epochs to count"):
        hl.step_loop(linear_experiment(2, scheduler_per="epoch"), steps=1)


def test_a_resumed_run_goes_on_counting():
    """The manager's step and the loop's have to agree."""
    hook = noting("POST_STEP")
    manager = hl.HookManager(hooks=[hook])
    hl.step_loop(linear_experiment(2), steps=3, manager=manager)
    hl.step_loop(linear_experiment(2), steps=5, first_step=3, manager=manager)
    assert [ctx.step for ctx in hook.contexts] == [0, 1, 2, 3, 4]
    with pytest.raises(hl.errors.OptionError, match=r"first_step=9.* step 4"):
        hl.step_loop(linear_experiment(2), steps=10, first_step=9, manager=manager)
