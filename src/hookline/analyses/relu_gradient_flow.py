"""``relu_gradient_flow``: how often a gradient comes through each unit of a ReLU."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hookline.analyses._tracked import TRAINING, Tracked, described, mean_of, units_of
from hookline.hooks.metric_info import MetricInfo
from hookline.hooks.tracker_hooks import ReLUGradientFlowHook as _OnLayer
from hookline.observe.trackers.gradient_flow import ReLUGradientFlowState

__all__ = ["ReLUGradientFlowHook"]


class ReLUGradientFlowHook(Tracked):
    """The share of samples in which a gradient above 1e-8 comes out of each unit, backwards, since the last report.

    Recipe: ``hookline.HookManager(["relu_gradient_flow"], sinks=[...])``.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU`` and its kin.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, sums alone.
    """

    name = "relu_gradient_flow"
    description = "how often gradients come through the units of ReLUs"
    roots = ("gradient_flow/relu/",)
    kind = "backward"
    looks_for = "nn.ReLU, nn.ReLU6 or nn.LeakyReLU"

    def __init__(self, targets: str | None = None, exclude: str | None = None, per_unit: bool = True) -> None:
        super().__init__(targets, exclude, per_unit)

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return described(
            [
                ("passed_fraction", "how often a gradient comes through, over all units", "mean of |g| > 1e-8", ""),
                ("blocked_units", "units that never let one through", "count of 0", "0 is healthy"),
                ("blocked_fraction", "their share of all units", "blocked / units", "0 is healthy"),
                ("gradient_flow/relu/{layer}/{unit}", "how often through this unit", "share of |g| > 1e-8", "0: dead"),
            ]
        )

    def new_tracker(self) -> ReLUGradientFlowState:
        """It counts."""
        return ReLUGradientFlowState()

    def new_hook(self, component: str) -> _OnLayer:
        """On the gradient of a layer's input."""
        self._counter.register_component(component)
        return _OnLayer(self._counter, component, TRAINING)

    def is_wanted(self, module: nn.Module) -> bool:
        """ReLUs."""
        return isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU)

    def is_of_unit(self, name: str) -> bool:
        """All of them are."""
        return True

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all units."""
        values = units_of(metrics, self.is_of_unit)
        blocked = sum(value == 0 for value in values)
        return {
            "passed_fraction": mean_of(values),
            "blocked_units": blocked,
            "blocked_fraction": blocked / len(values),
        }
