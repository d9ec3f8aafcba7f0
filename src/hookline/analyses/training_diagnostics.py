"""``training_diagnostics``: measure volatility of the loss, noise of the gradient norm and size of updates."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from numpy.typing import NDArray

from hookline.analyses._analysis import StepAnalysis
from hookline.analyses._firing_values import raw_number, values_of
from hookline.analyses._history import StepNumbers
from hookline.lifecycle.context import RunDataContext

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
        (
            "loss_autocorrelation",
            "whether the loss of a step tells that of the next; from three steps on",
            "Σ dᵢ dᵢ₊₁ / (s² (n − 1)), d = L − L̄",
            "near 1: a trend; near 0: noise",
        ),
        ("grad_norm_mean", "mean length of the gradient", "mean ‖g‖"),
        ("grad_norm_std", "standard deviation (n − 1)", "std ‖g‖"),
        ("grad_norm_cv", "spread relative to the mean", "std / mean", "high: noisy batches"),
        ("grad_norm_max", "largest of the steps", "max ‖g‖", "far over the mean: a spike"),
        ("update_ratio_mean", "mean relative size of an update", _RATIO, "about 1e-3 is usual"),
        ("update_ratio_std", "standard deviation (n − 1)", _RATIO),
        ("weight_norm", "length of all parameters after the last step", "‖θ‖"),
    )

    def __init__(self) -> None:
        self.losses, self.grads, self.weights, self.rates = (StepNumbers() for _ in range(4))

    def take_step(self, ctx: RunDataContext) -> None:
        """Keep loss, gradient norm, weight norm and learning rate of a step."""
        values = values_of(ctx)
        weight = values.parameters_length
        if weight is None:
            return
        self.losses.add(raw_number(ctx, "loss"))
        self.grads.add(values.step_gradient_length, own=True)
        self.weights.add(weight, own=True)
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
