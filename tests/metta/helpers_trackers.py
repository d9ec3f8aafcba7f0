"""A small policy, a tool with every tracker on it, and a training run, for the tests of builders and hooks."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl

__all__ = ["BUILDERS", "make_policy", "make_tool", "new_trainer", "train"]

BUILDERS = {
    "relu": ("forward", hl.metta.attach_relu_activation_hooks),
    "tanh": ("forward", hl.metta.attach_saturated_activation_hooks),
    "sigmoid": (
        "forward",
        lambda **options: hl.metta.attach_saturated_activation_hooks(activation="sigmoid", **options),
    ),
    "fisher": ("backward", hl.metta.attach_fisher_information_hooks),
    "flow": ("backward", hl.metta.attach_gradient_flow_hooks),
    "relu flow": ("backward", hl.metta.attach_relu_gradient_flow_hooks),
}
"""By name: the kind of hook it makes, and the function that makes the builder."""


def new_trainer() -> SimpleNamespace:
    """Whatever has a context."""
    return SimpleNamespace(context=hl.metta.ComponentContext())


def make_policy() -> hl.metta.PolicyAutoBuilder:
    """Dropout, BatchNorm and an in-place ReLU, always with the same weights."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3))
    head = nn.Sequential(nn.Linear(16, 3), nn.Tanh())
    return hl.metta.PolicyAutoBuilder(OrderedDict(body=body, head=head)).train()


def make_tool(*names: str, components: tuple[str, ...] = ("body", "head"), times: int = 1) -> hl.metta.TrainTool:
    """A tool with those trackers on each of the components."""
    tool = hl.metta.TrainTool()
    for name in names:
        kind, make = BUILDERS[name]
        add = tool.add_training_hook if kind == "forward" else tool.add_training_backward_hook
        for component in components:
            for _ in range(times):
                add(component, make())
    return tool


def train(
    tool: hl.metta.TrainTool, steps: int = 20, compiled: bool = False
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train with AdamW from the same seed; everything the run leaves behind, and the metrics of its trackers."""
    policy, trainer = make_policy(), new_trainer()
    reporter = hl.metta.StatsReporter(trainer.context)
    model = torch.compile(policy, backend="aot_eager", fullgraph=True) if compiled else policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    losses = []
    with tool.attached(policy=policy, trainer=trainer):
        for _ in range(steps):
            optimizer.zero_grad()
            x, target = torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data)
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        metrics = reporter.on_epoch_end()
    left = {f"state {name}": value.clone() for name, value in policy.state_dict().items()}
    for name, parameter in policy.named_parameters():
        left[f"grad {name}"] = parameter.grad
        left |= {f"{key} {name}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    return left | {"losses": torch.stack(losses), "random": torch.get_rng_state()}, metrics
