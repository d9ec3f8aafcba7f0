"""Whatever ends a loop (an error, Ctrl-C, a hook), the run is left as it was and what hooks returned is written."""

from __future__ import annotations

import pytest
import torch
from helpers_loops import linear_experiment, noting

import hookline as hl


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


def test_an_interrupted_intervention_leaves_the_run_where_it_was():
    """After four steps: the weights are those of four steps, and what hooks had returned is written."""

    class Interrupted(hl.InterventionHook):
        hook_points = {hl.HookPoint.POST_STEP}

        def intervene(self, run_ctx, model_ctx):
            model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
            if run_ctx.step == 3:
                raise KeyboardInterrupt
            return {"step": run_ctx.step}

    experiment, expected, sink = linear_experiment(3), linear_experiment(3), hl.sinks.MemorySink()
    with pytest.raises(KeyboardInterrupt):
        hl.epoch_loop(experiment, epochs=9, manager=hl.HookManager(hooks=[Interrupted()], sinks=[sink]))
    hl.step_loop(expected, steps=4)
    assert torch.equal(experiment.model.weight, expected.model.weight)
    assert torch.equal(experiment.model.weight.grad, expected.model.weight.grad)
    assert sink.series("Interrupted/step") == [(0, [0, 1, 2])]
