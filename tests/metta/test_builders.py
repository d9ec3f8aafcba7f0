"""The builders and the hooks they make, on real modules; one that yields nothing is named."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_trackers import BUILDERS, make_policy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.metta.builders import _OnLeaves
from hookline.phases import in_phase
from hookline.tree import leaves

KEYS = {
    "relu": ("relu_activation_state", hl.metta.ReLUActivationState),
    "tanh": ("saturated_activation_state_tanh", hl.metta.SaturatedActivationState),
    "sigmoid": ("saturated_activation_state_sigmoid", hl.metta.SaturatedActivationState),
    "fisher": ("fisher_information_state", hl.metta.FisherInformationState),
    "flow": ("gradient_flow_state", hl.metta.GradientFlowState),
    "relu flow": ("relu_gradient_flow_state", hl.metta.ReLUGradientFlowState),
}


class Constant(nn.Module):
    """Gives out whatever it was made with, times its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def attach(policy, name, component, context, **options):
    """One tracker on one component, by the methods of the policy."""
    kind, make = BUILDERS[name]
    hook, backward = make(**options)(component, context), policy.register_component_backward_hook_rule
    register = policy.register_component_hook_rule if kind == "forward" else backward
    return None if hook is None else register(component_name=component, hook=hook)


def tracked(name, component="head", **options):
    """A policy, one tracker on one of its components, the context of the tracker, and its handle."""
    policy, context = make_policy(), hl.metta.ComponentContext()
    return policy, context, attach(policy, name, component, context, **options)


def odd(output, name="relu", component="odd", **options):
    """The same for a policy that gives out ``output(x)``."""
    policy, context = hl.metta.PolicyAutoBuilder({component: Constant(output)}), hl.metta.ComponentContext()
    attach(policy, name, component, context, **options)
    return policy, context


def metrics(context) -> dict[str, float]:
    """Everything that was counted; stays counted."""
    return {key: value for state in context.model_metrics.values() for key, value in state.to_metrics().items()}


def step(policy, x=None):
    """One forward and backward."""
    x = torch.linspace(-1, 1, 24).reshape(4, 6) if x is None else x
    policy(x).square().sum().backward()


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    "output",
    [
        lambda x: (x * 2, x),
        lambda x: {"other": x * 2},
        lambda x: None,
        lambda x: torch.ones(2, dtype=torch.int64),
        lambda x: (x * 2).sum(),
        lambda x: (x * 2)[:0],
        lambda x: (x * 2)[:, :0],
        lambda x: (x * 2).to_sparse(),
        lambda x: [x * 2],
        lambda x: object(),
    ],
    ids=["tuple", "dict", "None", "int", "0-d", "no rows", "no width", "sparse", "list", "object"],
)
def test_a_tracker_never_breaks_the_pass_of_whoever_is_watched(name, output):
    """Whatever a component gives out, forward and backward end as they would."""
    policy, context = odd(output, name)
    for _, value in leaves(policy(torch.ones(2, 3, requires_grad=True))):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            (value.to_dense() if value.is_sparse else value).sum().backward()
    metrics(context)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("made_in", ["no_grad", "inference", "autocast", "half"])
def test_it_counts_in_every_mode(name, made_in):
    """no_grad and inference mode (forward trackers), autocast and bfloat16 weights."""
    policy, context, _ = tracked(name)
    policy.eval()
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    if made_in in ("no_grad", "inference"):
        with torch.no_grad() if made_in == "no_grad" else torch.inference_mode():
            policy(x)
        assert (metrics(context) != {}) == (BUILDERS[name][0] == "forward")
        step(policy)
    elif made_in == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = policy(x).square().sum()
        loss.backward()
    else:
        policy.bfloat16()
        step(policy, x.bfloat16())
    assert metrics(context) != {}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_component_has_the_metrics_of_one_that_is_not(name, reentrant):
    """The forward that checkpointing repeats is counted once."""
    found = []
    for checkpointed in (False, True):
        policy, context, _ = tracked(name, "body")
        body, x = policy.eval().components["body"], torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
        hidden = checkpoint(body, x, use_reentrant=reentrant) if checkpointed else body(x)
        policy.components["head"](hidden).square().sum().backward()
        found.append(metrics(context))
        if BUILDERS[name][0] == "forward":
            assert context.model_metrics[KEYS[name][0]]._kept["body"]["samples"] == {"16": 4}
    assert found[0] == pytest.approx(found[1])
    assert found[0] != {}


