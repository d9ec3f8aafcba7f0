"""What the weights alone tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl


def two_layers() -> nn.Module:
    """Three dead neurons of three, one of two."""
    model = nn.Sequential()
    model.layer1, model.layer2 = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.layer1.weight.zero_()
        model.layer2.weight.copy_(torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
    return model


def biased() -> nn.Module:
    """Three neurons with the biases 0, 5 and -6."""
    model = nn.Sequential()
    model.linear = nn.Linear(2, 3)
    with torch.no_grad():
        model.linear.bias.copy_(torch.tensor([0.0, 5.0, -6.0]))
    return model


def test_dead_neurons_by_layer_and_altogether():
    """Of five neurons four are dead: all of the first layer, half of the second."""
    assert hl.metta.compute_dead_neuron_stats(two_layers(), 1e-8) == pytest.approx(
        {
            "weights/dead_neurons/layer1": 1.0,
            "weights/dead_neurons/layer2": 0.5,
            "weights/dead_neurons/total_neurons": 5.0,
            "weights/dead_neurons/dead_neurons": 4.0,
            "weights/dead_neurons/fraction": 0.8,
            "weights/dead_neurons/active_fraction": 0.2,
        }
    )


@pytest.mark.parametrize(("activation", "threshold"), [("tanh", 1e-2), ("sigmoid", 5e-2)])
def test_saturation_at_the_bias(activation, threshold):
    """Biases 0, 5, -6: two of three are saturated."""
    stats = hl.metta.compute_saturated_activation_stats(biased(), activation=activation, derivative_threshold=threshold)
    assert stats == pytest.approx(
        {
            f"activations/{activation}/saturated_fraction/linear": 2 / 3,
            f"activations/{activation}/saturation/total_neurons": 3.0,
            f"activations/{activation}/saturation/saturated_neurons": 2.0,
            f"activations/{activation}/saturation/fraction": 2 / 3,
            f"activations/{activation}/saturation/active_fraction": 1 / 3,
        }
    )


def test_a_layer_without_bias_is_not_saturated():
    """Its bias counts as zero, where both functions are steepest."""
    stats = hl.metta.compute_saturated_activation_stats(nn.Linear(2, 3, bias=False), "tanh")
    assert stats["activations/tanh/saturated_fraction/root"] == 0.0
    assert stats["activations/tanh/saturation/total_neurons"] == 3.0


def test_weights_that_are_no_numbers_count_as_zero():
    """A row of NaN and infinities is dead, a row with one more is not."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[math.nan, math.inf, -math.inf], [math.nan, 1.0, 0.0]]))
    assert hl.metta.compute_dead_neuron_stats(layer)["weights/dead_neurons/root"] == 0.5


def test_names_are_those_without_wrappers_and_with_slashes():
    """A compiled model has the names of the model in it."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    plain = hl.metta.compute_dead_neuron_stats(model)
    assert "weights/dead_neurons/0/0" in plain
    assert hl.metta.compute_dead_neuron_stats(torch.compile(model, backend="eager")) == plain


def test_half_precision_weights_are_judged_in_float32():
    """All weights zero, the threshold 1e-9: in float16 that is zero too, and zero is not below it."""
    layer = nn.Linear(10, 1).half()
    with torch.no_grad():
        layer.weight.zero_()
    assert hl.metta.compute_dead_neuron_stats(layer, 1e-9)["weights/dead_neurons/root"] == 1.0


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(1, 1, 1), nn.Sequential, lambda: nn.LazyLinear(3)])
def test_a_model_without_linear_weights_has_no_statistics(make):
    """A convolution, nothing, a layer that has no shape yet."""
    assert hl.metta.compute_dead_neuron_stats(make()) == {}


def test_thresholds_may_be_numpys():
    """A float32 is a number."""
    assert hl.metta.compute_dead_neuron_stats(two_layers(), np.float32(1e-6)) == hl.metta.compute_dead_neuron_stats(
        two_layers()
    )


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan"), "1e-6"])
def test_a_threshold_that_is_not_above_zero_is_refused(threshold):
    """The message has the value."""
    with pytest.raises(hl.errors.OptionError, match="threshold= must be a number above 0, got " + repr(threshold)):
        hl.metta.compute_dead_neuron_stats(nn.Linear(1, 1), threshold)
    with pytest.raises(hl.errors.OptionError, match="derivative_threshold= .* got " + repr(threshold)):
        hl.metta.compute_saturated_activation_stats(nn.Linear(1, 1), "tanh", threshold)
