"""``variance``: how much the mean gradient changes over the last few reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.analyses._analysis import AT_REPORTS, Analysis, whole_number
from hookline.analyses._shared import work_of
from hookline.analyses._window import GradientWindow
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["VarianceHook"]


class VarianceHook(Analysis):
    """Spread and agreement of the last mean gradients; from the second one on.

    Recipe: ``hookline.HookManager(["variance"], hook_config={"variance": {"window_size": 5}}, sinks=[...])``.

    Args:
        window_size: How many gradients are compared; as many copies are kept.
        max_gib: The most memory that these may take; over it, the hook says so and stays silent.
    """

    name = "variance"
    description = "spread and agreement of the mean gradients of the last epochs"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    needs_grads = True
    kept = ("window",)

    def __init__(self, window_size: int = 10, max_gib: float = 8.0) -> None:
        self.window = GradientWindow(whole_number(self.name, "window_size", window_size, 2), exact=True)
        self.max_gib = max_gib

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo(
                "gradient_variance", "mean variance of a component", "mean (g − ḡ)²", "lower: steadier", "variance"
            ),
            MetricInfo(
                "mean_pairwise_cos",
                "mean cosine between any two gradients of the window",
                "mean of gᵢ·gⱼ / (‖gᵢ‖‖gⱼ‖), i < j; 0 where one is 0",
                "1: all agree; 0: unrelated; below 0: they undo each other",
                "agreement",
            ),
            MetricInfo(
                "signal_to_noise",
                "length of the mean over length of the standard deviation (n − 1)",
                "‖ḡ‖ / ‖std‖",
                "over 1: the common direction outweighs the changes; 1/√n: unrelated; infinite: nothing changed",
                "signal to noise",
            ),
            MetricInfo("window_mean_norm", "length of the mean over the window", "‖ḡ‖", "", "‖ḡ‖"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Over the window that this gradient is the newest of."""
        flat = work_of(ctx).flat_mean_gradient
        if self.off or flat is None or not self.fits(self.window, flat, "window_size", self.max_gib):
            return None
        self.window.add(flat)
        count = self.window.count
        if count < 2:
            return None
        gram = self.window.gram()
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

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.window.clear()


def _over(signal: float, noise: float) -> float:
    """One over the other: infinite without noise, 0 if there is nothing at all."""
    return signal / noise if noise != 0 else math.inf if signal else 0.0
