"""``gradient_projection`` and ``subspace_gradient_info``: measure where gradients and moves lead, by known weights.

The manager gives both reference weights (``HookManager(reference_weights=...)``). The Gram matrix of a window of mean
gradients has all singular values of the centred gradients in it, and costs one pass over them a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.analyses._base import Analysis, ReferenceHook, mean_of
from hookline.analyses._history import GradientWindow
from hookline.analyses._values import FiringValues, values_of
from hookline.analyses._vectors import dense_float, flat_vector_or_none, is_bias, norm, norm_of_all
from hookline.errors import Hint
from hookline.lifecycle.context import RunDataContext
from hookline.observe.host_values import fetch

_NONE: Final = 1e-12
"""A vector shorter than this has no direction."""


_GRAD: Final = "cos(−g, θ* − θ_prev)"
_DISP: Final = "cos(θ − θ_prev, θ* − θ_prev)"
_SIGN: Final = "above 0: towards the reference; below 0: away from it"


class GradientProjectionHook(ReferenceHook, Analysis):
    """Measure the cosines of descent and displacement with the way from the last weights to the reference.

    Recipe: ``hookline.HookManager(["gradient_projection"], reference_weights="final.pt", sinks=[...])``.

    Parameters that the reference does not have, or has in another shape, are left out. Keeps one copy of the
    parameters besides the reference.
    """

    name = "gradient_projection"
    description = "whether gradients and moves point at the reference weights"
    needs_grads = True
    kept = ("previous",)
    previous: dict[str, Tensor] | None = None

    metrics = (
        ("grad_cossim_to_solution/{param}", "descent of a weight", _GRAD, _SIGN),
        ("disp_cossim_to_solution/{param}", "move of a weight since the last report", _DISP, _SIGN),
        ("overall_grad_cossim_to_solution", "descent of all parameters", _GRAD, _SIGN),
        ("overall_disp_cossim_to_solution", "move of all parameters", _DISP, _SIGN),
        ("mean_layer_grad_cossim_to_solution", "mean over parameters, biases too", _GRAD, _SIGN),
        ("mean_layer_disp_cossim_to_solution", "mean over parameters, biases too", _DISP, _SIGN),
        ("displacement_norm", "length of the move since the last report", "‖θ − θ_prev‖"),
        ("distance_to_reference", "how far it is yet", "‖θ* − θ‖", "falls if it gets there"),
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare with the weights at the last report; the first time return only the distance."""
        if self.off:
            return None
        parameters = values_of(ctx).parameters
        ways = self.way_to_reference(parameters)
        if not ways:
            self.turn_off(
                "looked for reference weights with the names and shapes of the model's and found "
                f"{len(self.reference_weights) or 'none'}",
                hint=Hint.REFERENCE_WEIGHTS,
            )
            return None
        now = {name: dense_float(parameters[name]).clone() for name in ways}
        previous, self.previous = self.previous or {}, now
        metrics: dict[str, Any] = {"distance_to_reference": norm_of_all(ways.values())}
        moves = {name: now[name] - previous[name].to(ways[name].device) for name in ways if name in previous}
        if not moves:
            return metrics
        ways = {name: ways[name] + move for name, move in moves.items()}  # from where the last report was
        gradients = {name: dense_float(grad) for name, grad in (ctx.accumulated_grads or {}).items() if name in ways}
        descents = {name: -grad for name, grad in gradients.items() if grad.shape == ways[name].shape}
        metrics |= {**_cosines("grad", descents, ways), **_cosines("disp", moves, ways)}
        return {**metrics, "displacement_norm": norm_of_all(moves.values())}


def _cosines(kind: str, vectors: Mapping[str, Tensor], ways: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the cosines of ``vectors`` with the way of their parameter, and those over all parameters."""
    if not vectors:
        return {}
    found, cosines = {}, []
    dots = fetch(_dots(ways[name].flatten(), vector.flatten()) for name, vector in vectors.items())
    for name, (way, product, vector) in zip(vectors, dots, strict=True):
        if not (way <= _NONE**2 or vector <= _NONE**2):
            cosines.append(product / (way * vector) ** 0.5)
            if ways[name].dim() >= 2 and not is_bias(name):
                found[f"{kind}_cossim_to_solution/{name}"] = cosines[-1]
    way, product, vector = (sum(column) for column in zip(*dots, strict=True))
    lengths = (way * vector) ** 0.5
    found[f"overall_{kind}_cossim_to_solution"] = 0.0 if lengths == 0 else product / lengths
    if cosines:  # none of them has a direction if all gradients, or all moves, are zero
        found[f"mean_layer_{kind}_cossim_to_solution"] = mean_of(cosines)
    return found


def _dots(way: Tensor, vector: Tensor) -> Tensor:
    return torch.stack((way @ way, way @ vector, vector @ vector))


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
        ("grad_energy_fraction_toward_solution", "share of the variation that points at the reference",
         "Σ σ²(v·d)² / Σσ², d of the unit vector to the reference", "1: all of it; 0: none"),
        ("top1_energy_fraction_toward_solution", "the same of the strongest 1 alone", "Σ₁..1 σ²(v·d)² / Σσ²"),
        ("top5_energy_fraction_toward_solution", "the same of the strongest 5 alone", "Σ₁..5 σ²(v·d)² / Σσ²"),
        ("top10_energy_fraction_toward_solution", "the same of the strongest 10 alone", "Σ₁..10 σ²(v·d)² / Σσ²"),
    )  # fmt: skip

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
        way = self._way(values)
        if way is None or not (length := float(norm(way))) > 1e-12:  # directions take thrice as long as their sizes
            return _spectrum_metrics(torch.linalg.eigvalsh(torch.from_numpy(centred)).numpy()[::-1].clip(min=0))
        found, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(centred)))
        squares, along = found[::-1].clip(min=0), self.window.times(way) / length
        return _spectrum_metrics(squares) | self._toward_solution(squares, vectors[:, ::-1].T @ (along - along.mean()))

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
