"""``subspace_gradient_info``: measure how many directions the mean gradients of the last reports vary in.

The Gram matrix of the window has all singular values of the centred gradients in it, and costs one pass over them a
report. With reference weights, it also measures how much of that variation points at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.analyses._analysis import Analysis, ReferenceHook
from hookline.analyses._firing_values import FiringValues, values_of
from hookline.analyses._history import GradientWindow
from hookline.analyses._vectors import flat_vector_or_none, norm
from hookline.lifecycle.context import RunDataContext

_TOP: Final = (1, 5, 10)
_FEW: Final = "low: the gradient varies in a few directions"


class SubspaceGradientInfoHook(ReferenceHook, Analysis):
    """Measure the singular values of the centred window of mean gradients; from the second gradient on.

    Recipe: ``hookline.HookManager(["subspace_gradient_info"], reference_weights="final.pt", sinks=[...])``.

    Args:
        window_size: How many gradients are looked at together; as many copies are kept.
        n_components: How many of the strongest directions are compared with the way to the reference weights.
        max_gib: The most memory that the gradients may take; over it, the hook says so and stays silent.
    """

    name = "subspace_gradient_info"
    description = "how many directions the mean gradients of the last epochs vary in"
    needs_grads = True
    kept = ("window",)

    # With σ the singular values of the centred gradients, v their directions, d the unit vector to the reference.
    metrics = (
        ("dims_for_90pct", "directions that hold 90 % of the variance", "min k: Σ₁ᵏσ² ≥ 0.9 Σσ²", _FEW),
        ("participation_ratio", "directions used about equally", "(Σσ²)² / Σσ⁴", _FEW),
        ("top_sv_ratio", "weight of the strongest direction", "σ₁ / Σσ", "1: a single direction"),
        ("svd_total_variance", "variance over the window", "Σσ²"),
        ("top1_explained", "share of the strongest 1", "Σ₁..1 σ² / Σσ²"),
        ("top5_explained", "share of the strongest 5", "Σ₁..5 σ² / Σσ²"),
        ("top10_explained", "share of the strongest 10", "Σ₁..10 σ² / Σσ²"),
        (
            "grad_energy_fraction_toward_solution",
            "share of the variation that points at the reference",
            "Σ σ²(v·d)² / Σσ², d of the unit vector to the reference",
            "1: all of it; 0: none",
        ),
        ("top1_energy_fraction_toward_solution", "the same of the strongest 1 alone", "Σ₁..1 σ²(v·d)² / Σσ²"),
        ("top5_energy_fraction_toward_solution", "the same of the strongest 5 alone", "Σ₁..5 σ²(v·d)² / Σσ²"),
        ("top10_energy_fraction_toward_solution", "the same of the strongest 10 alone", "Σ₁..10 σ²(v·d)² / Σσ²"),
    )

    def __init__(self, window_size: int = 50, n_components: int = 20, max_gib: float = 8.0) -> None:
        self.window = GradientWindow(self.whole_number("window_size", window_size, 2), exact=True)
        self.n_components = self.whole_number("n_components", n_components, 1)
        self.max_gib = max_gib

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Decompose the window, of which this gradient is the newest."""
        values = values_of(ctx)
        flat = values.flat_mean_gradient
        if not self.add_to_window(self.window, flat, "window_size", self.max_gib) or self.window.count < 2:
            return None
        gram = self.window.gram()
        if not np.isfinite(gram).all():
            return dict.fromkeys((name for name, *_ in self.metrics[:7]), float("nan"))
        centred = gram - gram.mean(axis=0) - gram.mean(axis=1, keepdims=True) + gram.mean()
        along = self._along_the_way(values)
        if along is None:  # directions take thrice as long as their sizes
            found = torch.linalg.eigvalsh(torch.from_numpy(centred)).numpy()
            return _spectrum_metrics(found[::-1].clip(min=0))
        found, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(centred)))
        squares = found[::-1].clip(min=0)
        return _spectrum_metrics(squares) | self._toward_solution(squares, vectors[:, ::-1].T @ (along - along.mean()))

    def _along_the_way(self, values: FiringValues) -> NDArray[Any] | None:
        """Return how far each gradient of the window goes along the way to the reference; None without a way."""
        way = self._way(values)
        length = 0.0 if way is None else float(norm(way))
        return self.window.times(way) / length if way is not None and length > 1e-12 else None

    def _toward_solution(self, squares: NDArray[Any], along: NDArray[Any]) -> dict[str, float]:
        """Return the shares of energy; ``along`` is how far each direction, scaled by its strength, goes that way."""
        total = float(squares.sum())
        if total == 0:
            return {}
        energies = np.square(along)[: self.n_components]
        found = {"grad_energy_fraction_toward_solution": float(energies.sum()) / total}
        for k in _TOP:
            if k <= energies.size:
                found[f"top{k}_energy_fraction_toward_solution"] = float(energies[:k].sum()) / total
        return found

    def _way(self, values: FiringValues) -> Tensor | None:
        """Return the way to the reference, in the order of the flat gradient; None if a parameter is missing."""
        names = values.mean_gradients
        ways = self.way_to_reference({name: values.parameters[name] for name in names if name in values.parameters})
        return flat_vector_or_none(ways[name] for name in names) if len(ways) == len(names) else None


def _spectrum_metrics(squares: NDArray[Any]) -> dict[str, Any]:
    total = float(squares.sum())
    if total == 0:  # the gradient did not change at all
        return {"svd_total_variance": 0.0}
    shares = np.cumsum(squares) / total
    values = np.sqrt(squares)
    return {
        "dims_for_90pct": min(int((shares < 0.9).sum()) + 1, squares.size),
        "participation_ratio": total**2 / float(np.square(squares).sum()),
        "top_sv_ratio": float(values[0] / values.sum()),
        "svd_total_variance": total,
        **{f"top{k}_explained": float(shares[min(k, shares.size) - 1]) for k in _TOP},
    }
