"""``training_metrics``: report loss, perplexity, accuracies and the learning rate.

The command line adds it whenever any hook is on, so that every run has its curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.analyses._analysis import Analysis
from hookline.analyses._firing_values import raw_number
from hookline.analyses._vectors import widest_float
from hookline.lifecycle.points import HookPoint
from hookline.lifecycle.run_context import RunDataContext


class TrainingMetricsHook(Analysis):
    """Report what the loop knows of the run.

    Recipe: ``hookline.HookManager(["training_metrics"], sinks=[...])``.
    """

    name = "training_metrics"
    description = "loss, perplexity, accuracies and learning rate"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.POST_STEP})
    loop_points = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.POST_STEP}}  # noqa: RUF012
    metrics = (
        ("loss", "training loss: of the step, or the mean over the epoch", "L", "lower is better", "loss"),
        (
            "perplexity",
            "how many equally likely choices the loss amounts to, if it is a cross entropy in nats",
            "exp(L); infinite where that is over 1.8e308",
            "1 is certain; as many as there are classes is guessing",
            "perplexity",
        ),
        ("train_acc", "accuracy on training data, where the run tells it", "", "higher is better", "train"),
        ("val_acc", "accuracy on validation data, when it is of now", "", "higher is better", "validation"),
        ("learning_rate", "of the first group of the optimizer", "η", "", "learning rate"),
        ("{metric}", "whatever else the evaluation found, under its own name"),
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return what there is; tensors stay on their device."""
        loss = raw_number(ctx, "loss")
        found = {
            **(ctx.eval_metrics or {}),
            "loss": loss,
            "perplexity": None if loss is None else _exp(loss),
            "train_acc": raw_number(ctx, "train_acc"),
            "val_acc": raw_number(ctx, "val_acc"),
            "learning_rate": ctx.lr,
        }
        return {name: value for name, value in found.items() if value is not None}


def _exp(loss: float | Tensor) -> float | Tensor:
    if isinstance(loss, Tensor):
        return loss.to(widest_float(loss.device)).exp()
    try:
        return math.exp(loss)
    except OverflowError:  # over 709.78
        return math.inf
