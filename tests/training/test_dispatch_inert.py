"""Sinks, and hooks whenever the manager calls them, may draw random numbers: the run ends with the same bits."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import numpy as np
import torch
from helpers_loops import left_by, noting, rich_experiment
from helpers_training import differences

import hookline as hl
from hookline.lifecycle import manager as metric_output


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


def test_a_sink_that_draws_random_numbers_leaves_the_run_as_it_is(monkeypatch):
    """Also one that fails after it has drawn; without the streams kept it would be noticed (negative control)."""

    def train(*sinks):
        experiment = rich_experiment()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hl.HooklineWarning)
            manager = hl.HookManager(hooks=[noting("POST_STEP")], sinks=sinks, flush_every=1)
            hl.epoch_loop(experiment, epochs=4, manager=manager)
        return left_by(experiment)

    sink, plain = DrawingSink(), train()
    assert differences(plain, train(sink)) == []
    assert sink.records >= 20
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
