"""``gradient_flow``: measure how large the gradient is that arrives at each unit of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from hookline.analyses._tracked import NEXT_TO_NONE, TRAINING, TrackedAnalysis, mean_of
from hookline.metta.feeders import GradientFeeder
from hookline.metta.trackers import GradientFlowState
from hookline.observe.host_values import fetch
from hookline.sites.wrappers import clean_modules


class GradientFlowHook(TrackedAnalysis):
    """Measure a running mean of the size of the gradient at each unit's output, since the last report.

    Recipe: ``hookline.HookManager(["gradient_flow"], sinks=[...])``.

    The mean starts at zero and is not corrected: after n passes it has 1 − betaⁿ of its height. Gradients of outputs
    are as large as a GradScaler has made them. ``out_proj`` of an ``nn.MultiheadAttention``, which is never called, is
    measured at the output of the attention as a whole.

    Args:
        beta: The share of the old mean that stays at each backward pass.
        targets: Which layers, by name or glob, with commas; if left out, every linear layer and convolution.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, layers and sums alone.
    """

    name = "gradient_flow"
    description = "size of the gradient that arrives at each unit of each layer"
    reduce = MappingProxyType({"smallest": "min", "largest": "max", "*blocked_fraction": "min"})
    kind = "backward"
    looks_for = "linear layers and convolutions"
    # With n = √mean g² over the batch, G = beta·G + (1 − beta)·n, from zero.
    metrics = (
        ("mean", "over layers", "mean of a layer's mean G"),
        ("smallest", "of the layer that gets least", "min of a layer's mean G", "near 0: it does not learn"),
        ("largest", "of the layer that gets most", "max of a layer's mean G", "far over the mean: explodes"),
        (
            "blocked_fraction",
            "units that get next to none beside the others, over layers",
            "mean of a layer's share of G ≤ 1e-6·mean",
            "0 is healthy",
        ),
        ("{layer}/mean", "over the units of a layer", "mean G"),
        ("{layer}/unit_{unit}", "of one unit, where it is not blocked", "G"),
        ("{layer}/blocked_fraction", "units of a layer that get none", "share of G < 1e-8", "absolute: see above"),
        ("{layer}/active_fraction", "the others", "1 less that", "1 is healthy"),
    )

    def __init__(
        self, beta: float = 0.95, targets: str | None = None, exclude: str | None = None, per_unit: bool = True
    ) -> None:
        self.beta = beta
        super().__init__(targets, exclude, per_unit)

    def new_tracker(self) -> GradientFlowState:
        """Return a tracker that keeps the means."""
        return GradientFlowState(self.beta)

    def new_feeder(self, component: str) -> GradientFeeder:
        """Return a hook on the gradient of a layer's output."""
        return GradientFeeder(self.tracker, component, TRAINING)

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        attentions = [module for _, module in clean_modules(model) if isinstance(module, nn.MultiheadAttention)]
        # It multiplies with the weight of its out_proj itself; the gradient of its output is that of out_proj's.
        callers: dict[int, nn.Module] = {id(attention.out_proj): attention for attention in attentions}
        return [(name, callers.get(id(module), module)) for name, module in super()._layers(model)]

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` multiplies with a matrix; an embedding does not."""
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.parameter.UninitializedParameter):  # which has no dimensions yet
            return "Norm" not in type(module).__name__
        is_matrix = isinstance(weight, nn.Parameter) and weight.dim() >= 2
        return is_matrix and not isinstance(module, nn.Embedding | nn.EmbeddingBag)

    def is_of_unit(self, name: str) -> bool:
        """Return whether the metric is not of a whole layer."""
        return name.rpartition("/")[2].startswith("unit_")

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all layers."""
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        has_nan = any(map(math.isnan, means))
        mean = mean_of([value for value in means if math.isfinite(value)] or [0.0])
        shares = fetch((sizes <= NEXT_TO_NONE * mean).float().mean() for sizes in self.tracker.counted().values())
        return {
            "mean": mean_of(means),
            "smallest": math.nan if has_nan else min(means),
            "largest": math.nan if has_nan else max(means),
            "blocked_fraction": mean_of([share for (share,) in shares]),  # a NaN is not blocked
        }
