"""What holds for every built-in intervention: it leaves no trace, fires when due, and describes its metrics."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from helpers_analyses import GPU, INTERVENTIONS, by_epoch, by_step, made
from helpers_loops import left_by, rich_experiment
from helpers_training import differences
from torch import Tensor, nn

import hookline as hl

CASES: dict[str, dict[str, Any]] = {
    "hessian": {"every_n_steps": 5, "burst_length": 4},
    "hessian by difference": {"every_n_steps": 5, "burst_length": 4, "method": "difference"},
    "adam_dynamics": {"every_n_steps": 10, "burst_length": 3},
    "counterfactual": {"k": 2},
    "counterfactual_validator": {"k": 1},
}
DUE = {"adam_dynamics": [10, 11, 12, 20, 21, 22]}
"""Of 25 steps, those at which it reports."""


def target_gradient(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Takes a forward and a backward of its own."""
    model.zero_grad()
    model(torch.randn(5, 6)).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def trained(loop: str, *hooks: hl.TrainingHook, **options: Any) -> tuple[dict[str, Tensor], Any, hl.HookManager | None]:
    """Train 25 steps through dropout and BatchNorm; what is left, what was reported, and the manager."""
    experiment, sink, manager = (
        rich_experiment(target_gradient=target_gradient, evaluate=None),
        hl.sinks.MemorySink(),
        None,
    )
    if hooks:
        reference = {name: p.detach() + 1.0 for name, p in experiment.model.named_parameters()}
        manager = hl.HookManager(hooks=list(hooks), sinks=[sink], reference_weights=reference, **options)
    if loop == "epoch":
        hl.epoch_loop(experiment, epochs=5, manager=manager)
    else:
        hl.step_loop(experiment, steps=25, manager=manager)
    return left_by(experiment), sink, manager


@functools.cache
def bare(loop: str) -> dict[str, Tensor]:
    """What a run without hooks leaves."""
    return trained(loop)[0]


def test_there_is_a_case_for_each() -> None:
    """One that is added cannot be forgotten."""
    assert {case.partition(" ")[0] for case in CASES} == set(INTERVENTIONS)


@pytest.mark.product(case=list(CASES), loop=["epoch", "step"], offload=[False, True])
def test_a_run_with_it_is_the_run_without_and_reports_when_due(case: str, loop: str, offload: bool) -> None:
    """Weights, buffers, gradients, optimizer and random streams, to the last bit; every metric is described."""
    name = case.partition(" ")[0]
    hook = made(name, **CASES[case])
    left, sink, manager = trained(loop, hook, offload_state=offload)
    assert differences(bare(loop), left) == []
    if name.startswith("counterfactual"):  # the step loop has no epoch to train again
        assert manager.hooks.fired[name] == (5 if loop == "epoch" else 0)
    else:
        assert sorted(by_step(sink, name)) == DUE.get(name, sorted(by_step(sink, name)))
        assert manager.hooks.fired[name] >= 4
    found = {key.removeprefix(f"{name}/") for record in sink.records for key in record.metrics}
    if found:
        described = {re.sub(r"\\\{\w+\\\}", ".+", re.escape(info.name)) for info in hook.describe_metrics()}
        assert not [metric for metric in found if not any(re.fullmatch(pattern, metric) for pattern in described)]
        assert not [pattern for pattern in described if not any(re.fullmatch(pattern, metric) for metric in found)]
        assert all(info.description for info in hook.describe_metrics())


def test_a_perturbation_without_a_guard_would_show() -> None:
    """The control: what interventions do to the weights, done by an observer, changes the run."""

    class Unguarded(hl.TrainingHook):
        hook_points = {hl.HookPoint.POST_STEP}

        def compute(self, ctx):
            with torch.no_grad():
                ctx.model[0].weight.mul_(1 + 1e-7)

    assert "weight 0.weight" in differences(bare("epoch"), trained("epoch", Unguarded())[0])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("hessian", {"epsilon": 0}, "epsilon="),
        ("hessian", {"epsilon": "small"}, "epsilon="),
        ("hessian", {"method": "forward"}, "one of exact, difference"),
        ("hessian", {"burst_length": 0}, "burst_length="),
        ("hessian", {"every_n_steps": 2.5}, "every_n_steps="),
        ("adam_dynamics", {"burst_length": 0}, "burst_length="),
        ("adam_dynamics", {"every_n_steps": "often"}, "every_n_steps="),
        ("counterfactual", {"k": 0}, "k="),
        ("counterfactual", {"k": 1.5}, "k="),
        ("counterfactual_validator", {"k": 0}, "k="),
        ("counterfactual_validator", {"k": 1.5}, "k="),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    """When the hook is made; the message names the option."""
    with pytest.raises(hl.errors.OptionError, match=words):
        made(name, **options)


def run_all(
    device: str, hooked: bool = True, *, adam: Any, dropout: float = 0.3, dtype: Any = None, **options: Any
) -> tuple[hl.Experiment, hl.sinks.MemorySink]:
    """Train three epochs with some kind of Adam, with all interventions or none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 4))
    data = [(torch.randn(32, 16).to(dtype), torch.randint(4, (32,))) for _ in range(8)]
    optimizer = torch.optim.AdamW(model.to(device, dtype).parameters(), lr=1e-2, **adam)
    experiment, sink = hl.Experiment(model, optimizer, data), hl.sinks.MemorySink()
    hooks = [made(name, **CASES[name]) for name in INTERVENTIONS]
    manager = hl.HookManager(hooks=hooks, sinks=[sink], **options) if hooked else None
    torch.manual_seed(1)
    hl.epoch_loop(experiment, epochs=3, manager=manager)
    return experiment, sink


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("adam", [{}, {"fused": True}, {"capturable": True}, {"foreach": True, "amsgrad": True}])
@pytest.mark.parametrize("offload", [False, True])
def test_no_trace_is_left_on_a_gpu(device: str, adam: Any, offload: bool) -> None:
    plain, _ = run_all(device, False, adam=adam)
    expected = left_by(plain) | {"device": torch.cuda.get_rng_state()}
    reference = {name: p.detach().cpu() + 1.0 for name, p in plain.model.named_parameters()}
    hooked, sink = run_all(device, adam=adam, offload_state=offload, reference_weights=reference)
    assert differences(expected, left_by(hooked) | {"device": torch.cuda.get_rng_state()}) == []
    assert min(len(by_step(sink, name)) for name in ("hessian", "adam_dynamics")) >= 6
    assert len(by_epoch(sink, "counterfactual")) == len(by_epoch(sink, "counterfactual_validator")) == 3


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("adam", [{}, {"fused": True}, {"capturable": True}, {"amsgrad": True}])
def test_figures_are_those_of_the_cpu(device: str, adam: Any) -> None:
    # A capturable Adam corrects its moments by a count in float32, so that the runs themselves part.
    relative, absolute = (1e-3, 1e-4) if "capturable" in adam else (1e-5, 1e-8)
    on_cpu = {key: value for key, value in adam.items() if key != "capturable"}
    _, here = run_all("cpu", adam=on_cpu, dropout=0.0, dtype=torch.float64)
    _, there = run_all(device, adam=adam, dropout=0.0, dtype=torch.float64)
    for hook, read in (("hessian", by_step), ("adam_dynamics", by_step), ("counterfactual", by_epoch)):
        first, second = read(here, hook), read(there, hook)
        assert first.keys() == second.keys()
        for moment, metrics in first.items():
            assert second[moment] == pytest.approx(metrics, rel=relative, abs=absolute)
