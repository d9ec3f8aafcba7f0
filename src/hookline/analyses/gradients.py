"""Measure gradients: their length, whether they agree over steps and reports, and where they lead.

``norms``, ``consecutive``, ``variance``, ``batch_dynamics``, ``gradient_projection`` and
``subspace_gradient_info``. The last two compare with reference weights (``HookManager(reference_weights=...)``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.analyses._base import Analysis, ReferenceHook, StepAnalysis, mean_of
from hookline.analyses._values import (
    FiringValues,
    GradientWindow,
    cosines_in_float64,
    dense_float,
    flat_vector_or_none,
    is_bias,
    norm,
    norm_of_all,
    values_of,
)
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo
from hookline.observe.host_values import fetch
from hookline.phases import phase
from hookline.sites import _torch
from hookline.sites.functions.wrapped import around_backward
from hookline.when import HookPoint


class NormsHook(Analysis):
    """Measure the length of the gradient at each step, before and after clipping, and the mean gradient since a report.

    Recipe: ``hookline.HookManager(["norms"], sinks=[...])``.

    ``grad_norm`` is read when ``backward()`` has returned, so whatever clips comes later; biases count. The norms of
    the mean gradient, at reports, are of what the optimizer was given, after clipping, and leave biases out.
    """

    name = "norms"
    description = "length of the gradient before and after clipping, norm of the mean gradient by parameter"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.POST_STEP})
    loop_points = MappingProxyType(
        {"epoch": {HookPoint.POST_EPOCH, HookPoint.POST_STEP}, "step": {HookPoint.SNAPSHOT, HookPoint.POST_STEP}}
    )
    reduce = MappingProxyType({"max_component": "max", "grad_norm*": "max"})
    needs_grads = True
    metrics = (
        ("grad_norm",
         "length of the whole gradient of a step before clipping, with biases", "‖g‖",
         "a jump: a bad batch, or an instability", "‖g‖"),
        ("grad_norm_clipped", "the same after clipping, as the optimizer was given it", "‖g‖", "", "clipped"),
        ("total_norm", "norm of the mean gradient since the last report, after clipping, without biases", "‖ḡ‖"),
        ("max_component", "largest entry of it", "max |ḡᵢ|", "far above the mean: few weights learn", "max"),
        ("mean_component", "mean size of an entry of it", "mean |ḡᵢ|", "", "mean |g|"),
        ("norm_{param}", "norm of one parameter's part of it", "‖ḡ_w‖", "0: that part does not learn"),
    )  # fmt: skip
    _read: _BeforeClipping | None = None
    _scaler: Any = None

    def take_scaler(self, scaler: Any) -> None:
        """Report gradients without the scale of this ``GradScaler``; the loops and hosts call it."""
        self._scaler = scaler

    def start(self, model: nn.Module) -> None:
        """Read gradients at the end of each backward pass."""
        self.finish()
        self._read = _BeforeClipping(model, self._scaler)

    def finish(self) -> None:
        """Read them no more."""
        if self._read is not None:
            self._read.end()
        self._read = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the norms, on the device."""
        if ctx.hook_point is HookPoint.POST_STEP:
            return self._of_step(ctx)
        values = values_of(ctx)
        flat = values.flat_mean_gradient
        if flat is None:
            return None
        sizes = flat.abs()
        return {
            "total_norm": norm(flat),
            "max_component": sizes.max(),
            "mean_component": sizes.mean(),
            **{f"norm_{name}": norm(grad) for name, grad in values.mean_gradients.items()},
        }

    def _of_step(self, ctx: RunDataContext) -> Mapping[str, Tensor]:
        whole = None if self._read is None else self._read.take()
        lengths = {"grad_norm": whole, "grad_norm_clipped": values_of(ctx).step_gradient_length}
        return {name: length for name, length in lengths.items() if length is not None}


