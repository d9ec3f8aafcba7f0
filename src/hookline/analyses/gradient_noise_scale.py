"""``gradient_noise_scale``: measure from which batch size on larger batches stop paying.

It compares the gradients of single steps with their mean over a few steps: averaging shrinks noise, but not signal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.analyses._base import StepAnalysis
from hookline.analyses._values import values_of
from hookline.analyses._vectors import norm, widest_float
from hookline.lifecycle.context import RunDataContext
from hookline.tree import tensors_of


class GradientNoiseScaleHook(StepAnalysis):
    """Measure the simple noise scale tr Σ / ‖G‖², from gradients of one step and means over several.

    Recipe: ``hookline.HookManager(["gradient_noise_scale"], sinks=[...])``.

    With g the gradient of a step, ḡ the mean of ``steps`` of them and b samples in a batch, ‖g‖² is ‖G‖² + tr Σ/b on
    average, and ‖ḡ‖² is ‖G‖² + tr Σ/(b·steps); two equations for two unknowns, whose averages since the last report
    are used. Weights move in those steps, so what they change of the gradient counts as noise. Gradients are those in
    ``.grad`` after the step, clipped if the run clips, without biases. Keeps one copy.

    Args:
        steps: How many steps make a mean; fewer are noisier, more let the weights move further.
        batch_size: Samples in a batch; if left out, the first dimension of the first tensor in the batch. Without
            either, the scale is in batches.
    """

    name = "gradient_noise_scale"
    description = "from which batch size on larger batches stop paying"
    kept = ("mean", "squares", "taken", "sums", "groups", "size")
    mean: Tensor | None = None
    squares: Tensor | None = None
    sums: Tensor | None = None
    taken = 0
    groups = 0
    size = 1
    # With b samples in a batch, and ḡ the mean over n steps.
    metrics = (
        ("noise_scale", "batch size at which noise and signal are equal, in samples; absent while there is no signal",
         "tr Σ / ‖G‖²", "far over the batch size: larger batches pay; far below it: smaller ones would do"),
        ("signal", "squared length of the true gradient", "(n·‖ḡ‖² − mean ‖g‖²)/(n − 1)", "below 0: lost"),
        ("noise", "variance of a single sample's gradient", "b·n/(n − 1)·(mean ‖g‖² − ‖ḡ‖²)"),
        ("batch_fraction", "batch size over the noise scale", "b / noise_scale", "1: well chosen"),
    )  # fmt: skip

    def __init__(self, steps: int = 8, batch_size: int | None = None) -> None:
        self.steps = self.whole_number("steps", steps, 2)
        self.batch_size = None if batch_size is None else self.whole_number("batch_size", batch_size, 1)

    def take_step(self, ctx: RunDataContext) -> None:
        """Add the gradient of a step to its mean."""
        flat = values_of(ctx).flat_step_gradient
        if flat is None:
            return
        self.size = self.batch_size or _samples(ctx.batch_data) or self.size
        if self.mean is None or self.mean.shape != flat.shape or self.squares is None:
            self.mean, self.taken = torch.zeros_like(flat), 0
            self.squares = flat.new_zeros((), dtype=widest_float(flat.device))
        self.mean = self.mean.to(flat.device).add_(flat, alpha=1 / self.steps)
        self.squares = self.squares.to(flat.device) + norm(flat).to(self.squares.dtype).square()
        self.taken += 1
        if self.taken == self.steps:
            of_mean = norm(self.mean).to(self.squares.dtype).square()
            found = torch.stack((self.squares / self.steps, of_mean))
            self.sums = found if self.sums is None else self.sums.to(found.device) + found
            self.groups += 1
            self.mean = self.squares = None
            self.taken = 0

    def report(self) -> dict[str, Any] | None:
        """Return the noise scale, from the means that are complete."""
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


def _samples(batch: Any) -> int | None:
    """Return how many samples a batch has: the first dimension of the first tensor in it."""
    tensors = (tensor for tensor in tensors_of(batch) if tensor.dim())
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.shape[0]), None)
