"""``gradient_flow``: how large the gradient is that arrives at each unit of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from hookline.analyses._tracked import NEXT_TO_NONE, TRAINING, Tracked, described, mean_of
from hookline.metta.gradient_flow_state import GradientFlowState
from hookline.metta.tracker_hooks import GradientFlowHook as _OnLayer
from hookline.observe.host_values import fetch
from hookline.sites.wrappers import clean_modules
from hookline.training.training_hook import MetricInfo

__all__ = ["GradientFlowHook"]


class GradientFlowHook(Tracked):
    """A running mean of the size of the gradient at each unit's output, since the last report.

    Recipe: ``hookline.HookManager(["gradient_flow"], sinks=[...])``.

    The mean starts at zero and is not corrected: after n passes it has 1 − betaⁿ of its height. Gradients of outputs
    are as large as a GradScaler has made them. ``out_proj`` of an ``nn.MultiheadAttention``, which nobody calls, is
    looked at where the attention as a whole gives it out.

    Args:
        beta: The share of what was that stays at each backward pass.
        targets: Which layers, by name or glob, with commas; if left out, every linear layer and convolution.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, layers and sums alone.
    """

    name = "gradient_flow"
    description = "size of the gradient that arrives at each unit of each layer"
    kind = "backward"
    looks_for = "linear layers and convolutions"

    def __init__(
        self, beta: float = 0.95, targets: str | None = None, exclude: str | None = None, per_unit: bool = True
    ) -> None:
        self.beta = beta
        super().__init__(targets, exclude, per_unit)

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; n = √mean g² over the batch, G = beta·G + (1 − beta)·n, from zero."""
        return described(
            [
                ("mean", "over layers", "mean of a layer's mean G", ""),
                ("smallest", "of the layer that gets least", "min of a layer's mean G", "near 0: it does not learn"),
                ("largest", "of the layer that gets most", "max of a layer's mean G", "far over the mean: explodes"),
                (
                    "blocked_fraction",
                    "units that get next to none beside the others, over layers",
                    "mean of a layer's share of G ≤ 1e-6·mean",
                    "0 is healthy",
                ),
                ("{layer}/mean", "over the units of a layer", "mean G", ""),
                ("{layer}/unit_{unit}", "of one unit, where it is not blocked", "G", ""),
                (
                    "{layer}/blocked_fraction",
                    "units of a layer that get none",
                    "share of G < 1e-8",
                    "absolute: see above",
                ),
                ("{layer}/active_fraction", "the others", "1 less that", "1 is healthy"),
            ]
        )

    def new_tracker(self) -> GradientFlowState:
        """It keeps the means."""
        return GradientFlowState(self.beta)

    def new_hook(self, component: str) -> _OnLayer:
        """On the gradient of a layer's output."""
        self._counter.register_component(component)
        return _OnLayer(self._counter, component, TRAINING)

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        attentions = [module for _, module in clean_modules(model) if isinstance(module, nn.MultiheadAttention)]
        # It multiplies with the weight of its out_proj itself; the gradient of its output is that of out_proj's.
        callers: dict[int, nn.Module] = {id(attention.out_proj): attention for attention in attentions}
        return [(name, callers.get(id(module), module)) for name, module in super()._layers(model)]

    def is_wanted(self, module: nn.Module) -> bool:
        """What multiplies with a matrix; an embedding does not."""
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.parameter.UninitializedParameter):  # which has no dimensions yet
            return "Norm" not in type(module).__name__
        is_matrix = isinstance(weight, nn.Parameter) and weight.dim() >= 2
        return is_matrix and not isinstance(module, nn.Embedding | nn.EmbeddingBag)

    def is_of_unit(self, name: str) -> bool:
        """The others are of layers."""
        return name.rpartition("/")[2].startswith("unit_")

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all layers."""
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        bad = any(map(math.isnan, means))
        return {
            "mean": mean_of(means),
            "smallest": math.nan if bad else min(means),
            "largest": math.nan if bad else max(means),
            "blocked_fraction": self._blocked(mean_of([value for value in means if math.isfinite(value)] or [0.0])),
        }

    def _blocked(self, mean: float) -> float:
        """The share of units that get next to nothing of the mean, over layers; a NaN is not blocked."""
        sizes: list[torch.Tensor] = list(self._counter.counted().values())
        shares = fetch((each <= NEXT_TO_NONE * mean).float().mean() for each in sizes)
        return mean_of([share for (share,) in shares])
