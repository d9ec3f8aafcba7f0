"""The trackers against plain float64 arithmetic; which gradients Fisher information is made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, a third of them zero."""
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=source, dtype=torch.float64)
    return (numbers * (torch.rand(shape, generator=source) > 0.33)).to(dtype)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """(samples, units) by the rule of the documentation, in float64."""
    if tensor.dim() == 1:
        return tensor.double()[None]
    axis = 1 if tensor.dim() >= 4 else tensor.dim() - 1
    return tensor.double().movedim(axis, -1).reshape(-1, tensor.shape[axis])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4), st.integers(0, 10**6))
def test_counts_equal_the_reference(batches, seed):
    """Share of samples above zero, by unit, over tensors of any shape: exactly."""
    state, hits, totals = hl.metta.ReLUActivationState(), {}, {}
    for index, (shape, dtype) in enumerate(batches):
        tensor = drawn(seed + index, shape, dtype)
        state.update("c", tensor)
        for unit, column in enumerate(rows_of(tensor).T):
            hits[unit] = hits.get(unit, 0) + int((column > 0).sum())
            totals[unit] = totals.get(unit, 0) + len(column)
    assert state.to_metrics() == {f"activations/relu/c/{unit}": hits[unit] / totals[unit] for unit in hits}


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5), st.floats(0, 0.999), st.integers(0, 10**6))
def test_fisher_equals_the_reference(shape, dtypes, beta, seed):
    """Running mean of squares: within 1e-5 of float64, whatever the type of the gradients."""
    state, mean = hl.metta.FisherInformationState(beta), torch.zeros(shape, dtype=torch.float64)
    for index, dtype in enumerate(dtypes):
        gradient = drawn(seed + index, shape, dtype)
        state.update("c", gradient)
        mean = beta * mean + (1 - beta) * gradient.double().square()
    metrics = state.to_metrics()
    assert metrics["fisher_info/c/c.weight/mean"] == pytest.approx(mean.mean().item(), rel=1e-5, abs=1e-12)
    assert metrics["fisher_info/c/c.weight/trace"] == pytest.approx(mean.sum().item(), rel=1e-5, abs=1e-12)
    assert metrics["fisher_info/c/c.weight/max"] == pytest.approx(mean.max().item(), rel=1e-5, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_flow_equals_the_reference(batch, length, width, dtype, seed):
    """Root mean square over the batch of the mean over time: within 1e-5 of float64."""
    gradient = drawn(seed, (batch, length, width), dtype)
    state = hl.metta.GradientFlowState(beta=0.5)
    state.update("c", gradient)
    expected = 0.5 * gradient.double().mean(1).square().mean(0).sqrt()
    metrics = state.to_metrics()
    assert metrics["gradient_flow/c/mean"] == pytest.approx(expected.mean().item(), rel=1e-5, abs=1e-9)
    for unit, size in enumerate(expected.tolist()):
        assert metrics.get(f"gradient_flow/c/unit_{unit}", 0.0) == pytest.approx(size, rel=1e-5, abs=2e-8)


BETA = 0.9


def tracked(component: nn.Module, **components: nn.Module):
    """A policy with Fisher information of ``c``; its tracker and handle too."""
    policy, context = hl.metta.PolicyAutoBuilder({"c": component, **components}), hl.metta.ComponentContext()
    hook = hl.metta.attach_fisher_information_hooks(beta=BETA)("c", context)
    handle = policy.register_component_backward_hook_rule(component_name="c", hook=hook)
    return policy, context.model_metrics["fisher_information_state"], handle


def trace(state, parameter: str = "weight") -> float:
    """The sum of the running mean of one parameter of ``c``."""
    return state.to_metrics()[f"fisher_info/c/c.{parameter}/trace"]


def blended(*gradients: torch.Tensor) -> float:
    """What it has to be after these."""
    mean = 0.0
    for gradient in gradients:
        mean = BETA * mean + (1 - BETA) * gradient.double().square().sum().item()
    return pytest.approx(mean, rel=1e-5)


def test_a_component_that_is_called_twice_has_one_gradient():
    """Of both calls together; a backward hook would fire for the first before it is there."""
    policy, state, _ = tracked(nn.Linear(3, 3))
    policy.c(policy.c(torch.ones(2, 3))).sum().backward()
    assert trace(state) == blended(policy.c.weight.grad)


def test_a_container_stands_for_all_parameters_below_it():
    """Under their names in it; a shared one once."""
    shared = nn.Linear(3, 3)
    policy, state, _ = tracked(nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.LayerNorm(3)))
    policy(torch.ones(2, 3)).square().sum().backward()
    names = {key.split("/")[2] for key in state.to_metrics() if key.endswith("/mean")}
    assert names == {"c.0.weight", "c.0.bias", "c.2.weight", "c.2.bias"}
    assert trace(state, "0.weight") == blended(policy.c[0].weight.grad)


def test_modules_that_are_never_called_count_too():
    """A ModuleList: its children run, it does not; nobody is warned."""
    layers = nn.ModuleList([nn.Linear(2, 2)])
    policy = hl.metta.PolicyAutoBuilder({"c": layers}, forward=lambda components, x: components["c"][0](x))
    context = hl.metta.ComponentContext()
    hook = hl.metta.attach_fisher_information_hooks(beta=BETA)("c", context)
    handle = policy.register_component_backward_hook_rule(component_name="c", hook=hook)
    policy(torch.ones(1, 2)).sum().backward()
    handle.remove()
    assert trace(context.model_metrics["fisher_information_state"], "0.weight") == blended(layers[0].weight.grad)


@pytest.mark.parametrize("how", ["assign", "load", "delete"])
def test_a_parameter_that_takes_the_place_of_another_is_followed(how):
    """module.weight = …, load_state_dict(assign=True), and one that may come to the same address."""
    policy, state, handle = tracked(nn.Linear(3, 2))
    policy(torch.ones(1, 3)).sum().backward()
    state.reset()
    if how == "load":
        policy.load_state_dict({key: value.clone() for key, value in policy.state_dict().items()}, assign=True)
    else:
        if how == "delete":
            del policy.c.weight
        policy.c.weight = nn.Parameter(torch.ones(2, 3))
    policy(torch.ones(1, 3)).square().sum().backward()
    assert trace(state) == blended(policy.c.weight.grad)
    handle.remove()
    assert not policy.c.weight._backward_hooks
