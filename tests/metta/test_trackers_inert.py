"""A run that is tracked ends with the same bits as one that is not."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers_house import differences
from helpers_trackers import BUILDERS, make_tool, train
from torch import Tensor

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:Component 'body' gave ReLUGradientFlowState nothing")
"""Its input is data, so no gradient comes out of it; that this is said is tested in test_silent_trackers."""


@functools.cache
def bare(compiled: bool = False) -> dict[str, Tensor]:
    """What the run leaves behind without trackers."""
    return train(hl.metta.TrainTool(), compiled=compiled)[0]


def test_training_with_all_trackers_twice_ends_with_the_same_bits():
    """Every tracker on every component, each registered twice; the numbers are those of once."""
    left, metrics = train(make_tool(*BUILDERS, times=2))
    assert differences(left, bare()) == []
    assert metrics == train(make_tool(*BUILDERS))[1]


@pytest.mark.slow
def test_compiled_training_with_all_trackers_ends_with_the_same_bits():
    """Under aot_eager, in one graph, each registered twice; the numbers are those of once in an eager run."""
    left, metrics = train(make_tool(*BUILDERS, times=2), steps=3, compiled=True)
    assert differences(left, train(hl.metta.TrainTool(), steps=3, compiled=True)[0]) == []
    assert metrics == pytest.approx(train(make_tool(*BUILDERS), steps=3)[1], rel=1e-4, abs=1e-6)


def test_a_builder_that_draws_a_random_number_is_found_out():
    """Control: the comparison sees one draw in one hook, in the random stream and in the weights."""
    tool = hl.metta.TrainTool()
    drawn: list[Tensor] = []
    tool.add_training_hook("body", lambda name, context: lambda module, args, output: drawn.append(torch.rand(())))
    found = differences(train(tool)[0], bare())
    assert "random" in found
    assert "state head.0.weight" in found
