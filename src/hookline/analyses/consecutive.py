"""``consecutive``: measure whether the gradient still points where it pointed at the last report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.analyses._analysis import ChangeAnalysis
from hookline.analyses._firing_values import FiringValues
from hookline.analyses._vectors import cosines


class ConsecutiveHook(ChangeAnalysis):
    """Measure the angle between one report's mean gradient and the next one's; nothing the first time.

    Recipe: ``hookline.HookManager(["consecutive"], sinks=[...])``. Keeps one copy of the gradient.
    """

    name = "consecutive"
    description = "angle between the mean gradients of consecutive epochs"
    needs_grads = True
    metrics = (
        (
            "cos_sim",
            "cosine between this mean gradient and the one before",
            "g·g_prev / (‖g‖‖g_prev‖); 0 if one is 0",
            "1: the same direction; 0: unrelated; below 0: going back and forth",
            "cos(g, g_prev)",
        ),
        ("angle_degrees", "the same as an angle", "arccos(cos_sim)", "0 to 180", "angle"),
    )

    def vector(self, values: FiringValues) -> Tensor | None:
        """Return the mean gradient."""
        return values.flat_mean_gradient

    def compare(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """Return the angle between them."""
        similarity = cosines([(now, before)])[0]
        return {"cos_sim": similarity, "angle_degrees": torch.rad2deg(torch.acos(similarity.clamp(-1, 1)))}
