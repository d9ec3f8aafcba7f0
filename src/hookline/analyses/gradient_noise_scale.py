"""``gradient_noise_scale``: from which batch size on larger batches stop paying.

Compares the gradients of single steps with their mean over a few steps: noise shrinks when it is averaged, signal does
not. Both sums stay on the device until a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.analyses._analysis import EACH_STEP, Analysis, whole_number
from hookline.analyses._shared import work_of
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["GradientNoiseScaleHook"]


class GradientNoiseScaleHook(Analysis):
    """The simple noise scale tr Σ / ‖G‖², from gradients of one step and means over several.

    Recipe: ``hookline.HookManager(["gradient_noise_scale"], sinks=[...])``.

    With g the gradient of a step, ḡ the mean of ``steps`` of them and b samples in a batch, ‖g‖² is ‖G‖² + tr Σ/b on
    average, and ‖ḡ‖² is ‖G‖² + tr Σ/(b·steps); two equations for two unknowns, whose averages since the last report
    are used. Weights move in those steps, so what they change of the gradient counts as noise. Gradients are those in
    ``.grad`` after the step, clipped if the run clips, without biases. Keeps one copy; nothing waits for the device at
    a step.

    Args:
        steps: How many steps make a mean; fewer are noisier, more let the weights move further.
        batch_size: Samples in a batch; if left out, the first dimension of the first tensor in the batch. Without
            either, the scale is told in batches.
    """

    name = "gradient_noise_scale"
    description = "from which batch size on larger batches stop paying"
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = EACH_STEP
    kept = ("mean", "squares", "taken", "sums", "groups", "size")
    mean: Tensor | None
    squares: Tensor | None
    sums: Tensor | None
    taken: int
    groups: int
    size: int

    def __init__(self, steps: int = 8, batch_size: int | None = None) -> None:
        self.steps = whole_number(self.name, "steps", steps, 2)
        self.batch_size = None if batch_size is None else whole_number(self.name, "batch_size", batch_size, 1)
        self.reset()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; b samples in a batch, ḡ over n steps."""
        return [
            MetricInfo(
                "noise_scale",
                "batch size at which noise and signal are equal, in samples; absent while there is no signal",
                "tr Σ / ‖G‖²",
                "far over the batch size: larger batches pay; far below it: smaller ones would do",
            ),
            MetricInfo(
                "signal", "squared length of the true gradient", "(n·‖ḡ‖² − mean ‖g‖²)/(n − 1)", "below 0: lost"
            ),
            MetricInfo("noise", "variance of a single sample's gradient", "b·n/(n − 1)·(mean ‖g‖² − ‖ḡ‖²)"),
            MetricInfo("batch_fraction", "batch size over the noise scale", "b / noise_scale", "1: well chosen"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Take a step in; report when it is time."""
        if ctx.hook_point is not HookPoint.POST_STEP:
            return self._report()
        flat = work_of(ctx).flat_step_gradient
        if flat is not None:
            self.size = self.batch_size or _samples(ctx.batch_data) or self.size
            self._take(flat)
        return None

    def _take(self, flat: Tensor) -> None:
        if self.mean is None or self.mean.shape != flat.shape or self.squares is None:
            self.mean, self.taken = torch.zeros_like(flat), 0
            self.squares = flat.new_zeros((), dtype=torch.float64 if flat.device.type != "mps" else torch.float32)
        self.mean = self.mean.to(flat.device).add_(flat, alpha=1 / self.steps)
        self.squares = self.squares.to(flat.device) + torch.linalg.vector_norm(flat).to(self.squares.dtype).square()
        self.taken += 1
        if self.taken == self.steps:
            of_mean = torch.linalg.vector_norm(self.mean).to(self.squares.dtype).square()
            found = torch.stack((self.squares / self.steps, of_mean))
            self.sums = found if self.sums is None else self.sums.to(found.device) + found
            self.groups += 1
            self.mean = self.squares = None
            self.taken = 0

    def _report(self) -> dict[str, float] | None:
        if self.sums is None:  # no mean is complete yet; it goes on
            return None
        single, of_mean = (value / self.groups for value in self.sums.tolist())
        self.sums, self.groups = None, 0
        n = self.steps
        signal = (n * of_mean - single) / (n - 1)
        noise = self.size * n / (n - 1) * (single - of_mean)
        found = {"signal": signal, "noise": noise}
        if signal > 0 and noise > 0:
            found |= {"noise_scale": noise / signal, "batch_fraction": self.size * signal / noise}
        return found

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.mean = self.squares = self.sums = None
        self.taken = self.groups = 0
        self.size = self.batch_size or 1


def _samples(batch: Any) -> int | None:
    """How many samples a batch has: the first dimension of the first tensor in it."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for found in map(_samples, parts) if found), None)
