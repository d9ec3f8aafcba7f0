"""``consecutive``: measure whether the gradient still points where it pointed at the last report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.analyses._analysis import ChangeAnalysis
from hookline.analyses._firing_values import FiringValues
from hookline.analyses._vectors import cosines_in_float64
from hookline.lifecycle.hook import MetricInfo


class ConsecutiveHook(ChangeAnalysis):
    """Measure the angle between one report's mean gradient and the next one's; nothing the first time.

    Recipe: ``hookline.HookManager(["consecutive"], sinks=[...])``. Keeps one copy of the gradient.
    """

    name = "consecutive"
    description = "angle between the mean gradients of consecutive epochs"
    needs_grads = True

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric."""
        return [
            MetricInfo(
                "cos_sim",
                description="cosine between this mean gradient and the one before",
                formula="g·g_prev / (‖g‖‖g_prev‖); 0 if one is 0",
                sign_info="1: the same direction; 0: unrelated; below 0: going back and forth",
                label="cos(g, g_prev)",
            ),
            MetricInfo(
                "angle_degrees",
                description="the same as an angle",
                formula="arccos(cos_sim)",
                sign_info="0 to 180",
                label="angle",
            ),
        ]

    def vector(self, values: FiringValues) -> Tensor | None:
        """Return the mean gradient."""
        return values.flat_mean_gradient

    def compare(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """Return the angle between them."""
        similarity = cosines_in_float64([(now, before)])[0]
        return {"cos_sim": similarity, "angle_degrees": torch.rad2deg(torch.acos(similarity.clamp(-1, 1)))}
