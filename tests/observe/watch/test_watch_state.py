"""A watch that is saved goes on where it was: numbers, steps, schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

_HOW: dict[str, dict[str, Any]] = {
    "forwards": {},
    "every third": {"every": 3},
    "by unit": {"stats": ("mean", "dead_fraction", "histogram")},
    "optimizer": {"optimizer": True, "on": ("forward", "backward", "param", "param_grad"), "every": 2},
}


def _made(how: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, hl.Watch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {**how, **({"optimizer": optimizer} if "optimizer" in how else {})}
    return model, optimizer, hl.watch(model, "#", **options)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", _HOW)
def test_a_watch_goes_on_from_its_state(name: str) -> None:
    """In another process, so to say: the metrics are those of the watch that was never saved."""
    batches = list(torch.randn(11, 5, 4, generator=torch.Generator().manual_seed(1)))
    model, optimizer, whole = _made(_HOW[name])
    _steps(model, optimizer, batches[:5])
    state, weights = whole.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    _steps(model, optimizer, batches[5:])

    other, its_optimizer, resumed = _made(_HOW[name])
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    _steps(other, its_optimizer, batches[5:])
    assert resumed.to_metrics() == whole.to_metrics()
    assert resumed.steps == whole.steps

    anew, another_optimizer, without = _made(_HOW[name])  # the negative control
    anew.load_state_dict(weights)
    _steps(anew, another_optimizer, batches[5:])
    assert without.to_metrics() != whole.to_metrics()
    for watch in (whole, resumed, without):
        watch.remove()


def test_steps_counted_by_hand_stay_so() -> None:
    """``watch.step()`` was called before, so a forward is none."""
    _, _, watch = _made({"every": 2})
    watch.step()
    watch.step()
    _, _, resumed = _made({"every": 2})
    resumed.load_state_dict(watch.state_dict())
    assert (resumed.steps, resumed.step_is) == (2, watch.step_is)
    for each in (watch, resumed):
        each.remove(quiet=True)
