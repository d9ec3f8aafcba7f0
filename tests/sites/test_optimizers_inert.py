"""The house test for hooks on optimizers: training ends with the same bits, for every kind and implementation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_training import nested_differences
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import hookline as hl
from hookline.sites.kinds import OPTIMIZER

KINDS = [kind.value for kind in OPTIMIZER.args]
STEPS = 24


def train(kinds: list[str], hook: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train through dropout and BatchNorm; save and load the optimizer's state now and then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    handles = [hl.attach_optimizer(optimizer, hook, on=kind, observe=kind == "step_pre") for kind in kinds]
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(12, 8)).square().mean().backward()
        optimizer.step()
        if step % 5 == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(handle.report().fired >= STEPS // 5 for handle in handles)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}


def ignore(*args: object) -> None:
    """Do nothing, as a hook of any kind."""


def read_all(optimizer: Optimizer, *args: object, site: hl.sites.OptimizerSite) -> float:
    """Read every tensor of the optimizer, and return a value that must not matter."""
    tensors = [param for group in optimizer.param_groups for param in group["params"]]
    tensors += [param.grad for param in tensors if param.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.detach().float().norm().item() for tensor in tensors)


def read_quietly(optimizer: Optimizer, *args: object, site: hl.sites.OptimizerSite) -> None:
    """Read the same, for kinds whose return value counts."""
    read_all(optimizer, *args, site=site)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_training_with_observers_of_every_kind_ends_with_the_same_bits(options: dict[str, Any]) -> None:
    """Weights, buffers, optimizer state and the random stream after two dozen AdamW steps."""
    plain = train([], ignore, options)
    assert nested_differences(train(KINDS, read_quietly, options), plain) == []
    assert nested_differences(train(["step_pre", "step_post"], read_all, options), plain) == []
    with (
        hl.attach_everywhere(read_all, on="step_pre", observe=True),
        hl.attach_everywhere(read_all, on="step_post"),
    ):
        assert nested_differences(train([], ignore, options), plain) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_draws_one_random_number_is_found_out(kind: str) -> None:
    """The negative control: the comparison can fail, in the weights too."""

    def draw(*args: object) -> None:
        torch.rand(1)

    found = nested_differences(train([kind], draw, {}), train([], ignore, {}))
    assert "/random" in found
    assert "/model/0.weight" in found