@functools.cache
def counted_in(how: str) -> dict[str, dict[str, float]]:
    """By tracker: what one step counts with all of them on, so that each way is compiled once for all."""
    torch.compiler.reset()
    policy, contexts = make_policy().eval(), {name: hl.metta.ComponentContext() for name in BUILDERS}
    if how == "component":
        policy.head = torch.compile(policy.head, backend="aot_eager", fullgraph=True)
    for name, context in contexts.items():
        attach(policy, name, "head", context)
    step(torch.compile(policy, backend="aot_eager", fullgraph=True) if how == "policy" else policy)
    return {name: metrics(context) for name, context in contexts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("how", ["component", "policy"])
def test_a_compiled_component_is_tracked(name, how):
    """A component wrapped by torch.compile, or a policy compiled as a whole, gives the numbers of an eager one."""
    found = counted_in(how)[name]
    assert found == pytest.approx(counted_in("eager")[name])
    assert found != {}


@pytest.mark.parametrize("name", BUILDERS)
def test_trackers_count_training_and_only_that(name):
    """Nothing in an evaluation or an intervention."""
    policy, context, _ = tracked(name)
    for phase in ("eval", "intervention"):
        with in_phase(phase):
            step(policy)
        assert metrics(context) == {}
    with in_phase("train"):
        step(policy)
    assert metrics(context) != {}


def test_a_hook_may_be_called_as_torch_calls_it():
    """Registered with torch's own methods, without a site, the hooks count too."""
    context, layer = hl.metta.ComponentContext(), nn.Linear(2, 3)
    layer.register_forward_hook(hl.metta.attach_relu_activation_hooks()("a", context))
    layer.register_full_backward_hook(hl.metta.attach_gradient_flow_hooks()("a", context))
    layer(torch.ones(2, 2, requires_grad=True)).sum().backward()
    found = metrics(context)
    assert "activations/relu/a/2" in found
    assert found["gradient_flow/a/unit_2"] == pytest.approx(0.05)


class Pair(nn.Module):
    """Gives out a tuple whose first tensor the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(x) + 1


BACKWARD = {
    "relu flow": hl.metta.attach_relu_gradient_flow_hooks,
    "flow": hl.metta.attach_gradient_flow_hooks,
    "fisher": hl.metta.attach_fisher_information_hooks,
}


@pytest.mark.parametrize(
    ("component", "kind", "builder"),
    [
        ("first", "backward", hl.metta.attach_relu_gradient_flow_hooks),
        ("pair", "backward", hl.metta.attach_gradient_flow_hooks),
        ("pair", "forward", hl.metta.attach_relu_activation_hooks),
        ("relu", "backward", hl.metta.attach_fisher_information_hooks),
    ],
    ids=["input is data", "output unused", "a tuple", "no parameters"],
)
def test_one_warning_names_component_and_tracker(component: str, kind: str, builder: Any) -> None:
    """When the hooks come off; of a component that gave something there is none."""
    modules = OrderedDict(first=nn.Linear(4, 4), relu=nn.ReLU(), pair=Pair())
    policy, context = hl.metta.PolicyAutoBuilder(modules, forward=_forward), hl.metta.ComponentContext()
    tool = hl.metta.TrainTool()
    (tool.add_training_hook if kind == "forward" else tool.add_training_backward_hook)(component, builder())
    tool.add_training_hook("first", hl.metta.attach_relu_activation_hooks())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tool.attached(policy=policy, trainer=SimpleNamespace(context=context)):
            policy(torch.randn(6, 4)).backward()
    [told] = [str(each.message) for each in caught if "nothing" in str(each.message)]
    assert told.startswith(f"Component {component!r} gave ")


def _forward(modules: dict[str, nn.Module], x: Tensor) -> Tensor:
    return modules["pair"](modules["relu"](modules["first"](x)))[1].square().mean()


def test_an_evaluation_in_a_loop_of_ones_own_does_not_count_for_trackers() -> None:
    """As it comes before training, in the middle and without gradients: the numbers are those of training alone."""
    counted = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        policy = hl.metta.PolicyAutoBuilder(OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
        context, tool = hl.metta.ComponentContext(), hl.metta.TrainTool()
        tool.add_training_hook("second", hl.metta.attach_relu_activation_hooks())
        for make in BACKWARD.values():
            tool.add_training_backward_hook("second", make())
        data = torch.Generator().manual_seed(1)
        with tool.attached(policy=policy, trainer=SimpleNamespace(context=context)):
            for _ in range(4):
                if evaluates:
                    policy.eval()
                    with torch.no_grad():
                        policy(torch.full((8, 4), 9.0))
                    policy.train()
                    with torch.no_grad():
                        policy(torch.full((8, 4), 9.0))
                policy(torch.randn(6, 4, generator=data)).sum().backward()
        counted.append({key: state.to_metrics() for key, state in context.model_metrics.items()})
    assert counted[0] == counted[1] != {}


def test_a_parameter_whose_hooks_were_cleared_is_hooked_again_beside_those_of_others() -> None:
    """A hook that is not ours does not count as ours."""
    layer, took = nn.Linear(2, 2), []
    feeder: Any = SimpleNamespace(take=lambda name, gradient, training: took.append(name))
    with _OnLeaves(feeder, layer, layer):
        layer.weight._backward_hooks.clear()
        layer.weight.register_hook(lambda grad: None)
        layer(torch.ones(1, 2)).sum().backward()
    assert sorted(took) == ["bias", "weight"]
