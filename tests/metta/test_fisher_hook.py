"""Which gradients Fisher information is made of: those of each backward pass, whole and alone."""

from __future__ import annotations

import gc
import weakref

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


def test_a_first_layer_has_this_steps_gradient_at_each_step():
    """With zero_grad(set_to_none=True): (1-β)g₁², then g₂, though its input needs no gradient."""
    policy, state, _ = tracked(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    gradients = []
    for scale in (1.0, 3.0):
        optimizer.zero_grad(set_to_none=True)
        (policy(torch.ones(2, 3)).square().sum() * scale).backward()
        gradients.append(policy.c.weight.grad.clone())
        optimizer.step()
        assert trace(state) == blended(*gradients)
    assert not torch.equal(*gradients)


@pytest.mark.parametrize("set_to_none", [True, False, None], ids=["none", "zeros", "accumulated"])
def test_each_micro_batch_counts_for_itself(set_to_none):
    """g and then 2g, whatever becomes of .grad between: the update is β(1-β)g² + (1-β)(2g)², never (3g)²."""
    policy, state, _ = tracked(nn.Linear(3, 2))
    x = torch.tensor([[1.0, 2.0, 3.0]])
    policy(x).sum().backward()
    once = policy.c.weight.grad.clone()
    if set_to_none is not None:
        policy.zero_grad(set_to_none=set_to_none)
    policy(2 * x).sum().backward()
    assert trace(state) == blended(once, 2 * once)


def test_attached_by_hand_it_takes_what_has_been_accumulated():
    """As a plain backward hook, g and g again are g and 2g: documented."""
    layer, context = nn.Linear(3, 2), hl.metta.ComponentContext()
    hl.attach(layer, hl.metta.attach_fisher_information_hooks(beta=BETA)("c", context), on="backward", observe=True)
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
    once = layer.weight.grad / 2
    assert trace(context.model_metrics["fisher_information_state"]) == blended(once, 2 * once)


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


def test_a_gradient_that_is_only_asked_for_does_not_count():
    """torch.autograd.grad(loss, parameters) trains nothing."""
    policy, state, _ = tracked(nn.Linear(3, 2))
    torch.autograd.grad(policy(torch.ones(1, 3)).square().sum(), list(policy.parameters()))
    assert state.to_metrics() == {}
    policy(torch.ones(1, 3)).square().sum().backward()
    assert trace(state) == blended(policy.c.weight.grad)


def test_a_gradient_penalty_counts_as_the_pass_it_is_part_of():
    """The gradient of the gradient of an input flows in one backward pass: one update."""
    policy, state, _ = tracked(nn.Linear(3, 2), head=nn.Tanh())
    x = torch.ones(1, 3, requires_grad=True)
    loss = policy(x).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    assert trace(state) == blended(policy.c.weight.grad)


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


def test_a_lazy_layer_is_tracked_once_it_has_a_shape():
    """From its first step on."""
    policy, state, _ = tracked(nn.LazyLinear(2))
    policy(torch.ones(1, 3)).sum().backward()
    assert trace(state) == blended(policy.c.weight.grad)


def test_a_frozen_parameter_counts_when_it_is_trained_again():
    """Nothing while it is frozen, no error either."""
    policy, state, _ = tracked(nn.Linear(3, 2).requires_grad_(False), head=nn.Linear(2, 1))
    policy(torch.ones(1, 3)).sum().backward()
    assert state.to_metrics() == {}
    policy.c.requires_grad_(True)
    policy(torch.ones(1, 3)).sum().backward()
    assert trace(state) == blended(policy.c.weight.grad)


def test_a_component_without_parameters_has_no_metrics():
    """A ReLU: nothing to hook, no error."""
    policy, state, handle = tracked(nn.ReLU(), head=nn.Linear(2, 1))
    policy(torch.ones(1, 2)).sum().backward()
    handle.remove()
    assert state.to_metrics() == {}


def test_sparse_gradients_are_passed_over():
    """An embedding with sparse=True trains as ever."""
    policy, state, _ = tracked(nn.Embedding(4, 2, sparse=True))
    policy(torch.tensor([1, 2])).sum().backward()
    assert policy.c.weight.grad.is_sparse
    assert state.to_metrics() == {}


def test_parameters_can_still_be_swapped():
    """torch.utils.swap_tensors refuses what anybody has weak references to."""
    policy, _, _ = tracked(nn.Linear(3, 2))
    policy(torch.ones(1, 3)).sum().backward()
    assert weakref.getweakrefcount(policy.c.weight.grad) == 0
    policy.c.weight.grad = None
    torch.utils.swap_tensors(policy.c.weight, nn.Parameter(torch.zeros(2, 3)))
    assert not policy.c.weight.any()


def test_the_handle_keeps_no_parameter_alive():
    """The policy is gone, the handle is not."""
    policy, _, handle = tracked(nn.Linear(3, 2))
    policy(torch.ones(1, 3)).sum().backward()
    gone = weakref.ref(policy.c)
    del policy
    gc.collect()
    assert gone() is None
    handle.remove()


def test_watching_costs_no_copy_of_the_gradient():
    """.grad is the very memory that the pass made: autograd need not copy because somebody held on to it."""
    pointers: list[int] = []
    layer = nn.Linear(3, 2)
    layer.weight.register_hook(lambda grad: pointers.append(grad.data_ptr()) or None)
    policy, _, _ = tracked(layer)
    policy(torch.ones(1, 3)).sum().backward()
    assert pointers == [layer.weight.grad.data_ptr()]
