"""What the weights alone tell."""

from __future__ import annotations

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


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan"), "1e-6"])
def test_a_threshold_that_is_not_above_zero_is_refused(threshold):
    """The message has the value."""
    with pytest.raises(hl.errors.OptionError, match="threshold= must be a number above 0, got " + repr(threshold)):
        hl.metta.compute_dead_neuron_stats(nn.Linear(1, 1), threshold)
    with pytest.raises(hl.errors.OptionError, match="derivative_threshold= .* got " + repr(threshold)):
        hl.metta.compute_saturated_activation_stats(nn.Linear(1, 1), "tanh", threshold)
