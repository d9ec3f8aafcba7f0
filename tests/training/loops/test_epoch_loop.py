"""epoch_loop: the order of its points, what hooks are shown there, and how it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_loops import Noting, linear_experiment, noting
from torch import nn

import hookline as hl


def test_steps_are_counted_from_0_over_the_whole_run():
    """Context, manager and schedule agree; at the end of an epoch it is the last step, before the first none."""
    hook = noting(step_schedule=hl.StepSchedule("stride", stride=2))
    manager = hl.HookManager(hooks=[hook])
    seen = []
    experiment = linear_experiment(3)
    experiment.train_step = lambda batch: seen.append(manager.global_step)
    hl.epoch_loop(experiment, epochs=2, manager=manager)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [ctx.step for ctx in hook.at("PRE_STEP")] == [ctx.step for ctx in hook.at("POST_STEP")] == [0, 2, 4]
    assert [ctx.step for ctx in hook.at("PRE_EPOCH")] == [None, 2]
    assert [ctx.step for ctx in hook.at("POST_EPOCH")] == [ctx.step for ctx in hook.at("SNAPSHOT")] == [2, 5]
    assert [ctx.epoch for ctx in hook.at("SNAPSHOT")] == [0, 1]


def test_contexts_have_what_applies_and_nothing_else():
    """The batch at steps, the loss after them, means and accuracies at the end of the epoch."""
    config = SimpleNamespace(snapshot_every=1, depth=2)
    experiment = linear_experiment(
        3, config=config, evaluate=lambda model: {"train_acc": 0.5, "val_acc": torch.tensor(0.25)}
    )
    hook = noting()
    manager = hl.HookManager(hooks=[hook])
    hl.epoch_loop(experiment, epochs=1, manager=manager)
    for ctx in hook.contexts:
        assert ctx.model is experiment.model
        assert ctx.config is config
        assert ctx.loader is experiment.loader
        assert ctx.lr == 0.1
        assert ctx.profiler is manager.profiler
        assert ctx.accumulated_grads is ctx.prev_step_grads is ctx.target_grad is None
    start, before, after, end = (hook.at(name)[0] for name in ("PRE_EPOCH", "PRE_STEP", "POST_STEP", "POST_EPOCH"))
    assert start.batch_data is start.batch_idx is start.loss is start.val_acc is None
    assert before.batch_data is experiment.loader[0]
    assert before.loss is None
    assert (after.batch_idx, after.batch_data) == (0, experiment.loader[0])
    assert [ctx.batch_idx for ctx in hook.at("PRE_STEP")] == [0, 1, 2]
    losses = [ctx.loss for ctx in hook.at("POST_STEP")]
    assert end.loss == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert end.batch_data is end.batch_idx is None
    assert (end.train_acc, end.val_acc) == (0.5, 0.25)


def test_snapshots_follow_the_configuration_unless_the_loop_is_told():
    """config.snapshot_every, as an attribute or a key; 0 is never."""

    def epochs_of(config: Any, **options: Any) -> list[int]:
        hook = noting("SNAPSHOT", "PRE_EPOCH")
        hl.epoch_loop(linear_experiment(1, config=config), epochs=7, manager=hl.HookManager(hooks=[hook]), **options)
        return [ctx.epoch for ctx in hook.at("SNAPSHOT")]

    assert epochs_of(SimpleNamespace(snapshot_every=3)) == [0, 3, 6]
    assert epochs_of({"snapshot_every": 4}) == [0, 4]
    assert epochs_of({"snapshot_every": 4}, snapshot_every=5) == [0, 5]
    assert epochs_of(None, snapshot_every=0) == []
    assert epochs_of(None) == list(range(7))


def test_evaluation_comes_every_so_often_and_at_snapshots():
    """What was not evaluated in this epoch is not shown as if it had been."""
    evaluated: list[int] = []
    hook = noting("PRE_EPOCH", "POST_EPOCH")
    experiment = linear_experiment(
        1, evaluate=lambda model: evaluated.append(hook.contexts[-1].epoch) or {"val_acc": 1.0}
    )
    hl.epoch_loop(experiment, epochs=9, manager=hl.HookManager(hooks=[hook]), eval_every=4, snapshot_every=3)
    assert evaluated == [0, 3, 4, 6, 8]
    assert [ctx.epoch for ctx in hook.at("POST_EPOCH") if ctx.val_acc is not None] == evaluated


def test_hooks_start_anew_with_each_run_and_go_on_with_a_resumed_one():
    """reset_all, unless the first epoch is a later one; sinks and hooks are told of the run."""

    class Counting(Noting):
        resets = 0
        told: Any = None

        def reset(self):
            self.resets += 1

        def set_run_context(self, **context):
            self.told = context

    hook = Counting()
    hook.hook_points = {hl.HookPoint.POST_STEP}
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[hook], sinks=[sink])
    for _ in range(2):
        hl.epoch_loop(linear_experiment(2), epochs=2, manager=manager, run_context={"strategy": "plain"})
    assert hook.resets == 2
    assert hook.told == {"strategy": "plain"}
    assert sink.records[0].context == {"strategy": "plain"}
    assert [ctx.step for ctx in hook.contexts] == [0, 1, 2, 3] * 2
    hl.epoch_loop(linear_experiment(2), epochs=3, first_epoch=2, manager=manager)
    assert hook.resets == 2
    assert (hook.contexts[-1].epoch, hook.contexts[-1].step) == (2, 5)


def test_a_hook_that_will_never_fire_is_named_at_the_start():
    """With the points that it waits for; one that fires elsewhere as well is not."""
    silent = noting("SNAPSHOT")
    silent.name = "silent"
    manager = hl.HookManager(hooks=[silent, noting("SNAPSHOT", "POST_EPOCH")])
    with pytest.warns(hl.HooklineWarning, match="'silent' will not fire: it waits for SNAPSHOT") as caught:
        hl.epoch_loop(linear_experiment(1), epochs=1, manager=manager, snapshot_every=0)
    assert len(caught) == 1
    assert "noting" not in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_model_that_arrives_in_evaluation_mode_is_trained_in_training_mode():
    """As those of Hugging Face do; parts of a training model that were frozen on purpose stay as they are."""
    modes = []
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    experiment = hl.Experiment(model, torch.optim.SGD(model.parameters()), [None])
    experiment.train_step = lambda batch: modes.append((model.training, model[1].training))
    model.eval()
    hl.epoch_loop(experiment, epochs=1)
    model[1].eval()
    hl.epoch_loop(experiment, epochs=1)
    assert modes == [(True, True), (True, False)]


def test_a_loader_that_gives_nothing_is_an_error():
    """Empty, or an iterator that is used up."""
    experiment = linear_experiment(2)
    experiment.loader = iter(experiment.loader)
    with pytest.raises(hl.errors.OptionError, match="no batch in epoch 1: is it empty"):
        hl.epoch_loop(experiment, epochs=2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_the_run_everything_is_written(error):
    """The steps of the epoch that was cut short are in the sink, and it is flushed."""

    class Flushed(hl.sinks.MemorySink):
        flushes = 0

        def flush(self):
            self.flushes += 1

    sink, hook = Flushed(), noting("POST_STEP")
    experiment = linear_experiment(3)
    trained = []

    def train_step(batch):
        trained.append(batch)
        if len(trained) == 6:
            raise error
        return 1.0

    experiment.train_step = train_step
    with pytest.raises(error):
        hl.epoch_loop(experiment, epochs=9, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    assert sink.series("noting/seen") == [(0, [1, 2, 3]), (1, [4, 5])]
    assert sink.flushes == 1
