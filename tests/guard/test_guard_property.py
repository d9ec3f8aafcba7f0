"""Whatever an intervention does, in whatever order, and however it ends: afterwards nothing is otherwise.

A few hundred cases; ``HOOKLINE_GUARD_CASES=5000`` draws as many for each test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers_guard import OPTIMIZERS, Run, differing, portrait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from hookline.guard.guard import Guard

CASES = int(os.environ.get("HOOKLINE_GUARD_CASES", "60"))


def _parameter(run: Run, pick: int) -> nn.Parameter:
    parameters = list(run.model.parameters())
    return parameters[pick % len(parameters)]


def _buffer(run: Run, pick: int) -> torch.Tensor:
    buffers = list(run.model.buffers())
    return buffers[pick % len(buffers)]


def _write(run: Run, pick: int) -> None:
    with torch.no_grad():
        _parameter(run, pick).mul_(3).add_(pick)


def _write_data(run: Run, pick: int) -> None:
    _parameter(run, pick).data.fill_(999)


def _set_data(run: Run, pick: int) -> None:
    parameter = _parameter(run, pick)
    parameter.data = torch.zeros(pick % 5 + 1, dtype=torch.float64)


def _write_numpy(run: Run, pick: int) -> None:
    buffer = run.model.norm.running_mean
    if buffer.dtype is torch.float32:
        buffer.numpy()[:] = pick


def _write_buffer(run: Run, pick: int) -> None:
    buffer = _buffer(run, pick)
    buffer.add_(1)


def _write_buffer_with_graph(run: Run, pick: int) -> None:
    name = ("scale", "half_of_scale", "norm.running_var")[pick % 3]  # the second is a view of the first
    run.model.get_buffer(name).mul_(run.model.norm.weight.sum())


def _parametrize(run: Run, pick: int) -> None:
    parametrize.register_parametrization(run.model.head, ("weight", "bias")[pick % 2], nn.Tanh())
    if pick % 3 == 0:
        parametrize.remove_parametrizations(run.model.head, ("weight", "bias")[pick % 2])


def _inference(run: Run, pick: int) -> None:
    with torch.inference_mode():
        run.model(torch.randn(4, 5, dtype=run.dtype))
        _parameter(run, pick).mul_(2)
        run.model.fresh = torch.ones(2)


def _write_grad(run: Run, pick: int) -> None:
    grad = _parameter(run, pick).grad
    if grad is not None:
        grad.zero_().add_(7)


def _drop_grad(run: Run, pick: int) -> None:
    _parameter(run, pick).grad = None


def _new_grad(run: Run, pick: int) -> None:
    parameter = _parameter(run, pick)
    parameter.grad = torch.ones_like(parameter)


def _write_state(run: Run, pick: int) -> None:
    for state in list(run.optimizer.state.values())[: pick % 3 + 1]:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def _clear_state(run: Run, pick: int) -> None:
    run.optimizer.state.clear()


def _replace_state(run: Run, pick: int) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def _add_group(run: Run, pick: int) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})


def _replace_parameter(run: Run, pick: int) -> None:
    run.model.head.weight = nn.Parameter(torch.zeros(5, 6, dtype=run.dtype))


def _delete(run: Run, pick: int) -> None:
    if hasattr(run.model.head, "bias"):
        del run.model.head.bias


def _delete_buffer(run: Run, pick: int) -> None:
    run.model._buffers.pop("scale", None)


def _new_attribute(run: Run, pick: int) -> None:
    run.model.anything = torch.ones(3)
    run.model.norm.momentum = 0.5
    run.model.history.append(pick)
    run.model.history[1].zero_()


def _new_module(run: Run, pick: int) -> None:
    run.model.add_module(f"new_{pick % 3}", nn.Linear(2, 2))


def _attribute_of_parameter(run: Run, pick: int) -> None:
    _parameter(run, pick).mark = "seen"


def _hooks(run: Run, pick: int) -> None:
    run.model.head.register_forward_hook(lambda *args: None)
    run.model.embed.weight.register_hook(lambda grad: grad * 2)
    run.model.norm.register_full_backward_hook(lambda *args: None)


def _freeze(run: Run, pick: int) -> None:
    _parameter(run, pick).requires_grad_(pick % 2 == 0)


def _draw(run: Run, pick: int) -> None:
    torch.rand(pick % 7 + 1)
    np.random.standard_normal(pick % 3 + 1)
    random.gauss(0, 1)
    torch.randperm(4, generator=run.loader.generator)


def _seed(run: Run, pick: int) -> None:
    torch.manual_seed(pick)
    np.random.seed(pick)
    random.seed(pick)


def _raise(run: Run, pick: int) -> None:
    raise (KeyboardInterrupt if pick % 2 else ValueError)("on purpose")


def _scaler(run: Run, pick: int) -> None:
    run.scaler.scale(torch.ones(1))
    run.scaler.update(new_scale=float(pick + 1))


ACTS: dict[str, Callable[[Run, int], Any]] = {
    "train": lambda run, pick: run.step(),
    "eval": lambda run, pick: run.model.eval(),
    "train mode of one": lambda run, pick: run.model.norm.train(pick % 2 == 0),
    "forward": lambda run, pick: run.model(torch.randn(4, 5, dtype=run.dtype)),
    "optimizer step": lambda run, pick: run.optimizer.step(),
    "scheduler step": lambda run, pick: run.scheduler.step(),
    "learning rate": lambda run, pick: run.optimizer.param_groups[0].update(lr=float(pick)),
    "zero": lambda run, pick: run.optimizer.zero_grad(set_to_none=pick % 2 == 0),
    "load": lambda run, pick: run.model.load_state_dict(run.model.state_dict()),
    "double": lambda run, pick: run.model.double(),
    "clip": lambda run, pick: nn.utils.clip_grad_norm_(run.model.parameters(), 0.01),
    "iterate": lambda run, pick: next(iter(run.loader)),
    **{
        act.__name__.strip("_"): act
        for act in (
            _write, _write_data, _set_data, _write_numpy, _write_buffer, _write_buffer_with_graph, _write_grad,
            _drop_grad, _new_grad, _write_state, _clear_state, _replace_state, _add_group, _replace_parameter, _delete,
            _delete_buffer, _new_attribute, _new_module, _attribute_of_parameter, _hooks, _freeze, _draw, _seed, _raise,
            _scaler, _parametrize, _inference,
        )
    },
}  # fmt: skip


def _do(run: Run, acts: list[tuple[str, int]]) -> BaseException | None:
    """Do them in order; one that cannot be done after the others ends it, like any error."""
    for name, pick in acts:
        try:
            ACTS[name](run, pick)
        except Exception as error:  # what an intervention raises is its own affair
            return error
    return None


acts = st.lists(st.tuples(st.sampled_from(sorted(ACTS)), st.integers(0, 11)), min_size=1, max_size=8)


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=CASES <= 60)
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.integers(0, 2),
    firings=st.lists(st.lists(acts, min_size=1, max_size=2), min_size=1, max_size=2),
)
def test_nothing_is_otherwise_after_any_sequence_of_interventions(optimizer, dtype, steps, firings):
    """Bytes, addresses, versions, objects, modes, hooks, attributes, random streams; training goes on in between."""
    run = Run(optimizer, dtype=dtype, steps=steps)
    guard = Guard(*run.guarded, loader=run.loader)
    for interventions in firings:
        before = portrait(run)
        guard.save()
        for deeds in interventions:
            try:
                with guard.protecting("any"):
                    error = _do(run, deeds)
                    if error is not None:
                        raise error
            except (Exception, KeyboardInterrupt):
                pass
            assert differing(before, portrait(run)) == []
        guard.release()
        run.step()


@settings(max_examples=CASES // 3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=CASES <= 60)
@given(optimizer=st.sampled_from(sorted(OPTIMIZERS)), deeds=st.lists(acts, min_size=3, max_size=3))
def test_training_goes_on_as_if_there_had_been_no_interventions(optimizer, deeds):
    """Two runs, one with an intervention before each step: they end with the same bytes."""
    plain, guarded = Run(optimizer), Run(optimizer)
    ends = []
    for run in (plain, guarded):
        torch.manual_seed(1)
        guard = Guard(*run.guarded, loader=run.loader)
        for each in deeds:
            if run is guarded:
                guard.save()
                try:
                    with guard.protecting("any"):
                        _do(run, each)
                except (Exception, KeyboardInterrupt):
                    pass
                guard.release()
            run.step()
        ends.append([p.detach().clone() for p in run.model.state_dict().values()] + [torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("name", sorted(ACTS.keys() - {"raise"}))
def test_each_of_the_acts_leaves_traces_where_there_is_no_guard(name):
    """Otherwise the tests above would show nothing."""
    run = Run()
    before = portrait(run)
    ACTS[name](run, 1)
    assert differing(before, portrait(run))
