"""``norms``: how large the mean gradient is, as a whole and by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._shared import work_of
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["NormsHook"]


class NormsHook(Analysis):
    """Lengths of the mean gradient since the last report, without biases.

    Recipe: ``hookline.HookManager(["norms"], sinks=[...])``.
    """

    name = "norms"
    description = "length of the mean gradient, as a whole and by parameter"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    needs_grads = True

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo("total_norm", "length of the whole gradient", "‖g‖", "falls as training settles", "‖g‖"),
            MetricInfo(
                "max_component", "largest component", "max |gᵢ|", "far above the mean: few weights learn", "max"
            ),
            MetricInfo("mean_component", "mean size of a component", "mean |gᵢ|", "", "mean |g|"),
            MetricInfo("norm_{param}", "length of one parameter's gradient", "‖g_w‖", "0: that part does not learn"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """The lengths, on the device."""
        work = work_of(ctx)
        flat = work.flat_mean_gradient
        if flat is None:
            return None
        sizes = flat.abs()
        return {
            "total_norm": torch.linalg.vector_norm(flat),
            "max_component": sizes.max(),
            "mean_component": sizes.mean(),
            **{f"norm_{name}": torch.linalg.vector_norm(grad) for name, grad in work.mean_gradients.items()},
        }
