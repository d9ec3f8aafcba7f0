"""``relu_gradient_flow``: how often a gradient comes through each unit of a ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.analyses._relus import OnReLUs
from hookline.analyses._tracked import NEXT_TO_NONE, TRAINING, described
from hookline.metta.gradient_flow_state import ReLUGradientFlowState
from hookline.metta.tracked_components import UnitOptions
from hookline.metta.tracker_hooks import ReLUGradientFlowHook as _OnLayer
from hookline.training.training_hook import MetricInfo

__all__ = ["ReLUGradientFlowHook"]


class ReLUGradientFlowHook(OnReLUs):
    """The share of samples in which a gradient comes out of each unit, backwards, since the last report.

    Recipe: ``hookline.HookManager(["relu_gradient_flow"], sinks=[...])``.

    It counts twice: by unit, what is above 1e-8, as its source does; for the sums, what is above a millionth of the
    layer's mean in that backward pass, which does not depend on the size of the loss.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU`` and its kin.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, sums alone.
    """

    name = "relu_gradient_flow"
    description = "how often gradients come through the units of ReLUs"
    roots = ("gradient_flow/relu/",)
    kind = "backward"
    happens = "passed"
    never = "blocked"

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return described(
            [
                (
                    "passed_fraction",
                    "how often a gradient comes through, over all units",
                    "mean of |g| > 1e-6·mean |g|, of a layer in one pass",
                    "",
                ),
                ("blocked_units", "units that never let one through", "count of 0", "0 is healthy"),
                ("blocked_fraction", "their share of all units", "blocked / units", "0 is healthy"),
                (
                    "gradient_flow/relu/{layer}/{unit}",
                    "how often more than 1e-8 comes through this unit",
                    "share of |g| > 1e-8",
                    "0: dead, or small everywhere",
                ),
            ]
        )

    def new_tracker(self) -> _Twice:
        """It counts."""
        return _Twice()

    def new_hook(self, component: str) -> _OnLayer:
        """On the gradient of a layer's input."""
        self._counter.register_component(component)
        return _OnLayer(self._counter, component, TRAINING)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all units, by what each let through beside the others."""
        return super().summary(self._counter.beside.to_metrics())


class _BesideOthers(ReLUGradientFlowState):
    """Counts by a bound that is a share of the mean of the tensor."""

    def _marks(self, tensor: Tensor, options: UnitOptions) -> Tensor:
        sizes = tensor.abs()
        return sizes > NEXT_TO_NONE * sizes.mean()


class _Twice(ReLUGradientFlowState):
    """Counts by its own bound, and beside that by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = _BesideOthers()

    def update(self, component: str, tensor: Tensor) -> None:
        """Count one tensor."""
        super().update(component, tensor)
        self.beside.update(component, tensor)

    def reset(self) -> None:
        """Start counting at zero."""
        super().reset()
        self.beside.reset()

    def counted(self) -> dict[str, Any]:
        """What was counted so far, of both."""
        beside = self.beside.counted()
        return {name: {**counts, "beside": beside[name]} for name, counts in super().counted().items()}

    def load_counted(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``counted`` gave."""
        super().load_counted(state)
        self.beside.load_counted({name: counts["beside"] for name, counts in state.items() if "beside" in counts})
