"""``consecutive``: whether the gradient still points where it pointed at the last report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._shared import cosine, work_of
from hookline.hooks.metric_info import MetricInfo
from hookline.lifecycle.point import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["ConsecutiveHook"]


class ConsecutiveHook(Analysis):
    """The angle between one report's mean gradient and the next one's; nothing the first time.

    Recipe: ``hookline.HookManager(["consecutive"], sinks=[...])``. Keeps one copy of the gradient.
    """

    name = "consecutive"
    description = "angle between the mean gradients of consecutive epochs"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    needs_grads = True
    kept = ("previous",)
    previous: Tensor | None

    def __init__(self) -> None:
        self.reset()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo(
                "cos_sim",
                "cosine between this mean gradient and the one before",
                "g·g_prev / (‖g‖‖g_prev‖ + 1e-8)",
                "1: the same direction; 0: unrelated; below 0: going back and forth",
                "cos(g, g_prev)",
            ),
            MetricInfo("angle_degrees", "the same as an angle", "arccos(cos_sim)", "0 to 180", "angle"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """The angle to the last one."""
        flat = work_of(ctx).flat_mean_gradient
        previous, self.previous = self.previous, flat
        if flat is None or previous is None or previous.shape != flat.shape:
            return None
        similarity = cosine(flat, previous.to(flat.device))
        return {"cos_sim": similarity, "angle_degrees": torch.rad2deg(torch.acos(similarity.clamp(-1, 1)))}

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.previous = None
