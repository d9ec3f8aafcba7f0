"""A tracker that yields nothing although passes come through its component is named."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


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
