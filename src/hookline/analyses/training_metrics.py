"""``training_metrics`` and ``training_diagnostics``: report what the loop knows of a run, and how steady it is.

The command line adds ``training_metrics`` whenever any hook is on, so that every run has its curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from numpy.typing import NDArray
from torch import Tensor

from hookline.analyses._base import Analysis, StepAnalysis
from hookline.analyses._values import StepNumbers, raw_number, values_of, widest_float
from hookline.lifecycle.context import RunDataContext
from hookline.when import HookPoint


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
        ("perplexity", "how many equally likely choices the loss amounts to, if it is a cross entropy in nats",
         "exp(L); infinite where that is over 1.8e308", "1 is certain; as many as there are classes is guessing",
         "perplexity"),
        ("train_acc", "accuracy on training data, if the run reports it", "", "higher is better", "train"),
        ("val_acc", "accuracy on validation data, when it is of now", "", "higher is better", "validation"),
        ("learning_rate", "of the first group of the optimizer", "η", "", "learning rate"),
        ("{metric}", "whatever else the evaluation found, under its own name"),
    )  # fmt: skip

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return what there is; tensors stay on their device."""
        loss = raw_number(ctx, "loss")
        found = {
            "loss": loss,
            "perplexity": None if loss is None else _exp(loss),
            "train_acc": raw_number(ctx, "train_acc"),
            "val_acc": raw_number(ctx, "val_acc"),
            "learning_rate": ctx.lr,
        }
        return {**(ctx.eval_metrics or {}), **{name: value for name, value in found.items() if value is not None}}


def _exp(loss: float | Tensor) -> float | Tensor:
    if isinstance(loss, Tensor):
        return loss.to(widest_float(loss.device)).exp()
    try:
        return math.exp(loss)
    except OverflowError:  # over 709.78
        return math.inf


_NONE: Final = 1e-12
"""A mean or a weight norm this small is zero: nothing is divided by it."""
_RATIO: Final = "lr·‖g‖ / ‖θ‖; what plain SGD would move"


class TrainingDiagnosticsHook(StepAnalysis):
    """Measure volatility of the loss, noise of the gradient norm, size of updates, over the steps since a report.

    Recipe: ``hookline.HookManager(["training_diagnostics"], sinks=[...])``. Gradients and weights with biases.
    """

    name = "training_diagnostics"
    description = "volatility of the loss, noise of the gradient norm, size of updates"
    reduce = MappingProxyType({"grad_norm_max": "max"})
    kept = ("losses", "grads", "weights", "rates")

    metrics = (
        ("loss_mean", "mean loss of the steps", "L̄", "lower is better"),
        ("loss_std", "standard deviation (n − 1)", "s", "lower: smoother"),
        ("loss_volatility", "spread relative to the mean", "s / |L̄|", "lower: steadier"),
        ("loss_autocorrelation", "whether the loss of a step predicts that of the next; from three steps on",
         "Σ dᵢ dᵢ₊₁ / (s² (n − 1)), d = L − L̄", "near 1: a trend; near 0: noise"),
        ("grad_norm_mean", "mean length of the gradient", "mean ‖g‖"),
        ("grad_norm_std", "standard deviation (n − 1)", "std ‖g‖"),
        ("grad_norm_cv", "spread relative to the mean", "std / mean", "high: noisy batches"),
        ("grad_norm_max", "largest of the steps", "max ‖g‖", "far over the mean: a spike"),
        ("update_ratio_mean", "mean relative size of an update", _RATIO, "about 1e-3 is usual"),
        ("update_ratio_std", "standard deviation (n − 1)", _RATIO),
        ("weight_norm", "length of all parameters after the last step", "‖θ‖"),
    )  # fmt: skip

    def __init__(self) -> None:
        self.losses, self.grads, self.weights, self.rates = (StepNumbers() for _ in range(4))

    def take_step(self, ctx: RunDataContext) -> None:
        """Keep loss, gradient norm, weight norm and learning rate of a step."""
        values = values_of(ctx)
        weight = values.parameters_length
        if weight is None:
            return
        self.losses.add(raw_number(ctx, "loss"))
        self.grads.add(values.step_gradient_length)
        self.weights.add(weight)
        rate = ctx.raw("lr")  # not read: of a capturable optimizer it is on the device
        self.rates.add(0.0 if rate is None else rate)

    def report(self) -> dict[str, Any] | None:
        """Return the metrics over all steps since the last report."""
        has_loss, has_grad = self.losses.has_any, self.grads.has_any
        losses, grads, weights, rates = (each.take() for each in (self.losses, self.grads, self.weights, self.rates))
        if not weights.size:
            return None
        moving = weights > _NONE
        ratios = rates[moving] * grads[moving] / weights[moving]
        return {
            **(_of_losses(losses) if has_loss else {}),
            **(_of_gradients(grads) if has_grad else {}),
            **(_mean_and_std("update_ratio", ratios) if has_grad else {}),
            "weight_norm": float(weights[-1]),
        }


def _mean_and_std(name: str, values: NDArray[Any]) -> dict[str, float]:
    found = {f"{name}_mean": float(values.mean())} if values.size else {}
    return found | ({f"{name}_std": float(values.std(ddof=1))} if values.size > 1 else {})


def _of_losses(losses: NDArray[Any]) -> dict[str, float]:
    found = _mean_and_std("loss", losses)
    if "loss_std" not in found:
        return found
    mean, std = found["loss_mean"], found["loss_std"]
    if not abs(mean) <= _NONE:
        found["loss_volatility"] = std / abs(mean)
    if losses.size >= 3 and not std <= 1e-8:
        away = losses - mean
        found["loss_autocorrelation"] = float((away[:-1] * away[1:]).sum()) / (std**2 * (losses.size - 1))
    return found


def _of_gradients(norms: NDArray[Any]) -> dict[str, float]:
    found = _mean_and_std("grad_norm", norms)
    if "grad_norm_std" in found and not found["grad_norm_mean"] <= _NONE:
        found["grad_norm_cv"] = found["grad_norm_std"] / found["grad_norm_mean"]
    return found | {"grad_norm_max": float(norms.max())}
