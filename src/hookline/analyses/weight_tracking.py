"""``weight_tracking``: size, spectrum and alignment with the gradient of every weight matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._shared import Work, cosines, is_bias, on_host, wide, work_of
from hookline.analyses._spectrum import effective_rank
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["WeightTrackingHook"]


class WeightTrackingHook(Analysis):
    """For every parameter of two dimensions or more that is no bias, and over all of them.

    Recipe: ``hookline.HookManager(["weight_tracking"], sinks=[...])``.

    Singular values are all worked out up to 512 × 512 (on the smaller side); above, the 20 largest, and the effective
    rank is that of these alone. A convolution counts as outputs by inputs and places.
    """

    name = "weight_tracking"
    description = "size, spectrum and alignment with the gradient of every weight matrix"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    needs_grads = True

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        align = "above 0: descent shrinks the weights; below 0: it grows them; near 0 it turns them"
        return [
            MetricInfo("weight_norm/{param}", "length of a weight", "‖W‖"),
            MetricInfo("top_sv/{param}", "largest singular value", "σ₁", "how much it can stretch an input"),
            MetricInfo(
                "effective_rank/{param}", "directions used about equally", "(Σσ)²/Σσ²", "low: a few directions matter"
            ),
            MetricInfo("grad_weight_align/{param}", "cosine of gradient and weight", "cos(g, W)", align),
            MetricInfo("total_weight_norm", "length of all weights together", "√Σ‖W‖²"),
            MetricInfo("mean_weight_norm", "mean over weights", "mean ‖W‖"),
            MetricInfo("mean_top_sv", "mean over weights", "mean σ₁"),
            MetricInfo("max_top_sv", "largest over weights", "max σ₁"),
            MetricInfo("mean_effective_rank", "mean over weights", "mean (Σσ)²/Σσ²"),
            MetricInfo("mean_grad_weight_align", "mean over weights", "mean cos(g, W)", align),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Of every matrix, then over all."""
        work = work_of(ctx)
        names = [name for name, weight in work.parameters.items() if weight.dim() >= 2 and not is_bias(name)]
        if not names:
            return None
        values = work.singular_values({name: work.parameters[name] for name in names})
        columns = {
            "weight_norm": _lengths(work, values),
            "top_sv": {name: float(found[0]) for name, found in values.items() if found.size},
            "effective_rank": {name: effective_rank(found) for name, found in values.items() if found.any()},
            "grad_weight_align": _alignments(work, names),
        }
        metrics = {f"{column}/{name}": value for column, found in columns.items() for name, value in found.items()}
        return metrics | _over_all(columns)


def _lengths(work: Work, values: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Of each weight, √Σσ² where all singular values are there."""
    weights = {name: work.parameters[name] for name in values}
    whole = {name for name, weight in weights.items() if values[name].size == min(weight.flatten(1).shape)}
    rest = {name: torch.linalg.vector_norm(wide(weight)) for name, weight in weights.items() if name not in whole}
    others = on_host(rest) if rest else {}
    return {name: others[name] if name in rest else float(np.sqrt(np.square(values[name]).sum())) for name in weights}


def _alignments(work: Work, names: list[str]) -> dict[str, float]:
    pairs = {}
    for name in names:
        grad, weight = work.mean_gradients.get(name), wide(work.parameters[name])
        if grad is not None and grad.shape == weight.shape:
            pairs[name] = grad.flatten(), weight.flatten()
    return dict(zip(pairs, cosines(pairs.values()).tolist(), strict=True)) if pairs else {}


def _over_all(columns: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found = {"total_weight_norm": sum(norm * norm for norm in columns["weight_norm"].values()) ** 0.5}
    if columns["top_sv"]:
        found["max_top_sv"] = max(columns["top_sv"].values())
    for column, values in columns.items():
        if values:
            found[f"mean_{column}"] = sum(values.values()) / len(values)
    return found
