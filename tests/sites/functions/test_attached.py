"""Hooks that are on no model: ``attached()`` lists what the process carries, ``attached(optimizer)`` what that does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_functions import Pair
from torch import nn

import hookline as hl


def nothing(*args: Any) -> None:
    """Takes anything."""


def test_what_is_on_no_model_is_listed_oldest_first() -> None:
    """Functions, operators, classes, every module, every optimizer, everything that is built; each comes off."""
    assert hl.attached() == []
    handles = [
        hl.attach_function("*.relu", nothing),
        hl.attach_function(["aten.mm.default", "aten.exp.default"], nothing),
        hl.attach_function(Pair, nothing),
        hl.attach_everywhere(nothing),
        hl.attach_everywhere(nothing, on="step_pre"),
        hl.attach_everywhere(nothing, on="register_module"),
    ]
    assert hl.attached() == handles
    for handle in hl.attached():
        handle.remove(quiet=True)
    assert hl.attached() == []


@pytest.mark.parametrize("target", [torch.relu, "aten.mm.default", Pair], ids=["function", "operator", "class"])
def test_what_is_bound_to_a_model_is_listed_with_the_model(target: Any) -> None:
    """And not with the process."""
    model = nn.Linear(2, 2)
    handle = hl.attach_function(target, nothing, within=model)
    assert hl.attached() == []
    assert hl.attached(model) == [handle]
    handle.remove()
    assert hl.attached(model) == []


def test_an_optimizer_lists_its_own() -> None:
    """Those on every optimizer are the process's."""
    model = nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    first = hl.attach_optimizer(optimizer, nothing)
    second = hl.attach_optimizer(optimizer, nothing, on="step_pre")
    everywhere = hl.attach_everywhere(nothing, on="step_post")
    optimizer.step()
    assert hl.attached(optimizer) == [first, second]
    assert hl.attached(other) == hl.attached(model) == []
    assert hl.attached() == [everywhere]
    for handle in (first, second, everywhere):
        handle.remove()
    assert hl.attached(optimizer) == hl.attached() == []
