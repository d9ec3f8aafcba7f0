"""A tracker that yields nothing although passes come through its component says why, once."""

from __future__ import annotations

import re
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


class Numbers(nn.Module):
    """Gives out whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


BACKWARD = {
    "relu flow": hl.metta.attach_relu_gradient_flow_hooks,
    "flow": hl.metta.attach_gradient_flow_hooks,
    "fisher": hl.metta.attach_fisher_information_hooks,
}


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def run(component: str, builder: Any, kind: str, modules: OrderedDict[str, nn.Module], steps: int = 3) -> list[str]:
    """Train in a loop of one's own, two epochs; the warnings that came."""
    torch.manual_seed(0)
    policy = hl.metta.PolicyAutoBuilder(modules, forward=_forward)
    context = hl.metta.ComponentContext()
    tool, reporter = hl.metta.TrainTool(), hl.metta.StatsReporter(context)
    add = tool.add_training_hook if kind == "forward" else tool.add_training_backward_hook
    add(component, builder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tool.attached(policy=policy, trainer=SimpleNamespace(context=context)):
            for _ in range(2):
                for _ in range(steps):
                    policy(torch.randn(6, 4)).backward()
                reporter.on_epoch_end()
    return [str(each.message) for each in caught if "nothing" in str(each.message)]


def _forward(modules: dict[str, nn.Module], x: Tensor) -> Tensor:
    for module in modules.values():
        given = module(x)
        x = given[1] if isinstance(given, tuple) else x if given.dtype == torch.int64 else given
    return x.square().mean()


def test_a_relu_tracker_on_the_first_component_of_the_default_policy_says_why_it_has_nothing() -> None:
    """TrainTool's own policy: no gradient comes out of its first component, whose input is data."""
    tool = hl.metta.TrainTool(epochs=2)
    tool.add_training_backward_hook("actor_mlp", hl.metta.attach_relu_gradient_flow_hooks())
    with pytest.warns(hl.HooklineWarning, match=r"Component 'actor_mlp' gives ReLUGradientFlowState nothing: its"):
        trainer = tool.invoke()
    assert not any("relu" in key for metrics in trainer.metrics for key in metrics)


@pytest.mark.parametrize(
    ("component", "builder", "kind", "why"),
    [
        (
            "first",
            "relu flow",
            "backward",
            r"needs no gradient \(it is data.*ReLU \('first\.1' in PolicyAutoBuilder",
        ),
        ("pair", "flow", "backward", "no gradient comes to its first output"),
        ("pair", "relu", "forward", r"a tuple, in which extractor='actor_hidden' finds no tensor; give extractor="),
        ("numbers", "relu", "forward", r"\(torch\.int64, shape \(6,\)\) has no real numbers to count"),
        ("relu", "fisher", "backward", "it has no parameters; hook a component that is trained"),
        ("frozen", "fisher", "backward", "none of its parameters requires a gradient"),
    ],
)
def test_one_warning_names_component_tracker_and_remedy(component: str, builder: str, kind: str, why: str) -> None:
    """At the end of the first epoch, and not again."""
    modules = OrderedDict(
        first=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        frozen=frozen(nn.Linear(4, 4)),
        relu=nn.ReLU(),
        numbers=Numbers(),
        pair=Pair(),
    )
    make = BACKWARD.get(builder, hl.metta.attach_relu_activation_hooks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (text,) = run(component, make(), kind, modules)
    assert text.startswith(f"Component {component!r} gives ")
    assert re.search(why, text), text


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
