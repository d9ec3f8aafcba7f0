"""The built-in interventions on a GPU: figures as on the CPU, every kind of Adam, no trace left; else skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_analyses import by_epoch, by_step
from torch import nn

import hookline as hl
from hookline.analyses.interventions import (
    AdamDynamicsHook,
    CounterfactualHook,
    CounterfactualValidatorHook,
    HessianHook,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def make_experiment(device: str = "cuda", *, dropout: float = 0.3, dtype: Any = None, **options: Any) -> hl.Experiment:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 4))
    data = [(torch.randn(32, 16), torch.randint(4, (32,))) for _ in range(8)]
    model.to(device, dtype)
    moved = [(x.to(device, dtype), y.to(device)) for x, y in data]
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | options))
    return hl.Experiment(model, optimizer, moved, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))


def hooks() -> list[hl.TrainingHook]:
    return [
        HessianHook(every_n_steps=5, burst_length=4),
        AdamDynamicsHook(every_n_steps=5, burst_length=4),
        CounterfactualHook(k=2),
        CounterfactualValidatorHook(k=1),
    ]


def run(experiment: hl.Experiment, used: list[hl.TrainingHook], **options: Any) -> hl.sinks.MemorySink:
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=used, sinks=[sink], **options) if used else None
    torch.manual_seed(1)
    hl.epoch_loop(experiment, epochs=3, manager=manager)
    return sink


def left_by(experiment: hl.Experiment) -> list[torch.Tensor]:
    states = [torch.as_tensor(v) for s in experiment.optimizer.state.values() for v in s.values()]
    streams = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    return [t.clone() for t in (*experiment.model.state_dict().values(), *states, *streams)]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True, "amsgrad": True}])
@pytest.mark.parametrize("offload", [False, True])
def test_no_trace_is_left(options, offload):
    plain, hooked = make_experiment(**options), make_experiment(**options)
    run(plain, [])
    expected = left_by(plain)
    reference = {name: p.detach().cpu() + 1.0 for name, p in plain.model.named_parameters()}
    sink = run(hooked, hooks(), offload_state=offload, reference_weights=reference)
    assert all(torch.equal(a, b) for a, b in zip(expected, left_by(hooked), strict=True))
    assert len(by_step(sink, "hessian")) > 5
    assert len(by_step(sink, "adam_dynamics")) > 5
    assert len(by_epoch(sink, "counterfactual")) == len(by_epoch(sink, "counterfactual_validator")) == 3


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"amsgrad": True}])
def test_figures_are_those_of_the_cpu(options):
    # A capturable Adam corrects its moments by a count in float32, so that the runs themselves part.
    relative, absolute = (1e-3, 1e-4) if "capturable" in options else (1e-5, 1e-8)
    on_cpu = {key: value for key, value in options.items() if key != "capturable"}
    here = run(make_experiment("cpu", dropout=0.0, dtype=torch.float64, **on_cpu), hooks())
    there = run(make_experiment("cuda", dropout=0.0, dtype=torch.float64, **options), hooks())
    for hook, read in (("hessian", by_step), ("adam_dynamics", by_step), ("counterfactual", by_epoch)):
        first, second = read(here, hook), read(there, hook)
        assert first.keys() == second.keys()
        for moment, metrics in first.items():
            assert second[moment] == pytest.approx(metrics, rel=relative, abs=absolute)
