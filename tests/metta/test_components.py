"""PolicyAutoBuilder and ComponentContext: named components, and hooks on them."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import hookline as hl


def two() -> hl.metta.PolicyAutoBuilder:
    """Two layers, one after the other."""
    return hl.metta.PolicyAutoBuilder(OrderedDict(actor_mlp=nn.Linear(3, 4), head=nn.Linear(4, 2)))


def test_a_policy_runs_its_components_in_order():
    """head(actor_mlp(x)); they are its children and its parameters are theirs."""
    policy, x = two(), torch.ones(2, 3)
    assert torch.equal(policy(x), policy.head(policy.actor_mlp(x)))
    assert list(policy.components) == ["actor_mlp", "head"]
    assert [name for name, _ in policy.named_parameters()] == [
        "actor_mlp.weight",
        "actor_mlp.bias",
        "head.weight",
        "head.bias",
    ]


def test_the_first_component_takes_whatever_the_policy_is_given():
    """Several arguments and keyword arguments."""

    class Scaled(nn.Module):
        def forward(self, x, y, *, by):
            return (x + y) * by

    policy = hl.metta.PolicyAutoBuilder(OrderedDict(scaled=Scaled(), same=nn.Identity()))
    assert policy(torch.ones(1), torch.ones(1), by=3).item() == 6.0


def test_a_policy_may_be_told_how_to_run():
    """forward(components, *args): here both components on the same input."""
    policy = hl.metta.PolicyAutoBuilder(
        {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)},
        forward=lambda components, x: components["a"](x) + components["b"](x),
    )
    x = torch.ones(2, 3)
    assert torch.equal(policy(x), policy.a(x) + policy.b(x))


def test_an_unknown_component_is_a_key_error_in_the_words_of_the_source():
    """And names the nearest, for both kinds of hook."""
    policy = two()
    for register in (policy.register_component_hook_rule, policy.register_component_backward_hook_rule):
        with pytest.raises(KeyError, match=r"Component 'actor' not found in policy\. Nearest: 'actor_mlp'") as error:
            register(component_name="actor", hook=print)
        assert isinstance(error.value, hl.errors.NoMatchError)
    hl.assert_no_hooks(policy)


def test_two_registrations_are_two_handles():
    """Distinct RemovableHandles; both hooks fire, in order, until each is removed."""
    policy, seen = two(), []
    handles = [
        policy.register_component_hook_rule(component_name="head", hook=lambda *_, n=n: seen.append(n)) for n in "ab"
    ]
    assert all(isinstance(handle, RemovableHandle) for handle in handles)
    assert handles[0] is not handles[1]
    policy(torch.ones(1, 3))
    handles[0].remove()
    policy(torch.ones(1, 3))
    assert seen == ["a", "b", "b"]


def test_a_forward_hook_gets_module_inputs_and_output_and_changes_nothing():
    """What it returns is ignored."""
    policy, seen, x = two(), [], torch.ones(1, 3)
    plain = policy(x)

    def hook(module, args, output):
        seen.append((module, args, output))
        return output * 0

    policy.register_component_hook_rule(component_name="actor_mlp", hook=hook)
    assert torch.equal(policy(x), plain)
    [(module, args, output)] = seen
    assert module is policy.components["actor_mlp"]
    assert args == (x,)
    assert torch.equal(output, policy.actor_mlp(x))


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


def test_names_of_a_wrapped_model_are_those_without_the_wrapper():
    """A compiled model, a compiled block."""
    block = torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager")
    model = torch.compile(nn.Sequential(OrderedDict(block=block)), backend="eager")
    policy, seen = hl.metta.PolicyAutoBuilder.of(model), []
    assert list(policy.components) == ["block", "block.0"]
    policy.register_component_hook_rule(component_name="block.0", hook=lambda *_: seen.append("fired"))
    model(torch.ones(1, 3))
    assert seen == ["fired"]


@pytest.mark.parametrize(
    "replace",
    [
        lambda policy, new: setattr(policy, "actor_mlp", new),
        lambda policy, new: (delattr(policy, "actor_mlp"), setattr(policy, "actor_mlp", new)),
    ],
    ids=["attribute", "deleted"],
)
@pytest.mark.parametrize("told", [False, True], ids=["in order", "told"])
def test_a_component_that_is_replaced_is_the_one_that_runs(replace, told):
    """Forward, parameters, components and hooks all have the new module, in its old place."""
    policy, new, x, seen = two(), nn.Linear(3, 4), torch.ones(2, 3), []
    if told:
        run = lambda components, x: components["head"](components["actor_mlp"](x))  # noqa: E731
        policy = hl.metta.PolicyAutoBuilder(policy.components, forward=run)
    replace(policy, new)
    policy.register_component_hook_rule(component_name="actor_mlp", hook=lambda module, *_: seen.append(module))
    assert torch.equal(policy(x), policy.head(new(x)))
    assert list(policy.components) == ["actor_mlp", "head"]
    assert policy.components["actor_mlp"] is new
    assert new.weight in set(policy.parameters())
    assert seen == [new, new]


def test_a_component_that_is_compiled_in_place_runs_compiled():
    """policy.head = torch.compile(policy.head): the compiled one runs, its hook fires."""
    policy, compiled, seen = two(), [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    policy.head = torch.compile(policy.head, backend=backend)
    policy.register_component_hook_rule(component_name="head", hook=lambda *_: seen.append("fired"))
    with torch.no_grad():
        policy(torch.ones(1, 3))
    assert len(compiled) == 1
    assert seen == ["fired"]


@pytest.mark.parametrize("forward", [None, lambda components, x: components["head"](components["actor_mlp"](x))])
def test_a_compiled_policy_runs_what_replaced_a_component(forward):
    """In one graph; the code of the old one is not used for the new one."""
    policy = hl.metta.PolicyAutoBuilder(two().components, forward=forward)
    model, x = torch.compile(policy, backend="eager", fullgraph=True), torch.ones(1, 3)
    model(x)
    policy.head = nn.Linear(4, 2)
    assert torch.equal(model(x), policy.head(policy.actor_mlp(x)))


def test_a_module_of_a_model_that_is_replaced_takes_the_hooks():
    """of(model), then another module in its place: hooks that are registered from then on fire there."""
    model, new, seen = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2))), nn.Linear(4, 5), []
    policy = hl.metta.PolicyAutoBuilder.of(model)
    model[1][0] = new
    assert policy.components["1.0"] is model[1][0] is new
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = policy.register_component_hook_rule(component_name="1.0", hook=lambda module, *_: seen.append(module))
        model(torch.ones(1, 3))
        handle.remove()
    assert seen == [new]


def test_components_are_changed_where_they_live_and_not_by_their_names():
    """Deleted from the policy, one is gone from what runs; the mapping itself takes nothing."""
    policy, x = two(), torch.ones(1, 3)
    with pytest.raises(TypeError, match="does not support item assignment"):
        policy.components["head"] = nn.Linear(4, 2)
    del policy.head
    assert dict(policy.components) == {"actor_mlp": policy.actor_mlp}
    assert torch.equal(policy(x), policy.actor_mlp(x))


def test_children_that_are_no_components_do_not_run():
    """A loss that was set on the policy is a child like any other."""
    policy, x = two(), torch.ones(1, 3)
    policy.loss = nn.Linear(9, 9)
    assert "loss" not in policy.components
    assert torch.equal(policy(x), policy.head(policy.actor_mlp(x)))


def test_a_policy_without_components_says_so_when_it_is_called():
    """An error, not None; with forward= it may well have none."""
    with pytest.raises(hl.errors.OptionError, match="This policy has no components to run"):
        hl.metta.PolicyAutoBuilder({})(torch.ones(1))
    assert hl.metta.PolicyAutoBuilder({}, forward=lambda components, x: x + 1)(1) == 2


def test_a_subclass_may_be_made_of_a_model_whatever_its_init_takes():
    """of(model) does not run it."""

    class Own(hl.metta.PolicyAutoBuilder):
        def __init__(self, width):
            super().__init__({"only": nn.Linear(width, width)})

    policy = Own.of(nn.Sequential(nn.Linear(3, 2)))
    assert type(policy) is Own
    assert list(policy.components) == ["0"]
    assert policy(torch.ones(1, 3)).shape == (1, 2)
    assert list(Own(2).components) == ["only"]


def test_a_component_that_never_runs_is_told_of():
    """The policy ran, its hook did not: HookNeverFired, with the component's name."""
    policy = hl.metta.PolicyAutoBuilder(
        {"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)}, forward=lambda components, x: components["used"](x)
    )
    handle = policy.register_component_hook_rule(component_name="idle", hook=lambda *_: None)
    policy(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match="'idle'"):
        handle.remove()


def test_a_hook_that_attaches_itself_is_asked_where():
    """attach_to(model, module) in place of a backward hook."""
    asked = []

    class Own:
        def __call__(self, *args):
            raise AssertionError("it asked to be elsewhere")

        def attach_to(self, model, module):
            asked.append((model, module))
            return hl.HandleSet()

    policy = two()
    handle = policy.register_component_backward_hook_rule(component_name="head", hook=Own())
    policy(torch.ones(1, 3)).sum().backward()
    assert asked == [(policy, policy.head)]
    assert isinstance(handle, RemovableHandle)


@pytest.mark.parametrize("name", ["a.b", "", "forward", "components", 3])
def test_a_name_that_no_child_can_have_is_refused(name):
    """With the way to use dotted names."""
    with pytest.raises(hl.errors.OptionError, match=r"A component cannot be called .*PolicyAutoBuilder.of\(model\)"):
        hl.metta.PolicyAutoBuilder({name: nn.Linear(1, 1)})


def test_a_component_that_is_no_module_is_refused():
    """With its name and what it is."""
    with pytest.raises(hl.errors.OptionError, match=r"Component 'actor' has to be an nn\.Module, got a function"):
        hl.metta.PolicyAutoBuilder({"actor": lambda x: x})


def test_a_model_in_place_of_components_is_refused():
    """With the way to use a model."""
    with pytest.raises(hl.errors.OptionError, match=r"got a Linear; .* PolicyAutoBuilder.of\(model\)"):
        hl.metta.PolicyAutoBuilder(nn.Linear(1, 1))


def test_a_module_dict_holds_components():
    """As good as any dict."""
    assert list(hl.metta.PolicyAutoBuilder(nn.ModuleDict({"a": nn.Linear(1, 1)})).components) == ["a"]


def test_a_context_starts_empty_and_shows_what_it_has():
    """model_metrics is a plain dict of its own."""
    one, other = hl.metta.ComponentContext(), hl.metta.ComponentContext()
    assert type(one.model_metrics) is dict
    one.model_metrics["relu_activation_state"] = hl.metta.ReLUActivationState()
    assert other.model_metrics == {}
    assert repr(one) == "<ComponentContext with relu_activation_state>"


def test_a_policy_loads_what_it_saved():
    """state_dict() is that of its components; with hooks on, and no warning."""
    policy, other = two(), two()
    policy.register_component_hook_rule(component_name="head", hook=lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(policy.state_dict())
    assert torch.equal(other.head.weight, policy.head.weight)
