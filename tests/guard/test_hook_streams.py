"""What hooks draw: other numbers at every firing, by the user's seed, and nothing of it seen by the run."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.training.checkpoints import Checkpoints


class _Bootstraps(hl.InterventionHook):
    """Draws from everything there is, with the global functions."""

    name = "bootstraps"
    hook_points = {hl.HookPoint.PRE_STEP}

    def __init__(self, act=lambda run_ctx, model_ctx: None):
        self.act = act
        self.drawn: list[tuple[Any, ...]] = []

    def intervene(self, run_ctx, model_ctx):
        self.act(run_ctx, model_ctx)
        draws = (
            tuple(np.random.permutation(20)),
            tuple(torch.randperm(20).tolist()),
            tuple(random.sample(range(20), 20)),
        )
        self.drawn.append(draws)
        return {}

    def state_dict(self):
        return {}


class _Observes(hl.TrainingHook):
    name = "observes"
    hook_points = {hl.HookPoint.POST_STEP}

    def __init__(self):
        self.drawn: list[tuple[Any, ...]] = []

    def compute(self, ctx):
        self.drawn.append((np.random.rand(), torch.rand(1).item(), random.random()))
        return {}


def _experiment(seed: int, *, dropout: float = 0.0, steps: int = 4) -> hl.Experiment:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1)]
    model = nn.Sequential(*layers)
    batches = [torch.linspace(-1, 1, 12).reshape(4, 3)] * steps
    experiment = hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches)
    experiment.loss_fn = lambda model, batch: (model(batch) + 0.01 * np.random.rand() * random.random()).square().mean()
    return experiment


def _full_batch(seed: int) -> hl.Experiment:
    """A run that draws nothing at all."""
    experiment = _experiment(seed)
    experiment.loss_fn = lambda model, batch: model(batch).square().mean()
    return experiment


def _train(experiment: hl.Experiment, *hooks: Any, epochs: int = 1, **options: Any) -> list[torch.Tensor]:
    hl.epoch_loop(experiment, epochs=epochs, manager=hl.HookManager(hooks=list(hooks)), **options)
    return [tensor.clone() for tensor in experiment.model.state_dict().values()]


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["numpy", "torch", "python"])
@pytest.mark.parametrize("make", [_Bootstraps, _Observes])
def test_a_hook_draws_other_numbers_at_every_firing(stream, make):
    """Also where the run itself draws nothing in between, so that its streams stand still."""
    hook = make()
    _train(_full_batch(0), hook)
    assert len({draws[stream] for draws in hook.drawn}) == len(hook.drawn) == 4


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["numpy", "torch", "python"])
@pytest.mark.parametrize("make", [_full_batch, _experiment])
def test_what_hooks_draw_depends_on_the_seed_and_on_nothing_else(stream, make):
    """The same seed gives the same numbers in a second run of the process; another seed gives others."""
    drawn = {}
    for run, seed in enumerate([0, 0, 1]):
        hook = _Bootstraps()
        _train(make(seed), hook)
        drawn[run] = [draws[stream] for draws in hook.drawn]
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


@pytest.mark.parametrize("make", [_full_batch, _experiment])
def test_a_resumed_run_goes_on_in_the_streams_of_its_hooks(tmp_path, make):
    """Four epochs at once, or two and then two from a checkpoint: the hooks draw the same."""
    whole, first, second = _Bootstraps(), _Bootstraps(), _Bootstraps()
    _train(make(5), whole, epochs=4)
    _train(make(5), first, epochs=2, checkpoints=Checkpoints(tmp_path))
    np.random.seed(99)
    experiment = make(6)  # seeds again, with something else
    _train(experiment, second, epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)
    assert first.drawn + second.drawn == whole.drawn


def test_going_back_to_before_the_epoch_leaves_the_runs_numpy_stream_alone():
    """The hook sees the numbers of before the epoch; the run, which draws from NumPy itself, goes on in its own."""

    class Back(_Bootstraps):
        needs_pre_epoch_state = True
        hook_points = {hl.HookPoint.POST_EPOCH}

    ends = []
    for hooks in ([], [Back(lambda run_ctx, model_ctx: model_ctx.restore_pre_epoch())]):
        experiment = _experiment(1)
        weights = _train(experiment, *hooks, epochs=5)
        ends.append((weights, np.random.rand()))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert ends[0][1] == ends[1][1]


def test_a_generator_of_the_hooks_own_is_another_one_each_time():
    """Also after going back to before the epoch, which rewinds the global streams; and the same in an equal run."""

    class Back(_Bootstraps):
        needs_pre_epoch_state = True
        hook_points = {hl.HookPoint.POST_EPOCH}

        def intervene(self, run_ctx, model_ctx):
            for _ in range(3):
                model_ctx.restore_pre_epoch()
                own = torch.randperm(20, generator=model_ctx.new_generator()).tolist()
                self.drawn.append((tuple(own), tuple(torch.randperm(20).tolist())))
            return {}

    runs = []
    for _ in range(2):
        hook = Back()
        _train(_experiment(1), hook, epochs=2)
        runs.append(hook.drawn)
    assert runs[0] == runs[1]
    assert len({own for own, _ in runs[0]}) == 6
    assert len({rewound for _, rewound in runs[0][:3]}) == 1