class _BeforeClipping:
    """The length of a model's gradients when ``backward()`` returned last: of a whole step, if that was the last."""

    def __init__(self, model: nn.Module, scaler: Any) -> None:
        self._model, self._scaler = model, scaler
        self._length: Tensor | None = None
        self.end = around_backward(lambda losses: None, self._read)
        """Reads no more."""

    def take(self) -> Tensor | None:
        """Return it, on its device; None if there was no backward since the last time."""
        length, self._length = self._length, None
        return length

    def _read(self) -> None:
        """Read the length, unless this is no training: an intervention, or an evaluation."""
        if phase() != "train":
            return
        with torch.no_grad():
            length = norm_of_all(each.grad for each in self._model.parameters() if each.grad is not None)
            scale = None if self._scaler is None else _torch.scale_of(self._scaler)
            self._length = length if length is None or scale is None else length / scale


# -- one report and the next ------------------------------------------------------------------------------------------


class ConsecutiveHook(Analysis):
    """Measure the angle between one report's mean gradient and the next one's; nothing the first time.

    Recipe: ``hookline.HookManager(["consecutive"], sinks=[...])``. Keeps one copy of the gradient.
    """

    name = "consecutive"
    description = "angle between the mean gradients of consecutive epochs"
    needs_grads = True

    metrics = (
        ("cos_sim", "cosine between this mean gradient and the one before", "g·g_prev / (‖g‖‖g_prev‖); 0 if one is 0",
         "1: the same direction; 0: unrelated; below 0: going back and forth", "cos(g, g_prev)"),
        ("angle_degrees", "the same as an angle", "arccos(cos_sim)", "0 to 180", "angle"),
    )  # fmt: skip

    kept = ("previous",)
    previous: Tensor | None = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare with the gradient of the last report, and keep this one for the next."""
        now = values_of(ctx).flat_mean_gradient
        before, self.previous = self.previous, now
        if now is None or before is None or before.shape != now.shape:
            return None
        similarity = cosines_in_float64([(now, before.to(now.device))])[0]
        return {"cos_sim": similarity, "angle_degrees": torch.rad2deg(torch.acos(similarity.clamp(-1, 1)))}


class VarianceHook(Analysis):
    """Measure spread and agreement of the last mean gradients; from the second one on.

    Recipe: ``hookline.HookManager(["variance"], hook_config={"variance": {"window_size": 5}}, sinks=[...])``.

    Args:
        window_size: How many gradients are compared; as many copies are kept.
        max_gib: The most memory that these may take; over it, the hook says so and stays silent.
    """

    name = "variance"
    description = "spread and agreement of the mean gradients of the last epochs"
    needs_grads = True
    kept = ("window",)
    metrics = (
        ("gradient_variance", "mean variance of an entry", "mean (g − ḡ)²", "lower: steadier", "variance"),
        ("mean_pairwise_cos", "mean cosine between any two gradients of the window",
         "mean of gᵢ·gⱼ / (‖gᵢ‖‖gⱼ‖), i < j; 0 where one is 0",
         "1: all agree; 0: unrelated; below 0: they undo each other", "agreement"),
        ("signal_to_noise", "length of the mean over length of the standard deviation (n − 1)", "‖ḡ‖ / ‖std‖",
         "over 1: the common direction outweighs the changes; 1/√n: unrelated; infinite: nothing changed",
         "signal to noise"),
        ("window_mean_norm", "length of the mean over the window", "‖ḡ‖", "", "‖ḡ‖"),
    )  # fmt: skip

    def __init__(self, window_size: int = 10, max_gib: float = 8.0) -> None:
        self.window = GradientWindow(self.whole_number("window_size", window_size, 2), exact=True)
        self.max_gib = max_gib

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare the gradients of the window, of which this one is the newest."""
        flat = values_of(ctx).flat_mean_gradient
        if not self.add_to_window(self.window, flat, "window_size", self.max_gib) or self.window.count < 2:
            return None
        assert flat is not None
        gram, count = self.window.gram(), self.window.count
        mean_square = max(float(gram.sum()), 0.0) / count**2 if np.isfinite(gram).all() else float("nan")
        spread = max(float(np.trace(gram)) - count * mean_square, 0.0) if np.isfinite(mean_square) else mean_square
        lengths = np.sqrt(np.diag(gram))
        both = np.outer(lengths, lengths)
        cosines = np.divide(gram, both, out=np.zeros_like(gram), where=both != 0)
        return {
            "gradient_variance": spread / (count * flat.numel()),
            "mean_pairwise_cos": float(cosines.sum() - np.trace(cosines)) / (count * (count - 1)),
            "signal_to_noise": _over(mean_square**0.5, (spread / (count - 1)) ** 0.5),
            "window_mean_norm": mean_square**0.5,
        }


