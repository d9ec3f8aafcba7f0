"""``token_gradient``: how the gradient of the embedding is spread over the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._parts import embedding_or_off
from hookline.analyses._shared import wide
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["TokenGradientHook"]

_NAMES: Final = (
    "gradient_sparsity",
    "gradient_gini",
    "stride_group_variance",
    "stride_group_max_ratio",
    "tokens_for_50pct",
    "tokens_for_90pct",
    "concentration_ratio",
)


class TokenGradientHook(Analysis):
    """Inequality of the lengths of the embedding's gradient, row by row.

    Recipe: ``hookline.HookManager(["token_gradient"], sinks=[...])``. Silent while the gradient is zero.

    Args:
        embedding: The name of the table; if left out, the first ``nn.Embedding`` (not of positions).
    """

    name = "token_gradient"
    description = "how the gradient of the embedding is spread over the tokens"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    needs_grads = True

    def __init__(self, embedding: str | None = None) -> None:
        self.embedding = embedding

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; r are the lengths of rows, and a group is every ⌊√p⌋-th token."""
        return [
            MetricInfo("gradient_sparsity", "share of tokens with next to no gradient", "mean [r < 0.1 r̄]"),
            MetricInfo("gradient_gini", "inequality over tokens", "Gini coefficient of r", "0: equal; 1: one has all"),
            MetricInfo("stride_group_variance", "variance of the groups' means", "var (mean r by i mod ⌊√p⌋)"),
            MetricInfo(
                "stride_group_max_ratio", "strongest group over the mean of groups", "max / mean", "1: all alike"
            ),
            MetricInfo("tokens_for_50pct", "tokens that have half of all gradient", "min k: Σ₁ᵏ r ≥ ½ Σ r"),
            MetricInfo("tokens_for_90pct", "tokens that have nine tenths of it", "min k: Σ₁ᵏ r ≥ 0.9 Σ r"),
            MetricInfo(
                "concentration_ratio", "share of tokens that have half of it", "tokens_for_50pct / p", "½: even"
            ),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Over the rows of the mean gradient."""
        found = embedding_or_off(self, ctx, self.embedding)
        if found is None:
            return None
        grad = (ctx.accumulated_grads or {}).get(found[0])
        if grad is None:  # it was not trained
            return None
        rows: NDArray[Any] = torch.linalg.vector_norm(wide(grad), dim=1).double().cpu().numpy()
        if not np.isfinite(rows).all():
            return dict.fromkeys(_NAMES, math.nan)
        return _spread(rows) if rows.any() else None


def _spread(rows: NDArray[Any]) -> dict[str, Any]:
    count, total = rows.size, float(rows.sum())
    rising = np.sort(rows)
    shares = np.cumsum(rising[::-1]) / total
    stride = math.isqrt(count)
    groups = np.array([rows[group::stride].mean() for group in range(stride)])
    half, most = (min(int((shares < part).sum()) + 1, count) for part in (0.5, 0.9))
    return {
        "gradient_sparsity": float((rows < 0.1 * rows.mean()).mean()),
        "gradient_gini": float((2 * np.arange(1, count + 1) - count - 1) @ rising) / (count * total),
        "stride_group_variance": float(groups.var()),
        "stride_group_max_ratio": float(groups.max() / groups.mean()),
        "tokens_for_50pct": half,
        "tokens_for_90pct": most,
        "concentration_ratio": half / count,
    }
