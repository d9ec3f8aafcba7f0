"""Which gradients Fisher information is made of: those of each backward pass, whole and alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

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
