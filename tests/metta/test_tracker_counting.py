"""Trackers that count by unit, and which tensor of an output a tracker looks at."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from helpers_threads import in_threads
from torch import nn

import hookline as hl

COUNTING = {
    "relu": hl.metta.ReLUActivationState,
    "tanh": lambda: hl.metta.SaturatedActivationState("tanh"),
    "relu gradient": hl.metta.ReLUGradientFlowState,
}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize(
    "nothing",
    [
        torch.tensor(2.0),
        torch.zeros(0, 3),
        torch.zeros(3, 0),
        torch.zeros(0),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.complex64),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, device="meta"),
        None,
        "text",
        (torch.ones(2, 3),),
    ],
    ids=["0-d", "no rows", "no width", "empty", "int", "bool", "complex", "sparse", "meta", "None", "text", "tuple"],
)
def test_what_cannot_be_counted_changes_nothing(make, nothing):
    """After a real tensor, one that is passed over leaves the metrics as they were."""
    state = make()
    state.update("c", torch.tensor([[2.0, 0.0, 0.0]]))
    before = state.to_metrics()
    state.update("c", nothing)
    assert state.to_metrics() == before != {}


def test_counts_are_exact_past_2_to_the_24():
    """One hit in each of many updates on top of 2^24: a float32 counter would stand still."""
    state = hl.metta.ReLUActivationState()
    state.update("c", torch.ones(2**24, 1))
    for _ in range(3):
        state.update("c", torch.ones(1))
    state.update("c", torch.zeros(1))
    assert state.to_metrics()["activations/relu/c/0"] == (2**24 + 3) / (2**24 + 4)


def test_no_count_is_lost_between_threads():
    """Four threads on one tracker: one at a time changes its counters, and all are counted."""
    inside, met = [], []

    class Slow(hl.metta.ReLUActivationState):
        def _is_hit(self, tensor):
            inside.append(threading.get_ident())
            time.sleep(0.001)  # let the others come
            met.append(len(inside))
            inside.remove(threading.get_ident())
            return super()._is_hit(tensor)

    state = Slow()
    in_threads(lambda _: [state.update("c", torch.tensor([1.0, 0.0])) for _ in range(20)], 4)
    assert set(met) == {1}
    assert state._kept["c"]["samples"] == {"2": 80}
    assert state.to_metrics() == {"activations/relu/c/0": 1.0, "activations/relu/c/1": 0.0}


@pytest.mark.parametrize("value", [1, -0.5, float("nan"), "0.9", None, True])
def test_options_outside_of_0_to_1_are_refused(value):
    """A share of the old mean, the threshold of saturation; of a sigmoid, one that would mark everything."""
    for make in (hl.metta.FisherInformationState, hl.metta.attach_gradient_flow_hooks):
        with pytest.raises(hl.errors.OptionError, match="beta="):
            make(beta=value)
    with pytest.raises(hl.errors.OptionError, match="saturation_threshold="):
        hl.metta.attach_saturated_activation_hooks(saturation_threshold=value)
    with pytest.raises(hl.errors.OptionError, match="sigmoid"):
        hl.metta.SaturatedActivationState("sigmoid", saturation_threshold=0.5)
    with pytest.raises(hl.errors.OptionError, match="threshold="):
        hl.metta.compute_dead_neuron_stats(nn.Linear(1, 1), -1.0)


X = torch.ones(2, 3)


class LikeATensorDict:
    """Has keys and values, and is no Mapping; raises KeyError for what it does not have."""

    def __init__(self, **values):
        self.values = values

    def keys(self):
        return self.values.keys()

    def __getitem__(self, key):
        if isinstance(key, tuple):
            found = self
            for part in key:
                found = found[part]
            return found
        return self.values[key]


def test_a_tuple_is_the_key_of_a_nested_tensordict():
    """("a", "b") is looked up as one key."""
    assert hl.metta.build_extractor(("a", "b"))(LikeATensorDict(a=LikeATensorDict(b=X))) is X


@pytest.mark.parametrize(
    "output",
    [{"other": X}, {"hidden": "text"}, {"hidden": None}, LikeATensorDict(other=X), (X, X), [X], None, 3, "text"],
    ids=["missing", "text inside", "None inside", "missing in TensorDict", "tuple", "list", "None", "number", "text"],
)
def test_a_key_passes_over_what_it_cannot_find(output):
    """A missing key, a value that is no tensor, an output without keys: None."""
    assert hl.metta.build_extractor("hidden")(output) is None
