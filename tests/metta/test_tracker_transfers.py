"""Nothing of a tracker crosses to the host before it is asked, and then everything at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl
from hookline.observe.host_values import fetch

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_to_copy.cpu")


class Watching(TorchDispatchMode):
    """Notes every operation that would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in READS) and "nonzero_static" not in str(func):
            self.read.append(str(func))
        return func(*args, **(kwargs or {}))


STATES = {
    "relu": hl.metta.ReLUActivationState,
    "tanh": lambda: hl.metta.SaturatedActivationState("tanh"),
    "sigmoid": lambda: hl.metta.SaturatedActivationState("sigmoid"),
    "fisher": hl.metta.FisherInformationState,
    "flow": hl.metta.GradientFlowState,
    "relu flow": hl.metta.ReLUGradientFlowState,
}


@pytest.mark.parametrize("name", STATES)
def test_an_update_reads_nothing_back(name):
    """No operation that reads a number off the device, for tensors of any shape, growing or not."""
    state, watching = STATES[name](), Watching()
    with watching:
        for shape in ((3,), (2, 3), (2, 5), (2, 7, 5), (2, 3, 4, 4)):
            state.update("c", torch.ones(shape, dtype=torch.bfloat16))
        state.reset()
    assert watching.read == []


def test_the_watching_can_see_a_read():
    """Control: .item() is noticed."""
    watching = Watching()
    with watching:
        torch.ones(1).item()
    assert watching.read != []


@pytest.mark.parametrize("name", STATES)
def test_all_components_and_units_come_in_one_transfer(name, monkeypatch):
    """Three components of different widths: tolist is called once."""
    state = STATES[name]()
    for width, component in enumerate("abc", start=1):
        state.update(component, torch.ones(2, width))
    calls = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(self.shape) or own(self))
    metrics = state.to_metrics()
    assert len(calls) == 1
    assert all(any(f"/{component}/" in key for key in metrics) for component in "abc")


def test_fetch_takes_one_transfer_per_device_and_type():
    """Two types in turns: the numbers come back in the order they were given."""
    tensors = [torch.ones(2), torch.tensor([3]), torch.zeros(0), torch.tensor([[4.0], [5.0]]), torch.tensor(6)]
    assert fetch(tensors) == [[1.0, 1.0], [3], [], [4.0, 5.0], [6]]
