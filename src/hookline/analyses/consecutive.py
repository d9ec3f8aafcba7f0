"""``consecutive``: whether the gradient still points where it pointed at the last report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.analyses._shared import Work, cosine
from hookline.analyses._since_last import SinceLast
from hookline.training.training_hook import MetricInfo

__all__ = ["ConsecutiveHook"]


class ConsecutiveHook(SinceLast):
    """The angle between one report's mean gradient and the next one's; nothing the first time.

    Recipe: ``hookline.HookManager(["consecutive"], sinks=[...])``. Keeps one copy of the gradient.
    """

    name = "consecutive"
    description = "angle between the mean gradients of consecutive epochs"
    needs_grads = True

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo(
                "cos_sim",
                "cosine between this mean gradient and the one before",
                "g·g_prev / (‖g‖‖g_prev‖); 0 if one is 0",
                "1: the same direction; 0: unrelated; below 0: going back and forth",
                "cos(g, g_prev)",
            ),
            MetricInfo("angle_degrees", "the same as an angle", "arccos(cos_sim)", "0 to 180", "angle"),
        ]

    def vector(self, work: Work) -> Tensor | None:
        """The mean gradient."""
        return work.flat_mean_gradient

    def compared(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """The angle between them."""
        similarity = cosine(now, before)
        return {"cos_sim": similarity, "angle_degrees": torch.rad2deg(torch.acos(similarity.clamp(-1, 1)))}
