"""A step that does not repeat is found at its first operator."""

from __future__ import annotations

import pytest
import torch
from helpers_house import differences, fingerprint
from torch import Tensor, nn

import hookline as hl
from hookline.debug import replay_check


class Unsteady(nn.Module):
    """Adds a little that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        OUTSIDE["calls"] += 1
        return self.linear(x) * (1 + 1e-7 * (OUTSIDE["calls"] == 3))


OUTSIDE = {"calls": 0}


def test_a_step_that_does_not_repeat_is_told_with_the_first_operator_that_differs() -> None:
    """Equal runs are said to be equal; the run is as it was before, gradients and random streams included."""
    torch.manual_seed(0)
    OUTSIDE["calls"] = 0
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Sequential(nn.Tanh(), Unsteady()), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(4, 8)
    step(batch)
    OUTSIDE["calls"] = -100
    before = fingerprint(model, optimizer, [torch.zeros(1)])
    same = replay_check(step, model, optimizer, batch, times=3)
    assert same
    assert "3 runs of the step are equal" in str(same)
    assert same.compared > 60
    OUTSIDE["calls"] = 0
    found = replay_check(step, model, optimizer, batch, times=4)
    assert differences(before, fingerprint(model, optimizer, [torch.zeros(1)])) == []
    assert not found
    assert found.run == 2
    assert (found.operator, found.where) == ("aten.mul.Tensor", "forward of '2.1'")
    assert "in forward: return self.linear(x) * (1" in found.source
    hl.assert_no_hooks(model)
    with pytest.raises(hl.errors.OptionError, match="times="):
        replay_check(step, model, optimizer, batch, times=1)
