"""``subspace_gradient_info``: how many directions the mean gradients of the last reports vary in.

Works on the Gram matrix of the window, which has all singular values of the centred gradients in it and costs one pass
over them a report. With reference weights it tells how much of that variation points at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.analyses._analysis import AT_REPORTS, Analysis, whole_number
from hookline.analyses._shared import Work, flatten, wide, work_of
from hookline.analyses._window import GradientWindow
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["SubspaceGradientInfoHook"]

_TOP: Final = (1, 5, 10)


class SubspaceGradientInfoHook(Analysis):
    """Singular values of the centred window of mean gradients; from the second gradient on.

    Recipe: ``hookline.HookManager(["subspace_gradient_info"], reference_weights="final.pt", sinks=[...])``.

    Args:
        window_size: How many gradients are looked at together; as many copies are kept.
        n_components: How many of the strongest directions are compared with the way to the reference weights.
        max_gib: The most memory that the gradients may take; over it, the hook says so and stays silent.
    """

    name = "subspace_gradient_info"
    description = "how many directions the mean gradients of the last epochs vary in"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    needs_grads = True
    needs_reference_weights = True
    kept = ("window",)

    def __init__(self, window_size: int = 50, n_components: int = 20, max_gib: float = 8.0) -> None:
        self.window = GradientWindow(whole_number(self.name, "window_size", window_size, 2), exact=True)
        self.n_components = whole_number(self.name, "n_components", n_components, 1)
        self.max_gib = max_gib
        self.reference_weights: Mapping[str, Tensor] = {}

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; σ are the singular values of the centred gradients, v their directions."""
        few = "low: the gradient varies in a few directions"
        way = "of the unit vector to the reference"
        return [
            MetricInfo("dims_for_90pct", "directions that hold 90 % of the variance", "min k: Σ₁ᵏσ² ≥ 0.9 Σσ²", few),
            MetricInfo("participation_ratio", "directions used about equally", "(Σσ²)² / Σσ⁴", few),
            MetricInfo("top_sv_ratio", "weight of the strongest direction", "σ₁ / Σσ", "1: a single direction"),
            MetricInfo("svd_total_variance", "variance over the window", "Σσ²"),
            *(MetricInfo(f"top{k}_explained", f"share of the strongest {k}", f"Σ₁..{k} σ² / Σσ²") for k in _TOP),
            MetricInfo(
                "grad_energy_fraction_toward_solution",
                "share of the variation that points at the reference",
                f"Σ σ²(v·d)² / Σσ², d {way}",
                "1: all of it; 0: none",
            ),
            *(
                MetricInfo(
                    f"top{k}_energy_fraction_toward_solution",
                    f"the same of the strongest {k} alone",
                    f"Σ₁..{k} σ²(v·d)² / Σσ²",
                )
                for k in _TOP
            ),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Over the window that this gradient is the newest of."""
        work = work_of(ctx)
        flat = work.flat_mean_gradient
        if self.off or flat is None or not self.fits(self.window, flat, "window_size", self.max_gib):
            return None
        self.window.add(flat)
        count = self.window.count
        if count < 2:
            return None
        gram = self.window.gram()
        if not np.isfinite(gram).all():
            return dict.fromkeys(_NAMES, float("nan"))
        centred = gram - gram.mean(axis=0) - gram.mean(axis=1, keepdims=True) + gram.mean()
        along = self._along_the_way(work)
        if along is None:  # directions take thrice as long as their sizes
            found = torch.linalg.eigvalsh(torch.from_numpy(centred)).numpy()
            return _figures(found[::-1].clip(min=0))
        found, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(centred)))
        squares = found[::-1].clip(min=0)
        return _figures(squares) | self._toward_solution(squares, vectors[:, ::-1].T @ (along - along.mean()))

    def _along_the_way(self, work: Work) -> NDArray[Any] | None:
        """How far each gradient of the window goes along the way to the reference; None if there is no such way."""
        way = self._way(work)
        length = 0.0 if way is None else float(torch.linalg.vector_norm(way))
        return self.window.times(way) / length if way is not None and length > 1e-12 else None

    def _toward_solution(self, squares: NDArray[Any], along: NDArray[Any]) -> dict[str, float]:
        """``along``: how far each direction goes along the way, as long as it is strong."""
        total = float(squares.sum())
        if total == 0:
            return {}
        energies = np.square(along)[: self.n_components]
        found = {"grad_energy_fraction_toward_solution": float(energies.sum()) / total}
        for k in _TOP:
            if k <= energies.size:
                found[f"top{k}_energy_fraction_toward_solution"] = float(energies[:k].sum()) / total
        return found

    def _way(self, work: Work) -> Tensor | None:
        """From the weights to the reference, in the order of the flat gradient; None if it lacks one of them."""
        parts = []
        for name in work.mean_gradients:
            weight, goal = work.parameters.get(name), self.reference_weights.get(name)
            if weight is None or goal is None or goal.shape != weight.shape:
                return None
            parts.append(wide(goal).to(weight.device) - wide(weight))
        return flatten(parts)

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.window.clear()


_EXPLAINED: Final = ("top1_explained", "top5_explained", "top10_explained")
_NAMES: Final = ("dims_for_90pct", "participation_ratio", "top_sv_ratio", "svd_total_variance", *_EXPLAINED)


def _figures(squares: NDArray[Any]) -> dict[str, Any]:
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
