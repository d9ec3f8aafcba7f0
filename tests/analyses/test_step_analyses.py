"""Analyses that look at every step, against the same run worked out in float64; a watch that lives as long."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers_analyses import context, cos, flat, made, random_grads, token_experiment
from torch import nn

import hookline as hl

POST_STEP, POST_EPOCH, SNAPSHOT = hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH, hl.HookPoint.SNAPSHOT


def step(hook, model, grads=None, **given):
    """One step: gradients lie in ``.grad``."""
    for name, parameter in model.named_parameters():
        parameter.grad = None if grads is None else grads[name]
    return hook.compute(context(model, POST_STEP, **given))


def test_batch_dynamics_against_all_pairs_of_gradients_wherever_reports_fall(model):
    """45 steps, 24 kept, multiplied 16 at a time; reports after 7, 12, 20, 21 and 45 of them.

    Lags over all steps since the last report, efficiency and rank over the newest eight.
    """
    hook = made("batch_dynamics", max_lag=8, lags=[1, 3, 8, 20], windows=[2, 5, 8, 9])
    assert (hook.lags, hook.windows) == ([1, 3, 8], [2, 5, 8])
    rows, start = [], 0
    for end in (7, 12, 20, 21, 45):
        for seed in range(start, end):
            grads = random_grads(model, seed)
            rows.append(flat(grads))
            assert step(hook, model, grads) is None
        found = hook.compute(context(model, POST_EPOCH))
        cosines = {lag: [cos(rows[t], rows[t - lag]) for t in range(max(start, lag), end)] for lag in (1, 3, 8)}
        assert {lag for lag in cosines if f"lag_{lag}" in found} == {lag for lag, each in cosines.items() if each}
        means = {lag: np.mean(each) for lag, each in cosines.items() if each}
        assert {lag: found[f"lag_{lag}"] for lag in means} == pytest.approx(means, rel=1e-4)
        assert found["autocorrelation_mean"] == pytest.approx(np.mean(list(means.values())), rel=1e-4)
        shares = np.linalg.svd(np.stack(rows[-8:]), compute_uv=False) ** 2
        shares /= shares.sum()
        assert found["effective_rank"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-4)
        assert found["top1_variance"] == pytest.approx(shares[0], rel=1e-4)
        for size in (size for size in hook.windows if size <= len(rows)):
            newest = np.stack(rows[-size:])
            expected = np.linalg.norm(newest.sum(0)) / np.linalg.norm(newest, axis=1).sum()
            assert found[f"efficiency_{size}"] == pytest.approx(expected, rel=1e-4)
        start = end


# -- path_length, parameter_delta ----------------------------------------------------------------------------


def test_path_length_on_a_known_path():
    """A square of side 3 and 4: 3 east, 4 north, 3 west; then home."""
    model = nn.Linear(2, 1, bias=False)
    hook = made("path_length")
    corners = [(0.0, 0.0), (3.0, 0.0), (3.0, 4.0), (0.0, 4.0), (0.0, 0.0)]
    expected = [(0, 0, 1), (3, 3, 1), (7, 5, 5 / 7), (10, 4, 0.4), (14, 0, 0)]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([corners[0]]))
    hook.start(model)
    for corner, (way, distance, efficiency) in zip(corners, expected, strict=True):
        with torch.no_grad():
            model.weight.copy_(torch.tensor([corner]))
        assert hook.compute(context(model, POST_STEP)) is None
        found = hook.compute(context(model, POST_EPOCH))
        assert found["path_length"].item() == pytest.approx(way)
        assert found["net_displacement"].item() == pytest.approx(distance)
        assert found["path_efficiency"].item() == pytest.approx(efficiency)


def test_parameter_delta_since_the_last_report():
    """Nothing the first time; from zero, the share is 0 and not a division by it."""
    model, hook = nn.Linear(2, 1), made("parameter_delta")
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert hook.compute(context(model)) is None
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    found = hook.compute(context(model))
    assert [found[name].item() for name in ("relative_delta", "absolute_delta", "param_norm")] == [0, 5, 5]
    with torch.no_grad():
        model.bias.fill_(12.0)
    found = hook.compute(context(model))
    assert [found[name].item() for name in ("relative_delta", "absolute_delta", "param_norm")] == pytest.approx(
        [2.4, 12, 13]
    )


def test_training_diagnostics_against_the_same_numbers(model):
    """Seventy steps, more than there was room for at first; then it begins anew."""
    hook, random = made("training_diagnostics"), np.random.default_rng(0)
    losses, norms, ratios = random.normal(2, 0.3, 70).cumsum(), [], []
    weight = np.sqrt(sum((p.detach().double().numpy() ** 2).sum() for p in model.parameters()))
    for seed, loss in enumerate(losses):
        grads = random_grads(model, seed)
        norms.append(np.sqrt(sum((grad.double().numpy() ** 2).sum() for grad in grads.values())))
        ratios.append(0.01 * norms[-1] / weight)
        step(hook, model, grads, loss=torch.tensor(loss) if seed % 2 else float(loss), lr=0.01)
    found = hook.compute(context(model, POST_EPOCH))
    assert found["loss_mean"] == pytest.approx(losses.mean(), rel=1e-6)
    assert found["loss_std"] == pytest.approx(losses.std(ddof=1), rel=1e-5)
    assert found["loss_volatility"] == pytest.approx(losses.std(ddof=1) / losses.mean(), rel=1e-5)
    away = losses - losses.mean()
    expected = (away[:-1] * away[1:]).sum() / (losses.var(ddof=1) * 69)
    assert found["loss_autocorrelation"] == pytest.approx(expected, rel=1e-5)
    assert found["grad_norm_mean"] == pytest.approx(np.mean(norms), rel=1e-6)
    assert found["grad_norm_std"] == pytest.approx(np.std(norms, ddof=1), rel=1e-4)
    assert found["grad_norm_cv"] == pytest.approx(np.std(norms, ddof=1) / np.mean(norms), rel=1e-4)
    assert found["grad_norm_max"] == pytest.approx(max(norms), rel=1e-6)
    assert found["update_ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-6)
    assert found["update_ratio_std"] == pytest.approx(np.std(ratios, ddof=1), rel=1e-4)
    assert found["weight_norm"] == pytest.approx(weight, rel=1e-6)
    assert hook.compute(context(model, POST_EPOCH)) is None


# -- in a run ------------------------------------------------------------------------------------------------


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
