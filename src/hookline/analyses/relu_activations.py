"""``relu_activations``: how often each unit behind a ReLU is on, and which never are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hookline.analyses._tracked import TRAINING, Tracked, described, mean_of, units_of
from hookline.hooks.metric_info import MetricInfo
from hookline.hooks.tracker_hooks import ActivationHook
from hookline.observe.trackers.relu import ReLUActivationState
from hookline.sites.main_tensor import main_tensor

__all__ = ["ReLUActivationsHook"]


class ReLUActivationsHook(Tracked):
    """The share of samples in which each unit is above zero, since the last report.

    Recipe: ``hookline.HookManager(["relu_activations"], sinks=[...])``.

    A unit is an entry of the last dimension; of images, a channel. Only training forwards count. ReLUs that are called
    as functions are no modules: name the layer before them by ``targets``, its outputs have the same signs.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU`` and its kin.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, sums alone.
    """

    name = "relu_activations"
    description = "how often units behind ReLUs are on, and which never are"
    roots = ("activations/relu/",)
    looks_for = "nn.ReLU, nn.ReLU6 or nn.LeakyReLU"

    def __init__(self, targets: str | None = None, exclude: str | None = None, per_unit: bool = True) -> None:
        super().__init__(targets, exclude, per_unit)

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return described(
            [
                ("active_fraction", "how often a unit is on, over all units", "mean of x > 0", ""),
                ("dead_units", "units that were never on", "count of 0", "0 is healthy"),
                ("dead_fraction", "their share of all units", "dead / units", "0 is healthy"),
                ("activations/relu/{layer}/{unit}", "how often this unit is on", "share of x > 0", "0: dead"),
            ]
        )

    def new_tracker(self) -> ReLUActivationState:
        """It counts."""
        return ReLUActivationState()

    def new_hook(self, component: str) -> ActivationHook:
        """On the output of a layer."""
        self._counter.register_component(component)
        return ActivationHook(self._counter, component, main_tensor, TRAINING)

    def is_wanted(self, module: nn.Module) -> bool:
        """ReLUs."""
        return isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU)

    def is_of_unit(self, name: str) -> bool:
        """All of them are."""
        return True

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all units."""
        values = units_of(metrics, self.is_of_unit)
        dead = sum(value == 0 for value in values)
        return {"active_fraction": mean_of(values), "dead_units": dead, "dead_fraction": dead / len(values)}