def _over(signal: float, noise: float) -> float:
    """Return ``signal / noise``: infinite without noise, 0 without both."""
    return signal / noise if noise != 0 else math.inf if signal else 0.0


# -- one step and those before ----------------------------------------------------------------------------------------

_LAGS: Final = (1, 2, 5, 10, 20, 50)
_WINDOWS: Final = (2, 5, 10, 20, 50)
_AT_ONCE: Final = 16
"""Gradients that are multiplied with the others at a time: as one product of matrices, which takes a third of what six
products of vectors a step would. As many more are kept."""
_NONE: Final = 1e-12
"""A gradient shorter than this is none, and is not compared."""


class BatchDynamicsHook(StepAnalysis):
    """Measure coherence over steps, and the number of directions that the last steps have used.

    Recipe: ``hookline.HookManager(["batch_dynamics"], hook_config={"batch_dynamics": {"max_lag": 20}}, sinks=[...])``.

    Cosines are means over the steps since the last report; the rest is of the newest ``max_lag`` steps.

    Args:
        max_lag: How many gradients are looked at together; that many and 16 more are kept.
        lags: Steps between two gradients that are compared; those over ``max_lag`` are left out.
        windows: Numbers of newest gradients that are added up; those over ``max_lag`` are left out.
        max_gib: The most memory that the gradients may take; over it, the hook says so and stays silent.
    """

    name = "batch_dynamics"
    description = "coherence of the gradients of single steps, and how many directions they use"
    kept = ("window", "sums")
    sums: Tensor | None = None
    """By lag: the sum of the cosines since the last report, and how many they are."""

    def __init__(
        self,
        max_lag: int = 50,
        lags: Iterable[int] | None = None,
        windows: Iterable[int] | None = None,
        max_gib: float = 8.0,
    ) -> None:
        most = self.whole_number("max_lag", max_lag, 2)
        chosen = [self.whole_number("lags", lag, 1) for lag in (_LAGS if lags is None else lags)]
        sizes = [self.whole_number("windows", size, 2) for size in (_WINDOWS if windows is None else windows)]
        self.lags = sorted({lag for lag in chosen if lag <= most})
        self.windows = sorted({size for size in sizes if size <= most})
        self.window = GradientWindow(most, batch=_AT_ONCE)
        self.max_gib = max_gib

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric, for the lags and windows that were chosen."""
        sign = "1: the same direction; 0: unrelated; below 0: they undo each other"
        rank = "how many directions the kept gradients use about equally", "exp(−Σ p ln p), p = λ/Σλ of G = g·gᵀ"
        rows = [
            *(
                (f"lag_{k}", f"mean cosine of gradients {k} steps apart", f"mean cos(gₜ, gₜ₋{k})", sign)
                for k in self.lags
            ),
            ("autocorrelation_mean", "mean over all lags", "mean of lag_k", sign),
            *(_efficiency(size) for size in self.windows),
            ("effective_rank", *rank, "1: all in one line; as many as are kept: none alike"),
            ("top1_variance", "share of the strongest direction", "λ₁/Σλ", "1: all in one line"),
        ]
        return [MetricInfo(*row) for row in rows]

    def take_step(self, ctx: RunDataContext) -> None:
        """Add the gradient of a step to the window."""
        flat = values_of(ctx).flat_step_gradient
        if self.add_to_window(self.window, flat, "max_lag", self.max_gib) and self.window.is_due:
            self._compare()

    def _compare(self) -> None:
        """Add up the cosines of the fresh steps with those before them, on the device."""
        fresh, products = self.window.fresh, self.window.products()
        if not self.lags or fresh.start == fresh.stop:
            return
        squares = products.diagonal()
        # Of each step and the one a lag before; a row that was never written has length 0, and does not count.
        pairs = torch.stack([products.roll(lag, 1).diagonal() for lag in self.lags])
        before = torch.stack([squares.roll(lag) for lag in self.lags])
        is_one = ~((squares < _NONE**2) | (before < _NONE**2))  # NaN is one
        cosines = torch.where(is_one, pairs / (squares * before).sqrt(), 0.0)
        found = torch.stack((cosines[:, fresh].sum(dim=1), is_one[:, fresh].sum(dim=1)))
        self.sums = found if self.sums is None else self.sums.to(found.device) + found

    def report(self) -> dict[str, Any] | None:
        """Return the mean cosines, and the metrics of the newest steps."""
        if self.window.count == 0:
            return None
        self._compare()
        sums, counts = ([], []) if self.sums is None else self.sums.tolist()
        self.sums = None
        found = zip(self.lags, sums, counts, strict=False)
        metrics = {f"lag_{lag}": total / count for lag, total, count in found if count}
        if metrics:
            metrics["autocorrelation_mean"] = mean_of(list(metrics.values()))
        gram = self.window.gram()
        return {**metrics, **self._efficiencies(gram), **_directions(gram)}

    def _efficiencies(self, gram: NDArray[Any]) -> dict[str, float]:
        lengths = np.sqrt(np.diag(gram))
        found = {}
        for size in self.windows:
            total = float(lengths[:size].sum())
            if lengths.size >= size and not total < _NONE:
                squared = float(gram[:size, :size].sum())
                found[f"efficiency_{size}"] = math.sqrt(max(squared, 0.0)) / total if squared == squared else math.nan
        return found


def _efficiency(size: int) -> tuple[str, ...]:
    sign = f"1: all agree; 1/√{size} for a random walk; 0: they cancel"
    return f"efficiency_{size}", f"how much of the newest {size} gradients adds up", "‖Σ g‖ / Σ ‖g‖", sign


def _directions(gram: NDArray[Any]) -> dict[str, float]:
    if not np.isfinite(gram).all():
        return {"effective_rank": math.nan, "top1_variance": math.nan}
    if (np.diag(gram) >= _NONE**2).sum() < 2:
        return {}
    shares = torch.linalg.eigvalsh(torch.from_numpy(gram)).numpy().clip(min=0)[::-1]
    shares = shares / shares.sum()
    there = shares[shares > 0]
    return {"effective_rank": float(np.exp(-(there * np.log(there)).sum())), "top1_variance": float(shares[0])}


# -- where gradients and moves lead -----------------------------------------------------------------------------------

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
                f"{len(self.reference_weights) or 'none'} (give it some: HookManager(reference_weights=...), or "
                "--hook-config reference_weights.path=FILE)"
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
        ("top1_energy_fraction_toward_solution", "the same for the strongest 1 only", "Σ₁..1 σ²(v·d)² / Σσ²"),
        ("top5_energy_fraction_toward_solution", "the same for the strongest 5 only", "Σ₁..5 σ²(v·d)² / Σσ²"),
        ("top10_energy_fraction_toward_solution", "the same for the strongest 10 only", "Σ₁..10 σ²(v·d)² / Σσ²"),
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
