"""``consecutive`` and ``variance``: measure whether the mean gradients of the last reports agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.analyses._base import Analysis, ChangeAnalysis
from hookline.analyses._history import GradientWindow
from hookline.analyses._values import FiringValues, values_of
from hookline.analyses._vectors import cosines_in_float64
from hookline.lifecycle.context import RunDataContext


class ConsecutiveHook(ChangeAnalysis):
    """Measure the angle between one report's mean gradient and the next one's; nothing the first time.

    Recipe: ``hookline.HookManager(["consecutive"], sinks=[...])``. Keeps one copy of the gradient.
    """

    name = "consecutive"
    description = "angle between the mean gradients of consecutive epochs"
    needs_grads = True

    metrics = (
        ("cos_sim", "cosine between this mean gradient and the one before", "g·g_prev / (‖g‖‖g_prev‖); 0 if one is 0",
         "1: the same direction; 0: unrelated; below 0: going back and forth", "cos(g, g_prev)"),
        ("angle_degrees", "the same as an angle", "arccos(cos_sim)", "0 to 180", "angle"),
    )  # fmt: skip

    def vector(self, values: FiringValues) -> Tensor | None:
        """Return the mean gradient."""
        return values.flat_mean_gradient

    def compare(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """Return the angle between them."""
        similarity = cosines_in_float64([(now, before)])[0]
        return {"cos_sim": similarity, "angle_degrees": torch.rad2deg(torch.acos(similarity.clamp(-1, 1)))}


class VarianceHook(Analysis):
    """Measure spread and agreement of the last mean gradients; from the second one on.

    Recipe: ``hookline.HookManager(["variance"], hook_config={"variance": {"window_size": 5}}, sinks=[...])``.

    Args:
        window_size: How many gradients are compared; as many copies are kept.
        max_gib: The most memory that these may take; over it, the hook says so and stays silent.
    """

    name = "variance"
    description = "spread and agreement of the mean gradients of the last epochs"
    needs_grads = True
    kept = ("window",)
    metrics = (
        ("gradient_variance", "mean variance of an entry", "mean (g − ḡ)²", "lower: steadier", "variance"),
        ("mean_pairwise_cos", "mean cosine between any two gradients of the window",
         "mean of gᵢ·gⱼ / (‖gᵢ‖‖gⱼ‖), i < j; 0 where one is 0",
         "1: all agree; 0: unrelated; below 0: they undo each other", "agreement"),
        ("signal_to_noise", "length of the mean over length of the standard deviation (n − 1)", "‖ḡ‖ / ‖std‖",
         "over 1: the common direction outweighs the changes; 1/√n: unrelated; infinite: nothing changed",
         "signal to noise"),
        ("window_mean_norm", "length of the mean over the window", "‖ḡ‖", "", "‖ḡ‖"),
    )  # fmt: skip

    def __init__(self, window_size: int = 10, max_gib: float = 8.0) -> None:
        self.window = GradientWindow(self.whole_number("window_size", window_size, 2), exact=True)
        self.max_gib = max_gib

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare the gradients of the window, of which this one is the newest."""
        flat = values_of(ctx).flat_mean_gradient
        if not self.add_to_window(self.window, flat, "window_size", self.max_gib) or self.window.count < 2:
            return None
        assert flat is not None
        gram, count = self.window.gram(), self.window.count
        mean_square = max(float(gram.sum()), 0.0) / count**2 if np.isfinite(gram).all() else float("nan")
        spread = max(float(np.trace(gram)) - count * mean_square, 0.0) if np.isfinite(mean_square) else mean_square
        lengths = np.sqrt(np.diag(gram))
        both = np.outer(lengths, lengths)
        cosines = np.divide(gram, both, out=np.zeros_like(gram), where=both != 0)
        return {
            "gradient_variance": spread / (count * flat.numel()),
            "mean_pairwise_cos": float(cosines.sum() - np.trace(cosines)) / (count * (count - 1)),
            "signal_to_noise": _over(mean_square**0.5, (spread / (count - 1)) ** 0.5),
            "window_mean_norm": mean_square**0.5,
        }


def _over(signal: float, noise: float) -> float:
    """Return ``signal / noise``: infinite without noise, 0 without both."""
    return signal / noise if noise != 0 else math.inf if signal else 0.0
