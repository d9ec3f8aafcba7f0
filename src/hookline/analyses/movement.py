"""``parameter_delta``, ``path_length``, ``weight_tracking``: measure how far parameters move, and what they become."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.analyses._base import Analysis, StepAnalysis
from hookline.analyses._values import (
    FiringValues,
    cosines_in_float64,
    dense_float,
    effective_rank,
    is_bias,
    norm,
    ratio,
    values_of,
    widest_float,
)
from hookline.lifecycle.context import RunDataContext
from hookline.observe.host_values import fetch
from hookline.when import HookPoint


class ParameterDeltaHook(Analysis):
    """Measure the length of the change of all parameters, biases included; nothing the first time.

    Recipe: ``hookline.HookManager(["parameter_delta"], sinks=[...])``. Keeps one copy of the parameters.
    """

    name = "parameter_delta"
    description = "how far the parameters have moved since the last epoch"
    metrics = (
        ("relative_delta", "the move as a share of where they were", "‖θ − θ_prev‖ / ‖θ_prev‖; 0 if θ_prev is 0",
         "falls as training settles", "relative move"),
        ("absolute_delta", "length of the move", "‖θ − θ_prev‖", "", "move"),
        ("param_norm", "length of the parameters", "‖θ‖", "grows without weight decay", "‖θ‖"),
    )  # fmt: skip

    kept = ("previous",)
    previous: Tensor | None = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare with the parameters of the last report, and keep these for the next."""
        now = values_of(ctx).flat_parameters
        before, self.previous = self.previous, now
        if now is None or before is None or before.shape != now.shape:
            return None
        before = before.to(now.device)
        move = norm(now - before)
        return {"relative_delta": ratio(move, norm(before)), "absolute_delta": move, "param_norm": norm(now)}


class PathLengthHook(StepAnalysis):
    """Add up the steps of the parameters, biases included, and compare the sum with the distance covered.

    Recipe: ``hookline.HookManager(["path_length"], sinks=[...])``.

    The way begins where the loop starts the hook; in a loop of your own that does not, at the first step it sees.
    Keeps two copies of the parameters.
    """

    name = "path_length"
    description = "length of the way of the parameters, and how straight it is"
    kept = ("beginning", "previous", "length")
    beginning: Tensor | None = None
    previous: Tensor | None = None
    length: Tensor | None = None
    metrics = (
        ("path_length", "sum of all steps so far", "Σ ‖θₜ₊₁ − θₜ‖", "never falls", "way"),
        ("net_displacement", "distance from the beginning", "‖θₜ − θ₀‖", "", "distance"),
        ("path_efficiency", "distance over way", "‖θₜ − θ₀‖ / Σ ‖θₜ₊₁ − θₜ‖; 1 before the first move",
         "1: straight; near 0: going round in circles", "straightness"),
    )  # fmt: skip

    def start(self, model: nn.Module) -> None:
        """Begin the way here, unless it goes on from a checkpoint."""
        if self.beginning is None:
            self._begin(FiringValues(model).flat_parameters)

    def _begin(self, flat: Tensor | None) -> None:
        if flat is not None:
            self.beginning = self.previous = flat
            self.length = flat.new_zeros((), dtype=widest_float(flat.device))

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Add a step; report at the other points."""
        flat = values_of(ctx).flat_parameters
        if flat is None:
            return None
        if self.previous is None or self.length is None or self.previous.shape != flat.shape:
            self._begin(flat)
        else:
            self.length = self.length + norm(flat - self.previous)
            self.previous = flat
        if ctx.hook_point is HookPoint.POST_STEP or self.beginning is None or self.length is None:
            return None
        distance = norm(flat - self.beginning)
        # A straight way may come out longer than it is by rounding.
        efficiency = torch.where(self.length > 0, (distance / self.length).clamp(max=1.0), 1.0)
        return {"path_length": self.length, "net_displacement": distance, "path_efficiency": efficiency}


_ALIGN: Final = "above 0: descent shrinks the weights; below 0: it grows them; near 0 it turns them"


class WeightTrackingHook(Analysis):
    """Measure every parameter of two dimensions or more that is no bias, and the means over all of them.

    Recipe: ``hookline.HookManager(["weight_tracking"], sinks=[...])``.

    All singular values are computed up to 512 × 512 (on the smaller side); above, the 20 largest, and the effective
    rank is that of these alone. A convolution counts as outputs by inputs and positions.
    """

    name = "weight_tracking"
    description = "size, spectrum and alignment with the gradient of every weight matrix"
    reduce = MappingProxyType({"max_top_sv": "max"})
    needs_grads = True

    metrics = (
        ("weight_norm/{param}", "length of a weight", "‖W‖"),
        ("top_sv/{param}", "largest singular value", "σ₁", "how much it can stretch an input"),
        ("effective_rank/{param}", "directions used about equally", "(Σσ)²/Σσ²", "low: a few directions matter"),
        ("grad_weight_align/{param}", "cosine of gradient and weight", "cos(g, W)", _ALIGN),
        ("total_weight_norm", "length of all weights together", "√Σ‖W‖²"),
        ("mean_weight_norm", "mean over weights", "mean ‖W‖"),
        ("mean_top_sv", "mean over weights", "mean σ₁"),
        ("max_top_sv", "largest over weights", "max σ₁"),
        ("mean_effective_rank", "mean over weights", "mean (Σσ)²/Σσ²"),
        ("mean_grad_weight_align", "mean over weights", "mean cos(g, W)", _ALIGN),
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the metrics of every matrix, then those over all."""
        values = values_of(ctx)
        weights = {name: p for name, p in values.parameters.items() if p.dim() >= 2 and not is_bias(name)}
        if not weights:
            return None
        sigmas = values.singular_values(weights)
        columns = {
            "weight_norm": _lengths(weights),
            "top_sv": {name: float(found[0]) for name, found in sigmas.items() if found.size},
            "effective_rank": {name: effective_rank(found) for name, found in sigmas.items() if found.any()},
            "grad_weight_align": _alignments(weights, values.mean_gradients),
        }
        metrics = {f"{column}/{name}": value for column, found in columns.items() for name, value in found.items()}
        return metrics | _over_all(columns)


def _lengths(weights: Mapping[str, Tensor]) -> dict[str, float]:
    lengths = fetch(norm(dense_float(weight)) for weight in weights.values())
    return {name: length for name, (length,) in zip(weights, lengths, strict=True)}


def _alignments(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    pairs = {}
    for name, weight in weights.items():
        grad, weight = gradients.get(name), dense_float(weight)
        if grad is not None and grad.shape == weight.shape:
            pairs[name] = grad.flatten(), weight.flatten()
    return dict(zip(pairs, cosines_in_float64(pairs.values()).tolist(), strict=True)) if pairs else {}


def _over_all(columns: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found = {"total_weight_norm": sum(norm * norm for norm in columns["weight_norm"].values()) ** 0.5}
    if columns["top_sv"]:
        found["max_top_sv"] = max(columns["top_sv"].values())
    for column, values in columns.items():
        if values:
            found[f"mean_{column}"] = sum(values.values()) / len(values)
    return found
