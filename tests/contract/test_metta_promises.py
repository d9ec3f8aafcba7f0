"""Metta's component trackers: what they promise, what upstream's tests assert, and its examples.

The examples are those of the source with the import lines changed. What it quotes of its own implementation (builders
that keep their state in the context) is tested as what a user may write.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_models import Scale
from torch import nn
from torch.utils.hooks import RemovableHandle

import hookline as hl
from hookline.metta import (
    TrainTool,
    attach_fisher_information_hooks,
    attach_gradient_flow_hooks,
    attach_relu_activation_hooks,
    attach_relu_gradient_flow_hooks,
    attach_saturated_activation_hooks,
)


def actor_critic() -> hl.metta.PolicyAutoBuilder:
    """The two components that the source's example names."""
    torch.manual_seed(0)
    return hl.metta.PolicyAutoBuilder(
        OrderedDict(
            actor_mlp=nn.Sequential(nn.Linear(4, 8), nn.ReLU()), critic_head=nn.Sequential(nn.Linear(8, 1), nn.Tanh())
        )
    )


def new_trainer() -> SimpleNamespace:
    """A trainer, as far as the tool needs one."""
    return SimpleNamespace(context=hl.metta.ComponentContext())


class Given(nn.Module):
    """Gives out what the next item of a list is, whatever comes in."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = list(outputs)

    def forward(self, x=None):
        return self.outputs.pop(0)


def watched(component: nn.Module, builder, kind: str = "forward"):
    """A policy of one component ``c`` with a hook of that builder; the context too."""
    policy, context = hl.metta.PolicyAutoBuilder({"c": component}), hl.metta.ComponentContext()
    hook = builder("c", context)
    if kind == "forward":
        policy.register_component_hook_rule(component_name="c", hook=hook)
    else:
        policy.register_component_backward_hook_rule(component_name="c", hook=hook)
    return policy, context


def metrics(context) -> dict[str, float]:
    return {key: value for state in context.model_metrics.values() for key, value in state.to_metrics().items()}


def send_back(policy, gradient: torch.Tensor) -> None:
    """One pass through the policy with that gradient at its output."""
    policy(torch.ones(gradient.shape, requires_grad=True)).backward(gradient)


# -- the source's example ----------------------------------------------------------------------------------


def train() -> TrainTool:
    """The usage example of the source."""
    cfg = TrainTool()

    # Forward hooks (called after forward pass)
    cfg.add_training_hook("actor_mlp", attach_relu_activation_hooks())
    cfg.add_training_hook("critic_head", attach_saturated_activation_hooks(activation="tanh"))

    # Backward hooks (called during backward pass)
    cfg.add_training_backward_hook("actor_mlp", attach_fisher_information_hooks())
    cfg.add_training_backward_hook("actor_mlp", attach_gradient_flow_hooks())
    cfg.add_training_backward_hook("actor_mlp", attach_relu_gradient_flow_hooks())

    return cfg


def test_example_usage():
    """Stored, attached at set-up, fed by training, reported and reset per epoch, cleared at the end."""
    cfg, policy, trainer = train(), actor_critic(), new_trainer()
    assert trainer.context.model_metrics == {}
    hl.assert_no_hooks(policy)

    cfg._register_policy_hooks(policy=policy, trainer=trainer)
    assert (len(cfg._active_policy_hooks), len(cfg._active_policy_backward_hooks)) == (2, 3)
    assert {key: type(state).__name__ for key, state in trainer.context.model_metrics.items()} == {
        "relu_activation_state": "ReLUActivationState",
        "saturated_activation_state_tanh": "SaturatedActivationState",
        "fisher_information_state": "FisherInformationState",
        "gradient_flow_state": "GradientFlowState",
        "relu_gradient_flow_state": "ReLUGradientFlowState",
    }
    reporter = hl.metta.StatsReporter(trainer.context)
    for epoch in range(2):
        policy.zero_grad()
        policy(torch.randn(16, 4).requires_grad_()).square().mean().backward()
        found = reporter.on_epoch_end(epoch)
        assert {key.split("/")[0] for key in found} == {"activations", "fisher_info", "gradient_flow"}
        assert "fisher_info/actor_mlp/actor_mlp.0.weight/mean" in found
        assert "activations/tanh/saturation/critic_head/fraction" in found
        assert "gradient_flow/relu/actor_mlp/3" in found
    cfg._clear_policy_hooks()
    hl.assert_no_hooks(policy, foreign=True)


def test_forward_hook_builder_of_ones_own():
    """A builder as the source shows one: state in the context, component registered, a closure that updates."""

    def attach_my_activation_hooks():
        def builder(component_name, context):
            state = context.model_metrics.get("relu_activation_state")
            if not isinstance(state, hl.metta.ReLUActivationState):
                state = hl.metta.ReLUActivationState()
                context.model_metrics["relu_activation_state"] = state
            if state.has_component(component_name):
                return None
            state.register_component(component_name)
            extract = hl.metta.build_extractor("actor_hidden")

            def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
                tensor = extract(output)
                if tensor is not None:
                    state.update(component_name, tensor.detach())

            return hook

        return builder

    cfg, policy, trainer = TrainTool(), actor_critic(), new_trainer()
    cfg.add_training_hook("actor_mlp", attach_my_activation_hooks())
    cfg.add_training_hook("actor_mlp", attach_my_activation_hooks())
    cfg._register_policy_hooks(policy=policy, trainer=trainer)
    assert len(cfg._active_policy_hooks) == 1
    output = policy.components["actor_mlp"](torch.randn(5, 4))
    expected = {
        f"activations/relu/actor_mlp/{unit}": share for unit, share in enumerate((output > 0).double().mean(0).tolist())
    }
    assert metrics(trainer.context) == pytest.approx(expected)


def test_backward_hook_builder_of_ones_own():
    """A builder as the source shows one: per-unit norms, reduced in the hook and moved to the host."""

    def attach_my_gradient_hooks(*, beta=0.95):
        def builder(component_name, context):
            state = context.model_metrics.setdefault("gradient_flow_state", hl.metta.GradientFlowState(beta=beta))

            def hook(module, grad_input, grad_output):
                if not grad_output or grad_output[0] is None:
                    return
                state.update(component_name, grad_output[0].detach().pow(2).mean(dim=0).sqrt().cpu())

            return hook

        return builder

    cfg, policy, trainer = TrainTool(), actor_critic(), new_trainer()
    cfg.add_training_backward_hook("critic_head", attach_my_gradient_hooks())
    cfg._register_policy_hooks(policy=policy, trainer=trainer)
    policy(torch.randn(5, 4)).sum().backward()
    assert metrics(trainer.context)["gradient_flow/critic_head/unit_0"] == pytest.approx(0.05)


def test_call_order():
    """The order of a run: built at set-up, forward hooks in order, backward hooks the other way round."""
    events: list[str] = []
    cfg, policy, trainer = TrainTool(), actor_critic(), new_trainer()

    def noting(kind: str):
        def builder(name, context):
            events.append(f"build {kind} {name}")
            return lambda *args: events.append(f"{kind} {name}")

        return builder

    cfg.add_training_hook("actor_mlp", noting("forward"))
    cfg.add_training_hook("critic_head", noting("forward"))
    cfg.add_training_backward_hook("actor_mlp", noting("backward"))
    cfg.add_training_backward_hook("critic_head", noting("backward"))
    assert events == []
    with cfg.attached(policy=policy, trainer=trainer):
        events.append("train")
        policy(torch.randn(5, 4)).sum().backward()
    policy(torch.randn(5, 4)).sum().backward()
    assert events == [
        "build forward actor_mlp",
        "build forward critic_head",
        "build backward actor_mlp",
        "build backward critic_head",
        "train",
        "forward actor_mlp",
        "forward critic_head",
        "backward critic_head",
        "backward actor_mlp",
    ]


# -- trackers, metrics and handles --------------------------------------------------------------------------


def test_an_unknown_component_is_a_key_error_directly_and_a_warning_when_stored():
    """Named in both; of the stored ones the others are attached."""
    policy, cfg = actor_critic(), TrainTool()
    with pytest.raises(KeyError, match=r"Component 'nobody' not found in policy\."):
        policy.register_component_hook_rule(component_name="nobody", hook=print)
    cfg.add_training_hook("nobody", attach_relu_activation_hooks())
    cfg.add_training_hook("actor_mlp", attach_relu_activation_hooks())
    with pytest.warns(hl.HooklineWarning, match="Component 'nobody' not found in policy"):
        cfg._register_policy_hooks(policy=policy, trainer=new_trainer())
    assert len(cfg._active_policy_hooks) == 1


def test_relu_metrics_and_their_reset():
    """1, 1/3, 2/3; after reset nothing, then from zero with the hook still on."""
    outputs = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 3.0]]), torch.ones(3), torch.tensor([[0.0, 1.0, 1.0]])
    policy, context = watched(Given(*outputs), attach_relu_activation_hooks())
    policy()
    policy()
    assert metrics(context) == {
        "activations/relu/c/0": 1.0,
        "activations/relu/c/1": 1 / 3,
        "activations/relu/c/2": 2 / 3,
    }
    context.model_metrics["relu_activation_state"].reset()
    assert metrics(context) == {}
    policy()
    assert metrics(context) == {"activations/relu/c/0": 0.0, "activations/relu/c/1": 1.0, "activations/relu/c/2": 1.0}


def test_saturation_is_strict():
    """tanh: .5, .5, 4 and 2; sigmoid: .05 and .95 are not saturated, .0499 and .951 are."""
    policy, context = watched(Given(torch.tensor([[0.95, 0.96], [-0.99, 0.0]])), attach_saturated_activation_hooks())
    policy()
    found = metrics(context)
    assert found["activations/tanh/saturated_fraction/c/0"] == found["activations/tanh/saturated_fraction/c/1"] == 0.5
    assert found["activations/tanh/saturation/c/total_neurons"] == 4.0
    assert found["activations/tanh/saturation/c/saturated_neurons"] == 2.0
    policy, context = watched(
        Given(torch.tensor([0.05, 0.95, 0.0499, 0.951])), attach_saturated_activation_hooks(activation="sigmoid")
    )
    policy()
    found = metrics(context)
    shares = [found[f"activations/sigmoid/saturated_fraction/c/{unit}"] for unit in range(4)]
    assert shares == [0.0, 0.0, 1.0, 1.0]


def test_fisher_metrics():
    """g=(1,2) twice: EMA .0975 g²; a parameter without gradient is dead, and counted only where there is one."""
    layer = nn.Linear(2, 1, bias=False)
    policy, context = watched(layer, attach_fisher_information_hooks(), "backward")
    for _ in range(2):
        policy.zero_grad()
        policy(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert metrics(context) == pytest.approx(
        {
            "fisher_info/c/c.weight/mean": 0.24375,
            "fisher_info/c/c.weight/trace": 0.4875,
            "fisher_info/c/c.weight/max": 0.39,
            "fisher_info/c/c.weight/dead": 0.0,
        }
    )
    policy.zero_grad()
    context.model_metrics["fisher_information_state"].reset()
    policy(torch.zeros(1, 2)).sum().backward()
    found = metrics(context)
    assert found["fisher_info/c/c.weight/dead"] == 1.0
    assert found["fisher_info/c/dead_fraction"] == found["fisher_info/c/dead_count"] == 1.0


@pytest.mark.parametrize("attached_by", ["policy", "hand"])
def test_fisher_of_a_first_layer_has_the_gradient_of_this_step(attached_by):
    """After step 1 (1-β)g₁², after step 2 with g₂; the input needs no gradient, .grad is None between."""
    layer, context = nn.Linear(3, 2, bias=False), hl.metta.ComponentContext()
    if attached_by == "policy":
        model, context = watched(layer, attach_fisher_information_hooks(beta=0.9), "backward")
    else:
        model = layer
        hl.attach(layer, attach_fisher_information_hooks(beta=0.9)("c", context), on="backward", observe=True)
    mean = torch.zeros(2, 3)
    for scale in (1.0, 2.0):
        model.zero_grad(set_to_none=True)
        (model(torch.ones(1, 3)) * scale).sum().backward()
        mean = 0.9 * mean + 0.1 * layer.weight.grad.square()
        assert metrics(context)["fisher_info/c/c.weight/trace"] == pytest.approx(mean.sum().item())


def test_fisher_of_accumulated_micro_batches_takes_each_by_itself():
    """g and then g: (1-β²)g², not (1-β)(β + 4)g²; documented at the builder."""
    policy, context = watched(nn.Linear(2, 1, bias=False), attach_fisher_information_hooks(beta=0.9), "backward")
    for _ in range(2):
        policy(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert metrics(context)["fisher_info/c/c.weight/trace"] == pytest.approx((1 - 0.81) * 5)
    assert "micro-batches each counts for" in attach_fisher_information_hooks.__doc__


def test_gradient_flow_metrics():
    """Gradients (1,0,2): mean .05, unit_0 .05, unit_2 .1, no unit_1, a third blocked."""
    policy, context = watched(Scale(1.0), attach_gradient_flow_hooks(), "backward")
    send_back(policy, torch.tensor([[1.0, 0.0, 2.0]]))
    assert metrics(context) == pytest.approx(
        {
            "gradient_flow/c/mean": 0.05,
            "gradient_flow/c/unit_0": 0.05,
            "gradient_flow/c/unit_2": 0.1,
            "gradient_flow/c/blocked_fraction": 1 / 3,
            "gradient_flow/c/active_fraction": 2 / 3,
        }
    )


def test_gradient_flow_of_sequences_has_features_as_units_and_bears_another_length():
    """(B,T,F): F units; the source has T, and raises in the backward pass when T changes."""
    policy, context = watched(Scale(1.0), attach_gradient_flow_hooks(beta=0), "backward")
    for length in (4, 6):
        send_back(policy, torch.ones(2, length, 3))
    assert [key for key in metrics(context) if "unit" in key] == [f"gradient_flow/c/unit_{unit}" for unit in range(3)]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (attach_relu_activation_hooks, "forward"),
        (attach_saturated_activation_hooks, "forward"),
        (attach_fisher_information_hooks, "backward"),
        (attach_gradient_flow_hooks, "backward"),
        (attach_relu_gradient_flow_hooks, "backward"),
    ],
)
@pytest.mark.parametrize("attached_by", ["tool", "hand"])
def test_a_tracker_that_is_registered_twice_updates_once_per_pass(make, kind, attached_by, monkeypatch):
    """Any kind; one update per parameter for Fisher, one per pass for the others."""
    counted: dict[int, int] = {}
    for times in (1, 2):
        policy, trainer, cfg = actor_critic(), new_trainer(), TrainTool()
        for _ in range(times):
            if attached_by == "hand":
                hook = make()("actor_mlp", trainer.context)
                if hook is not None:  # a second registration of a component is ignored
                    hl.attach(policy.actor_mlp, hook, on=kind, observe=True)
            elif kind == "forward":
                cfg.add_training_hook("actor_mlp", make())
            else:
                cfg.add_training_backward_hook("actor_mlp", make())
        cfg._register_policy_hooks(policy=policy, trainer=trainer)
        [state] = trainer.context.model_metrics.values()
        updates: list[str] = []
        own = state.update
        monkeypatch.setattr(
            state, "update", lambda *args, own=own, updates=updates: (updates.append(args[0]), own(*args))
        )
        for _ in range(3):
            policy(torch.randn(5, 4, requires_grad=True)).sum().backward()
        counted[times] = len(updates)
    assert counted[1] == counted[2] == (6 if make is attach_fisher_information_hooks else 3)


def test_attached_again_with_the_same_context_the_hooks_are_there():
    """The source loses them: its builders take the component for done."""
    cfg, policy, trainer = train(), actor_critic(), new_trainer()
    for _ in range(2):
        cfg._register_policy_hooks(policy=policy, trainer=trainer)
        assert (len(cfg._active_policy_hooks), len(cfg._active_policy_backward_hooks)) == (2, 3)
        policy(torch.randn(5, 4)).sum().backward()
        cfg._clear_policy_hooks()
    counted = trainer.context.model_metrics["relu_activation_state"]._kept
    assert counted["actor_mlp"]["samples"] == {"8": 10}


def test_relu_gradient_flow_metrics():
    policy, context = watched(Scale(1.0), attach_relu_gradient_flow_hooks(), "backward")
    send_back(policy, torch.tensor([[1e-9, 1.0], [0.0, -1.0]]))
    assert metrics(context) == {"gradient_flow/relu/c/0": 0.0, "gradient_flow/relu/c/1": 1.0}


def test_at_the_end_of_an_epoch_everything_is_emitted_once_and_reset():
    """One record per epoch, all trackers in it; the next has only what came since."""
    cfg, policy, trainer, sink = train(), actor_critic(), new_trainer(), hl.sinks.MemorySink()
    reporter = hl.metta.StatsReporter(trainer.context, sinks=[sink])
    with cfg.attached(policy=policy, trainer=trainer):
        policy(torch.randn(5, 4, requires_grad=True)).sum().backward()
        found = reporter.on_epoch_end(0)
    assert [record.metrics for record in sink.records] == [found]
    assert reporter.on_epoch_end(1) == {}


def test_an_exception_in_training_removes_all_handles_even_if_one_refuses(caplog):
    class Stuck(RemovableHandle):
        def remove(self):
            raise RuntimeError("stuck")

    cfg, policy = train(), actor_critic()

    def run() -> None:
        with cfg.attached(policy=policy, trainer=new_trainer()):
            cfg._active_policy_hooks.insert(1, Stuck(OrderedDict()))
            raise ZeroDivisionError

    with caplog.at_level(logging.CRITICAL, logger="hookline"), pytest.raises(ZeroDivisionError):
        run()
    hl.assert_no_hooks(policy, foreign=True)
    assert cfg._active_policy_hooks == cfg._active_policy_backward_hooks == []


# -- what upstream's own tests assert ----------------------------------------------------------------------


def test_upstream_two_registrations_are_two_distinct_handles():
    policy = actor_critic()
    first, second = (
        policy.register_component_hook_rule(component_name="actor_mlp", hook=lambda *_: None) for _ in range(2)
    )
    assert isinstance(first, RemovableHandle)
    assert isinstance(second, RemovableHandle)
    assert first is not second
    assert first != second


def test_upstream_a_state_of_the_wrong_type_has_no_metrics():
    context = hl.metta.ComponentContext()
    context.model_metrics["relu_activation_state"] = object()
    assert hl.metta.StatsReporter(context).on_epoch_end() == {}
    attach_relu_activation_hooks()("c", context)
    assert isinstance(context.model_metrics["relu_activation_state"], hl.metta.ReLUActivationState)


def test_upstream_statistics_of_weights():
    """Zero and half-zero layers: 5, 4, 0.8, 1.0, 0.5; biases 0, 5, -6: two thirds saturated."""
    model = nn.ModuleDict({"layer1": nn.Linear(4, 3), "layer2": nn.Linear(3, 2)})
    with torch.no_grad():
        model["layer1"].weight.zero_()
        model["layer2"].weight.copy_(torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
        model["layer1"].bias.copy_(torch.tensor([0.0, 5.0, -6.0]))
    stats = hl.metta.compute_dead_neuron_stats(model, threshold=1e-8)
    names = ("total_neurons", "dead_neurons", "fraction", "layer1", "layer2")
    assert [stats[f"weights/dead_neurons/{name}"] for name in names] == [5.0, 4.0, 0.8, 1.0, 0.5]
    for activation, threshold in (("tanh", 1e-2), ("sigmoid", 5e-2)):
        stats = hl.metta.compute_saturated_activation_stats(
            model["layer1"], activation=activation, derivative_threshold=threshold
        )
        assert stats[f"activations/{activation}/saturation/fraction"] == pytest.approx(2 / 3)
