"""Compute statistics of the weights alone, without a forward: dead units, and activations saturated at their bias.

`StatsReporter` calls it, or the user. It reads the parameters with one transfer for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import OptionError
from hookline.metta.trackers import as_number, check_activation
from hookline.observe.host_values import fetch
from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules

__all__ = ["compute_dead_neuron_stats", "compute_saturated_activation_stats"]


def compute_dead_neuron_stats(policy: nn.Module, threshold: float = 1e-6) -> dict[str, float]:
    """Return the share of neurons of linear layers whose weights are all but zero.

    Recipe::

        hookline.metta.compute_dead_neuron_stats(model)["weights/dead_neurons/fraction"]

    A neuron is a row of an ``nn.Linear``; it is dead if the mean of its absolute weights is below the threshold. NaN
    and infinite weights count as zero.

    Args:
        policy: Any model; names are without the prefixes of wrappers.
        threshold: Above which a row is alive.

    Returns:
        ``weights/dead_neurons/{layer}`` (the fraction by layer, "/" for each dot of its name, ``root`` if the model is
        the layer) and ``…/total_neurons``, ``…/dead_neurons``, ``…/fraction``, ``…/active_fraction``; nothing if there
        is no linear layer.
    """
    _check_threshold("threshold", threshold)
    marked = _by_layer(policy, lambda layer: _mean_weights(layer) < threshold)
    return _fractions("weights/dead_neurons", "weights/dead_neurons", "dead_neurons", marked)


def compute_saturated_activation_stats(
    policy: nn.Module, activation: str, derivative_threshold: float = 1e-3
) -> dict[str, float]:
    """Return the share of neurons of linear layers that would be saturated if their input were zero.

    Recipe::

        hookline.metta.compute_saturated_activation_stats(model, "tanh")["activations/tanh/saturation/fraction"]

    A neuron is saturated if the derivative of the activation at its bias is below the threshold; without a bias, it is
    taken at zero.

    Args:
        policy: Any model; names are without the prefixes of wrappers.
        activation: ``"tanh"`` or ``"sigmoid"``.
        derivative_threshold: Below which a neuron is saturated.

    Returns:
        ``activations/{activation}/saturated_fraction/{layer}``, and under ``activations/{activation}/saturation`` the
        ``total_neurons``, ``saturated_neurons``, ``fraction`` and ``active_fraction``; nothing if there is no linear
        layer. `SaturatedActivationState` uses the same names for what it has counted: keep them apart.
    """
    check_activation(activation)
    _check_threshold("derivative_threshold", derivative_threshold)
    prefix = f"activations/{activation}"
    marked = _by_layer(policy, lambda layer: _slope(activation, _bias(layer)) < derivative_threshold)
    return _fractions(f"{prefix}/saturated_fraction", f"{prefix}/saturation", "saturated_neurons", marked)


def _by_layer(policy: nn.Module, marks: Callable[[nn.Linear], Tensor]) -> dict[str, tuple[int, int]]:
    """Return, by layer, how many neurons are marked, and how many there are."""
    with torch.no_grad():
        marked = {name: marks(layer) for name, layer in _linear_layers(policy)}
        counts = fetch(mark.sum() for mark in marked.values())
    return {name: (count, mark.numel()) for (name, mark), (count,) in zip(marked.items(), counts, strict=True)}


def _fractions(by_layer: str, altogether: str, noun: str, marked: dict[str, tuple[int, int]]) -> dict[str, float]:
    if not marked:
        return {}
    metrics = {f"{by_layer}/{name.replace('.', '/') or 'root'}": hits / total for name, (hits, total) in marked.items()}
    hits, total = (sum(column) for column in zip(*marked.values(), strict=True))
    metrics |= {f"{altogether}/total_neurons": float(total), f"{altogether}/{noun}": float(hits)}
    return metrics | {f"{altogether}/fraction": hits / total, f"{altogether}/active_fraction": 1.0 - hits / total}


def _linear_layers(policy: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in clean_modules(policy):
        if isinstance(module, nn.Linear) and not is_lazy(module.weight) and module.weight.numel():
            yield name, module


def _mean_weights(layer: nn.Linear) -> Tensor:
    weight: Tensor = _torch.local_tensor(layer.weight)
    return weight.detach().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().mean(1)  # (units,)


def _bias(layer: nn.Linear) -> Tensor:
    if layer.bias is None:
        return layer.weight.new_zeros(layer.out_features, dtype=torch.float32)
    bias: Tensor = _torch.local_tensor(layer.bias)
    return bias.detach().float()


def _slope(activation: str, x: Tensor) -> Tensor:
    return 1 - x.tanh().square() if activation == "tanh" else x.sigmoid() * (1 - x.sigmoid())


def _check_threshold(name: str, value: float) -> None:
    if not as_number(value) > 0:
        raise OptionError(f"{name}= must be a number above 0, got {value!r}.")
