"""``token_gradient``: measure how the gradient of the embedding is spread over the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hookline.analyses._analysis import Analysis
from hookline.analyses._model_parts import find_embedding
from hookline.analyses._vectors import dense_float
from hookline.lifecycle.context import RunDataContext


class TokenGradientHook(Analysis):
    """Measure the inequality of the lengths of the embedding's gradient, row by row.

    Recipe: ``hookline.HookManager(["token_gradient"], sinks=[...])``. Silent while the gradient is zero.

    Args:
        embedding: The name of the table; if left out, the first ``nn.Embedding`` (not of positions).
    """

    name = "token_gradient"
    description = "how the gradient of the embedding is spread over the tokens"
    needs_grads = True
    # With r the lengths of rows; a group is every ⌊√p⌋-th token.
    metrics = (
        ("gradient_sparsity", "share of tokens with next to no gradient", "mean [r < 0.1 r̄]"),
        ("gradient_gini", "inequality over tokens", "Gini coefficient of r", "0: equal; 1: one has all"),
        ("stride_group_variance", "variance of the groups' means", "var (mean r by i mod ⌊√p⌋)"),
        ("stride_group_max_ratio", "strongest group over the mean of groups", "max / mean", "1: all alike"),
        ("tokens_for_50pct", "tokens that have half of all gradient", "min k: Σ₁ᵏ r ≥ ½ Σ r"),
        ("tokens_for_90pct", "tokens that have nine tenths of it", "min k: Σ₁ᵏ r ≥ 0.9 Σ r"),
        ("concentration_ratio", "share of tokens that have half of it", "tokens_for_50pct / p", "½: even"),
    )

    def __init__(self, embedding: str | None = None) -> None:
        self.embedding = embedding

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare the rows of the mean gradient."""
        found = find_embedding(self, ctx, self.embedding)
        if found is None:
            return None
        grad = (ctx.accumulated_grads or {}).get(found[0])
        if grad is None:  # it was not trained
            return None
        rows: NDArray[Any] = torch.linalg.vector_norm(dense_float(grad), dim=1).double().cpu().numpy()
        if not np.isfinite(rows).all():
            return dict.fromkeys((name for name, *_ in self.metrics), math.nan)
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
