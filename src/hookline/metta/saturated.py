"""How often the units behind a tanh or a sigmoid are at its flat ends.

Fed with activations by ``attach_saturated_activation_hooks``.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any, Final

from torch import Tensor

from hookline.errors import OptionError
from hookline.metta.counting import CountingTracker
from hookline.metta.tracked_components import UnitOptions, as_number, as_plain

__all__ = ["ACTIVATIONS", "SaturatedActivationState", "check_activation"]

ACTIVATIONS: Final = ("tanh", "sigmoid")


def check_activation(activation: str) -> None:
    """Raise unless it is one we know."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"Unsupported activation '{activation}'. Expected 'tanh' or 'sigmoid'.")


@dataclasses.dataclass(frozen=True, slots=True)
class _SaturationOptions(UnitOptions):
    saturation_threshold: float = 0.95
    activation: str = "tanh"

    def __post_init__(self) -> None:
        UnitOptions.__post_init__(self)
        threshold = as_number(self.saturation_threshold)
        if threshold is None or not 0 < threshold < 1:
            raise OptionError(f"saturation_threshold= must lie between 0 and 1, got {self.saturation_threshold!r}.")
        if self.activation == "sigmoid" and threshold <= 0.5:
            raise OptionError(
                f"saturation_threshold= of a sigmoid must be above 0.5, got {self.saturation_threshold!r}: what is "
                "above it or below one minus it is saturated, which would be everything."
            )
        as_plain(self, saturation_threshold=threshold)


class SaturatedActivationState(CountingTracker[_SaturationOptions]):
    """By unit, the share of samples in which the activation is saturated; the same for components and altogether.

    Recipe::

        state = hookline.metta.SaturatedActivationState("tanh")
        state.update("critic_head", torch.tensor([[0.95, 0.96], [-0.99, 0.0]]))
        state.to_metrics()["activations/tanh/saturation/critic_head/fraction"]  # 0.5

    A tanh is saturated where its absolute value is above the threshold, a sigmoid where it is above the threshold or
    below one minus it; the threshold itself is not. Values are compared in their own type, so in bfloat16 the threshold
    is the bfloat16 nearest to it.

    Args:
        activation: ``"tanh"`` or ``"sigmoid"``.
        saturation_threshold: Strictly between 0 and 1, for a sigmoid above 0.5.
        unit_dim: The dimension whose entries are the units, as for `ReLUActivationState`.
    """

    def __init__(self, activation: str, saturation_threshold: float = 0.95, *, unit_dim: int | None = None) -> None:
        check_activation(activation)
        super().__init__(_SaturationOptions(unit_dim, None, saturation_threshold, activation))
        self.activation = activation

    @property
    def saturation_threshold(self) -> float:
        """The threshold of components that were not given one of their own."""
        return self._defaults.saturation_threshold

    def register_component(
        self,
        component: str,
        *,
        saturation_threshold: float | None = None,
        unit_dim: int | None = None,
        extractor: Any = None,
    ) -> None:
        """Make a component known, and what is special about it; other options than it has are an error."""
        self._register(component, saturation_threshold=saturation_threshold, unit_dim=unit_dim, extractor=extractor)

    def to_metrics(self) -> dict[str, float]:
        """``activations/{activation}/saturated_fraction/{component}/{unit}``, and sums under ``…/saturation/``.

        The sums are ``total_neurons``, ``saturated_neurons``, ``fraction`` and ``active_fraction``, once per component
        and once for all. A neuron counts there once per sample.
        """
        prefix = f"activations/{self.activation}"
        metrics: dict[str, float] = {}
        saturated, seen = 0, 0
        for component, hits, totals in self._results():
            for unit, (hit, total) in enumerate(zip(hits, totals, strict=True)):
                metrics[f"{prefix}/saturated_fraction/{component}/{unit}"] = hit / total
            metrics |= _sums(f"{prefix}/saturation/{component}", sum(hits), sum(totals))
            saturated, seen = saturated + sum(hits), seen + sum(totals)
        return metrics | _sums(f"{prefix}/saturation", saturated, seen) if seen else metrics

    def _marks(self, tensor: Tensor, options: _SaturationOptions) -> Tensor:
        high = options.saturation_threshold
        if self.activation == "tanh":
            return tensor.abs() > high
        low = float(1 - Decimal(repr(high)))  # 1 - 0.95 is 0.05000000000000004, which 0.05 in float64 would be below
        return (tensor < low) | (tensor > high)


def _sums(prefix: str, saturated: int, total: int) -> dict[str, float]:
    fraction = saturated / total
    return {
        f"{prefix}/total_neurons": float(total),
        f"{prefix}/saturated_neurons": float(saturated),
        f"{prefix}/fraction": fraction,
        f"{prefix}/active_fraction": 1.0 - fraction,
    }
