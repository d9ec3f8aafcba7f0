"""TrainTool: builders stored, attached when there is a policy, cleared however the run ends."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl


def make_policy() -> hl.metta.PolicyAutoBuilder:
    """Two components."""
    return hl.metta.PolicyAutoBuilder(OrderedDict(actor_mlp=nn.Linear(3, 4), critic_head=nn.Linear(4, 1)))


def new_trainer() -> SimpleNamespace:
    """Whatever has a context."""
    return SimpleNamespace(context=hl.metta.ComponentContext())


def noting(events: list[str], label: str):
    """A builder whose hook notes its label, and that notes when it is called."""

    def builder(name, context):
        events.append(f"built {label} for {name}")
        return lambda *args: events.append(label)

    return builder


def test_a_model_without_components_is_warned_of_and_left_alone():
    """With the way to make it a policy; without stored hooks there is nothing to warn of."""
    tool, model = hl.metta.TrainTool(), nn.Linear(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tool._register_policy_hooks(policy=model, trainer=new_trainer())
    tool.add_training_hook("actor_mlp", hl.metta.attach_relu_activation_hooks())
    with pytest.warns(
        hl.HooklineWarning, match=r"a Linear has no components; hand over PolicyAutoBuilder.of\(policy\)"
    ):
        tool._register_policy_hooks(policy=model, trainer=new_trainer())
    hl.assert_no_hooks(model)


def test_a_wrapped_policy_is_hooked_inside():
    """torch.compile and DataParallel are around it; its components are found."""
    for wrap in (lambda policy: torch.compile(policy, backend="eager"), nn.DataParallel):
        tool, events, policy = hl.metta.TrainTool(), [], make_policy()
        tool.add_training_hook("actor_mlp", noting(events, "fired"))
        wrapped = wrap(policy)
        tool._register_policy_hooks(policy=wrapped, trainer=new_trainer())
        wrapped(torch.ones(1, 3))
        assert events == ["built fired for actor_mlp", "fired"]


def test_if_a_builder_raises_nothing_stays_attached():
    """The hook of the first is off again."""

    def broken(component, context):
        raise hl.errors.OptionError("not this one")

    tool, policy = hl.metta.TrainTool(), make_policy()
    tool.add_training_hook("actor_mlp", hl.metta.attach_relu_activation_hooks())
    tool.add_training_backward_hook("actor_mlp", broken)
    with pytest.raises(hl.errors.OptionError, match="not this one"):
        tool._register_policy_hooks(policy=policy, trainer=new_trainer())
    assert tool._active_policy_hooks == tool._active_policy_backward_hooks == []
    hl.assert_no_hooks(policy)
