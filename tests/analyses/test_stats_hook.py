"""``stats``: a watch that lives as long as the run does, and reports with it."""

from __future__ import annotations

import math

import torch
from helpers_analyses import made, token_experiment

import hookline as hl


def run(hook, loop=hl.epoch_loop, experiment=None, **length):
    """What reached the sink, and the experiment."""
    experiment, sink = experiment or token_experiment(), hl.sinks.MemorySink()
    loop(experiment, manager=hl.HookManager(hooks=[hook], sinks=[sink]), **(length or {"epochs": 2}))
    return sink, experiment


def test_statistics_are_those_of_a_watch_by_hand():
    """The same run twice: every metric of the second epoch is what a watch says that was on all the time."""
    sink, _ = run(made("stats", every=1))
    experiment = token_experiment()
    by_hand = hl.watch(experiment.model, stats=("mean", "std", "norm", "absmax", "zero_fraction", "nonfinite"))
    hl.epoch_loop(experiment, epochs=1)
    by_hand.reset()
    hl.epoch_loop(experiment, epochs=2, first_epoch=1)
    expected = by_hand.to_metrics()
    by_hand.remove()
    assert expected.keys() >= {
        "hidden/forward/mean",
        "hidden/backward/norm",
        "hidden.weight/param/absmax",
        "embedding.weight/param_grad/zero_fraction",
        "forward/std",
    }
    assert {name: sink.latest[f"stats/{name}"] for name in expected} == expected


def test_only_due_steps_count_and_evaluation_does_not():
    """Five steps an epoch, every second one, counted through: 0, 2, 4, then 6, 8."""

    class Fires(type(made("stats"))):
        seen: list[int] = []

        def compute(self, ctx):
            self.seen.append(self._watch.report()["fired"]["hidden/forward"])
            return super().compute(ctx)

    hook = Fires(every=2)
    run(hook)
    assert hook.seen == [3, 2]


def test_nan_is_told_by_the_layer_that_had_it():
    """And counted over all."""
    experiment = token_experiment()
    with torch.no_grad():
        experiment.model.hidden.weight[0, 0] = math.nan
    sink, _ = run(made("stats", every=1), experiment=experiment, epochs=1)
    assert sink.latest["stats/hidden/forward/nonfinite"] == 5
    assert sink.latest["stats/norm/forward/nonfinite"] < 5
    assert sink.latest["stats/nonfinite"] > 5
    assert math.isnan(sink.latest["stats/max_forward"])
