"""``training_diagnostics``: what a careful operator of training runs watches, from three numbers a step.

Keeps loss, gradient norm and weight norm of every step on the device; at a report they cross to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.analyses._analysis import EACH_STEP, Analysis
from hookline.analyses._series import Series
from hookline.analyses._shared import figure, work_of
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["TrainingDiagnosticsHook"]

_NONE: Final = 1e-12
"""A mean or a weight norm this small is zero: nothing is divided by it."""


class TrainingDiagnosticsHook(Analysis):
    """Volatility of the loss, noise of the gradient norm, size of updates; over the steps since the last report.

    Recipe: ``hookline.HookManager(["training_diagnostics"], sinks=[...])``. Gradients and weights with biases.
    """

    name = "training_diagnostics"
    description = "volatility of the loss, noise of the gradient norm, size of updates"
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = EACH_STEP
    kept = ("losses", "grads", "weights", "rates")

    def __init__(self) -> None:
        self._all = self.losses, self.grads, self.weights, self.rates = Series(), Series(), Series(), Series()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        ratio = "lr·‖g‖ / ‖θ‖; what plain SGD would move"
        return [
            MetricInfo("loss_mean", "mean loss of the steps", "L̄", "lower is better"),
            MetricInfo("loss_std", "standard deviation (n − 1)", "s", "lower: smoother"),
            MetricInfo("loss_volatility", "spread relative to the mean", "s / |L̄|", "lower: steadier"),
            MetricInfo(
                "loss_autocorrelation",
                "whether the loss of a step tells that of the next; from three steps on",
                "Σ dᵢ dᵢ₊₁ / (s² (n − 1)), d = L − L̄",
                "near 1: a trend; near 0: noise",
            ),
            MetricInfo("grad_norm_mean", "mean length of the gradient", "mean ‖g‖"),
            MetricInfo("grad_norm_std", "standard deviation (n − 1)", "std ‖g‖"),
            MetricInfo("grad_norm_cv", "spread relative to the mean", "std / mean", "high: noisy batches"),
            MetricInfo("grad_norm_max", "largest of the steps", "max ‖g‖", "far over the mean: a spike"),
            MetricInfo("update_ratio_mean", "mean relative size of an update", ratio, "about 1e-3 is usual"),
            MetricInfo("update_ratio_std", "standard deviation (n − 1)", ratio),
            MetricInfo("weight_norm", "length of all parameters after the last step", "‖θ‖"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Take a step in; report when it is time."""
        if ctx.hook_point is not HookPoint.POST_STEP:
            return self._report()
        work = work_of(ctx)
        weight = work.parameters_length
        if weight is None:
            return None
        self.losses.add(figure(ctx, "loss"))
        self.grads.add(work.step_gradient_length, own=True)
        self.weights.add(weight, own=True)
        rate = ctx.raw("lr")  # not read: of a capturable optimizer it is on the device
        self.rates.add(0.0 if rate is None else rate)
        return None

    def _report(self) -> dict[str, float] | None:
        has_loss, has_grad = self.losses.has_any, self.grads.has_any
        losses, grads, weights, rates = (series.take() for series in self._all)
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

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        for series in self._all:
            series.clear()


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
