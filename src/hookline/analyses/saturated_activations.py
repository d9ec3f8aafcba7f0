"""``saturated_activations``: measure how often units behind a tanh or a sigmoid are at its ends, where no gradient
passes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from hookline.analyses._tracked import TRAINING, TrackedAnalysis
from hookline.lifecycle.hook import MetricInfo
from hookline.metta.feeders import ActivationFeeder
from hookline.metta.trackers import SaturatedActivationState


class SaturatedActivationsHook(TrackedAnalysis):
    """Measure the share of samples in which each unit is saturated, since the last report.

    Recipe: ``hookline.HookManager(["saturated_activations"], sinks=[...])``.

    Args:
        activation: ``"tanh"``, saturated where ``abs(x)`` is over the threshold; or ``"sigmoid"``, where x is over it
            or under 1 less the threshold.
        saturation_threshold: From where on it is saturated.
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.Tanh``, or every ``nn.Sigmoid``.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, layers and sums alone.
    """

    name = "saturated_activations"
    description = "how often units behind a tanh or a sigmoid are saturated"
    reduce = MappingProxyType({"always_saturated": "min", "*/total_neurons": "sum", "*/saturated_neurons": "sum"})

    def __init__(
        self,
        activation: str = "tanh",
        saturation_threshold: float = 0.95,
        targets: str | None = None,
        exclude: str | None = None,
        per_unit: bool = True,
    ) -> None:
        self.activation, self.saturation_threshold = activation, saturation_threshold
        super().__init__(targets, exclude, per_unit)
        self.roots = (f"activations/{activation}/",)
        self.looks_for = "nn.Tanh" if activation == "tanh" else "nn.Sigmoid"  # type: ignore[misc]

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric; in the sums a neuron counts once per sample."""
        root = f"activations/{self.activation}"
        rows = [
            ("fraction", "how often a unit is saturated, over all units", "saturated / seen", "1: nothing passes"),
            ("always_saturated", "units that were saturated every time", "count of 1", "0 is healthy"),
            (f"{root}/saturated_fraction/{{layer}}/{{unit}}", "how often this unit is", "saturated / seen"),
        ]
        for name, what in (
            ("total_neurons", "units times samples that were looked at"),
            ("saturated_neurons", "those that were saturated"),
            ("fraction", "their share"),
            ("active_fraction", "the share of the others"),
        ):
            rows.append((f"{root}/saturation/{name}", what))
            rows.append((f"{root}/saturation/{{layer}}/{name}", f"{what}, of one layer"))
        return [MetricInfo(*row) for row in rows]

    def new_tracker(self) -> SaturatedActivationState:
        """Return a tracker that counts saturated activations."""
        return SaturatedActivationState(self.activation, self.saturation_threshold)

    def new_feeder(self, component: str) -> ActivationFeeder:
        """Return a hook on the output of a layer."""
        return ActivationFeeder(self.tracker, component, TRAINING)

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the activation."""
        return isinstance(module, nn.Tanh if self.activation == "tanh" else nn.Sigmoid)

    def is_of_unit(self, name: str) -> bool:
        """Return whether the metric is not a sum."""
        return name.startswith(f"activations/{self.activation}/saturated_fraction/")

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all layers."""
        return {
            "fraction": metrics[f"activations/{self.activation}/saturation/fraction"],
            "always_saturated": sum(value == 1 for name, value in metrics.items() if self.is_of_unit(name)),
        }
