"""PolicyAutoBuilder and ComponentContext: named components, and hooks on them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import hookline as hl


def two() -> hl.metta.PolicyAutoBuilder:
    """Two layers, one after the other."""
    return hl.metta.PolicyAutoBuilder(OrderedDict(actor_mlp=nn.Linear(3, 4), head=nn.Linear(4, 2)))


def test_a_policy_may_be_told_how_to_run():
    """forward(components, *args): here both components on the same input."""
    policy = hl.metta.PolicyAutoBuilder(
        {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)},
        forward=lambda components, x: components["a"](x) + components["b"](x),
    )
    x = torch.ones(2, 3)
    assert torch.equal(policy(x), policy.a(x) + policy.b(x))


def test_a_backward_hook_gets_tuples_of_gradients_when_the_parameters_have_theirs():
    """Also in the first layer, whose input needs none: grad_input is (None,); what it returns is ignored."""
    policy, seen = two(), []

    def hook(module, grad_input, grad_output):
        seen.append((grad_input, grad_output, module.weight.grad.clone()))
        return (torch.zeros(1),)

    for name in ("actor_mlp", "head"):
        policy.register_component_backward_hook_rule(component_name=name, hook=hook)
    policy(torch.ones(2, 3)).sum().backward()
    (head_in, head_out, head_grad), (mlp_in, mlp_out, mlp_grad) = seen
    assert torch.equal(head_out[0], torch.ones(2, 2))
    assert torch.equal(head_in[0], torch.ones(2, 2) @ policy.head.weight)
    assert torch.equal(mlp_out[0], head_in[0])
    assert mlp_in == (None,)
    assert torch.equal(head_grad, policy.head.weight.grad)
    assert torch.equal(mlp_grad, policy.actor_mlp.weight.grad)


def test_any_model_is_a_policy_by_the_names_of_its_modules():
    """of(model): components by dotted names; hooks fire whether the policy or the model is called."""
    model, seen = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), []
    policy = hl.metta.PolicyAutoBuilder.of(model)
    assert list(policy.components) == ["0", "1", "1.0", "1.1"]
    assert policy.components["1.1"] is model[1][1]
    policy.register_component_hook_rule(component_name="1", hook=lambda *_, site: seen.append((site.name, site.step)))
    x = torch.ones(1, 3)
    assert torch.equal(policy(x), model(x))
    assert seen == [("1", 0), ("1", 1)]
    assert [id(p) for p in policy.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("told", [False, True], ids=["in order", "told"])
def test_a_component_that_is_replaced_is_the_one_that_runs(told):
    """Forward, parameters, components and hooks all have the new module, in its old place."""
    policy, new, x, seen = two(), nn.Linear(3, 4), torch.ones(2, 3), []
    if told:
        run = lambda components, x: components["head"](components["actor_mlp"](x))  # noqa: E731
        policy = hl.metta.PolicyAutoBuilder(policy.components, forward=run)
    policy.actor_mlp = new
    policy.register_component_hook_rule(component_name="actor_mlp", hook=lambda module, *_: seen.append(module))
    assert torch.equal(policy(x), policy.head(new(x)))
    assert list(policy.components) == ["actor_mlp", "head"]
    assert policy.components["actor_mlp"] is new
    assert new.weight in set(policy.parameters())
    assert seen == [new, new]


@pytest.mark.slow
@pytest.mark.parametrize("forward", [None, lambda components, x: components["head"](components["actor_mlp"](x))])
def test_a_compiled_policy_runs_what_replaced_a_component(forward):
    """In one graph; the code of the old one is not used for the new one."""
    policy = hl.metta.PolicyAutoBuilder(two().components, forward=forward)
    model, x = torch.compile(policy, backend="eager", fullgraph=True), torch.ones(1, 3)
    model(x)
    policy.head = nn.Linear(4, 2)
    assert torch.equal(model(x), policy.head(policy.actor_mlp(x)))


def test_a_component_that_never_runs_is_told_of():
    """The policy ran, its hook did not: HookNeverFired, with the component's name."""
    policy = hl.metta.PolicyAutoBuilder(
        {"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)}, forward=lambda components, x: components["used"](x)
    )
    handle = policy.register_component_hook_rule(component_name="idle", hook=lambda *_: None)
    policy(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match="'idle'"):
        handle.remove()
