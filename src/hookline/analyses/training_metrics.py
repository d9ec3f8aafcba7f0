"""``training_metrics``: loss, perplexity, accuracies and the learning rate.

Added by the command line whenever any hook is on, so that every run has its curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.analyses._analysis import Analysis
from hookline.analyses._shared import figure
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["TrainingMetricsHook"]


class TrainingMetricsHook(Analysis):
    """What the loop knows of the run.

    Recipe: ``hookline.HookManager(["training_metrics"], sinks=[...])``.
    """

    name = "training_metrics"
    description = "loss, perplexity, accuracies and learning rate"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.POST_STEP})
    loop_points = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.POST_STEP}}  # noqa: RUF012

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo(
                "loss", "training loss: of the step, or the mean over the epoch", "L", "lower is better", "loss"
            ),
            MetricInfo(
                "perplexity",
                "how many equally likely choices the loss amounts to, if it is a cross entropy in nats",
                "exp(L); infinite where that is over 1.8e308",
                "1 is certain; as many as there are classes is guessing",
                "perplexity",
            ),
            MetricInfo(
                "train_acc", "accuracy on training data, where the run tells it", "", "higher is better", "train"
            ),
            MetricInfo(
                "val_acc", "accuracy on validation data, when it is of now", "", "higher is better", "validation"
            ),
            MetricInfo("learning_rate", "of the first group of the optimizer", "η", "", "learning rate"),
            MetricInfo("{metric}", "whatever else the evaluation found, under its own name"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """What there is; tensors stay on their device."""
        loss = figure(ctx, "loss")
        found = {
            **(ctx.eval_metrics or {}),
            "loss": loss,
            "perplexity": None if loss is None else _exp(loss),
            "train_acc": figure(ctx, "train_acc"),
            "val_acc": figure(ctx, "val_acc"),
            "learning_rate": ctx.lr,
        }
        return {name: value for name, value in found.items() if value is not None}


def _exp(loss: float | Tensor) -> float | Tensor:
    if isinstance(loss, Tensor):
        return loss.double().exp() if loss.device.type != "mps" else loss.float().exp()
    try:
        return math.exp(loss)
    except OverflowError:  # over 709.78
        return math.inf
