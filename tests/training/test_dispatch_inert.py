"""A run with hooks ends as one without: weights, optimizer state and all random streams, to the last bit."""

from __future__ import annotations

import functools
import random
import warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from helpers_hooks import observer
from helpers_training import differences, plain_step, train

import hookline as hl
from hookline.errors import HooklineWarning
from hookline.lifecycle import manager as metric_output
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint

PRE_STEP, POST_STEP = HookPoint.PRE_STEP, HookPoint.POST_STEP


def run(step):
    """Train 24 steps whose inputs depend on every random stream; what is left of the run, streams included."""
    random.seed(0)
    np.random.seed(0)

    def noisy(model, x, target):
        step(model, x + random.random() + np.random.randn() + np.random.rand(), target)

    left = train(noisy, steps=24)
    left["python"] = torch.tensor([random.random() for _ in range(8)], dtype=torch.float64)
    left["numpy"] = torch.from_numpy(np.random.randn(8))
    return left


@functools.cache
def plain_run():
    """What the run without hooks leaves."""
    return run(plain_step)


def draw(number):
    """What ten observers do to the random streams, each something else."""
    kinds = [
        lambda: torch.rand(number + 1),
        lambda: torch.randperm(7),
        lambda: torch.manual_seed(number),
        lambda: np.random.randn(number + 1),
        lambda: np.random.seed(number),
        lambda: np.random.permutation(5),
        lambda: random.random(),
        lambda: random.seed(number),
        lambda: random.shuffle(list(range(9))),
        lambda: torch.svd_lowrank(torch.rand(8, 8), q=2),
    ]
    return kinds[number]


def observed(manager):
    """A step with a manager by hand."""

    def step(model, x, target):
        manager.advance_step()
        manager.fire(PRE_STEP, lambda: RunDataContext(PRE_STEP, 0, model=model))
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        manager.fire(POST_STEP, lambda: RunDataContext(POST_STEP, 0, model=model, loss=loss))
        manager.flush_step_metrics(0)

    return step


def hooks(**attributes):
    """Ten observers that draw."""

    def act(number):
        def do(ctx):
            draw(number)()
            return {"norm": ctx.model[0].weight.norm(), "loss": ctx.loss}

        return do

    return [observer(f"hook{n}", PRE_STEP, POST_STEP, do=act(n), **attributes) for n in range(10)]


def test_ten_observers_that_draw_random_numbers_leave_the_run_as_it_is():
    """torch, NumPy and Python, before and after each step."""
    sink = MemorySink()
    assert differences(plain_run(), run(observed(HookManager(hooks=hooks(), sinks=[sink])))) == []
    assert len(sink.series("hook9/norm")) == 48


class DrawingSink(hl.MetricSink):
    """Draws from all three streams at every call, and fails at some records."""

    def __init__(self):
        self.records = 0

    def write(self, record):
        draw(self.records % 10)()
        self.records += 1
        if self.records % 5 == 0:
            raise ValueError("on purpose")

    def flush(self):
        draw(0)(), draw(3)()


def test_a_sink_that_draws_random_numbers_leaves_the_run_as_it_is(monkeypatch):
    """Also one that fails after it has drawn; without the streams kept it would be noticed (negative control)."""

    def train_beside(sink):
        manager = HookManager(hooks=hooks(), sinks=[sink])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HooklineWarning)
            left = run(observed(manager))
            manager.close()
        return left

    sink = DrawingSink()
    assert differences(plain_run(), train_beside(sink)) == []
    assert sink.records > 20
    monkeypatch.setattr(metric_output, "kept_rng", nullcontext)
    assert differences(plain_run(), train_beside(DrawingSink())) != []


class Random(TrainingHook):
    """Draws wherever it is called."""

    hook_points = {POST_STEP}
    needs_reference_weights = True

    def __init__(self):
        self.draw()

    def draw(self, *args, **kwargs):
        torch.rand(1)
        np.random.rand()
        random.random()

    compute = reset = set_run_context = set_reference_weights = load_state_dict = draw

    def state_dict(self):
        return {"something": 1}


def test_hooks_may_draw_whenever_the_manager_calls_them():
    """When they are made, reset, told of the run, given reference weights, or loaded."""

    def streams():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]

    before = streams()
    manager = HookManager(hooks=[Random], reference_weights={})
    manager.reset_all()
    manager.set_run_context(strategy="s")
    manager.load_state_dict(manager.state_dict())
    manager.advance_step()
    manager.fire(POST_STEP, RunDataContext(POST_STEP, 0))
    assert streams() == before
    manager.get_hook("Random").draw()
    assert all(one != other for one, other in zip(streams(), before, strict=True))
