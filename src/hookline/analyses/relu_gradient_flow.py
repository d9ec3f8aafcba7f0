"""``relu_gradient_flow``: measure how often a gradient comes through each unit of a ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from hookline.analyses._tracked import NEXT_TO_NONE, TRAINING, ReLUAnalysis
from hookline.metta.component_tracker import UnitOptions
from hookline.metta.feeders import GradientFeeder
from hookline.metta.trackers import ReLUGradientFlowState


class ReLUGradientFlowHook(ReLUAnalysis):
    """Measure the share of samples in which a gradient leaves each unit, backwards, since the last report.

    Recipe: ``hookline.HookManager(["relu_gradient_flow"], sinks=[...])``.

    It counts twice: by unit, what is above 1e-8, as Metta does; for the sums, what is above a millionth of the
    layer's mean in that backward pass, which does not depend on the size of the loss.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU``, ``nn.ReLU6`` and
            ``nn.LeakyReLU``.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, sums alone.
    """

    name = "relu_gradient_flow"
    description = "how often gradients come through the units of ReLUs"
    reduce = MappingProxyType({"blocked_*": "min"})  # a unit that is blocked is so on every rank
    roots = ("gradient_flow/relu/",)
    kind = "backward"
    event = "passed"
    no_event = "blocked"
    metrics = (
        (
            "passed_fraction",
            "how often a gradient comes through, over all units",
            "mean of |g| > 1e-6·mean |g|, of a layer in one pass",
        ),
        ("blocked_units", "units that never let one through", "count of 0", "0 is healthy"),
        ("blocked_fraction", "their share of all units", "blocked / units", "0 is healthy"),
        (
            "gradient_flow/relu/{layer}/{unit}",
            "how often more than 1e-8 comes through this unit",
            "share of |g| > 1e-8",
            "0: dead, or small everywhere",
        ),
    )

    def new_tracker(self) -> _TwoBounds:
        """Return a tracker that counts by both bounds."""
        return _TwoBounds()

    def new_feeder(self, component: str) -> GradientFeeder:
        """Return a hook on the gradient of a layer's input."""
        return GradientFeeder(self.tracker, component, TRAINING, of_input=True)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all units, by the relative bound."""
        return super().summary(self.tracker.relative.to_metrics())


class _RelativeBound(ReLUGradientFlowState):
    """Count by a bound that is a share of the mean of the tensor."""

    def _is_hit(self, tensor: Tensor, options: UnitOptions) -> Tensor:
        sizes = tensor.abs()
        return sizes > NEXT_TO_NONE * sizes.mean()


class _TwoBounds(ReLUGradientFlowState):
    """Count by the absolute bound of the tracker, and in ``relative`` by the relative one."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = _RelativeBound()

    def update(self, component: str, tensor: Tensor) -> None:
        """Count one tensor by both."""
        super().update(component, tensor)
        self.relative.update(component, tensor)

    def reset(self) -> None:
        """Start both at zero."""
        super().reset()
        self.relative.reset()

    def counted(self) -> dict[str, Any]:
        """Return the counts so far, of both."""
        relative = self.relative.counted()
        return {name: {**counts, "relative": relative[name]} for name, counts in super().counted().items()}

    def load_counted(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``counted`` gave."""
        super().load_counted(state)
        self.relative.load_counted({name: counts["relative"] for name, counts in state.items() if "relative" in counts})
