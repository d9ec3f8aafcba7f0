"""``batch_dynamics``: how the gradients of single steps relate to those of steps before.

Takes what lies in ``.grad`` after each step into a window on the device; what is read at a report crosses to the host
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.analyses._analysis import EACH_STEP, Analysis, whole_number
from hookline.analyses._shared import work_of
from hookline.analyses._window import GradientWindow
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["BatchDynamicsHook"]

_LAGS: Final = (1, 2, 5, 10, 20, 50)
_WINDOWS: Final = (2, 5, 10, 20, 50)
_AT_ONCE: Final = 16
"""Gradients that are multiplied with the others at a time: as one product of matrices, which takes a third of what six
products of vectors a step would. As many more are kept."""
_NONE: Final = 1e-12
"""A gradient shorter than this is none, and is not compared."""


class BatchDynamicsHook(Analysis):
    """Coherence over steps, and the number of directions that the last steps have used.

    Recipe: ``hookline.HookManager(["batch_dynamics"], hook_config={"batch_dynamics": {"max_lag": 20}}, sinks=[...])``.

    Cosines are means over the steps since the last report; the rest is of the newest ``max_lag`` steps. Nothing waits
    for the device at a step.

    Args:
        max_lag: How many gradients are looked at together; that many and 16 more are kept.
        lags: Steps between two gradients that are compared; those over ``max_lag`` are left out.
        windows: Numbers of newest gradients that are added up; those over ``max_lag`` are left out.
        max_gib: The most memory that the gradients may take; over it, the hook says so and stays silent.
    """

    name = "batch_dynamics"
    description = "coherence of the gradients of single steps, and how many directions they use"
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = EACH_STEP
    kept = ("window", "sums", "counts")
    sums: Tensor | None
    counts: Tensor | None

    def __init__(
        self,
        max_lag: int = 50,
        lags: Iterable[int] | None = None,
        windows: Iterable[int] | None = None,
        max_gib: float = 8.0,
    ) -> None:
        most = whole_number(self.name, "max_lag", max_lag, 2)
        chosen = [whole_number(self.name, "lags", lag, 1) for lag in (_LAGS if lags is None else lags)]
        sizes = [whole_number(self.name, "windows", size, 2) for size in (_WINDOWS if windows is None else windows)]
        self.lags = sorted({lag for lag in chosen if lag <= most})
        self.windows = sorted({size for size in sizes if size <= most})
        self.window = GradientWindow(most, spare=_AT_ONCE)
        self.max_gib = max_gib
        self.reset()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        sign = "1: the same direction; 0: unrelated; below 0: they undo each other"
        lags = [
            MetricInfo(f"lag_{lag}", f"mean cosine of gradients {lag} steps apart", f"mean cos(gₜ, gₜ₋{lag})", sign)
            for lag in self.lags
        ]
        windows = [
            MetricInfo(
                f"efficiency_{size}",
                f"how much of the newest {size} gradients adds up",
                "‖Σ g‖ / Σ ‖g‖",
                f"1: all agree; {size**-0.5:.2f}: a random walk; 0: they cancel",
            )
            for size in self.windows
        ]
        return [
            *lags,
            MetricInfo("autocorrelation_mean", "mean over all lags", "mean of lag_k", sign),
            *windows,
            MetricInfo(
                "effective_rank",
                "how many directions the kept gradients use about equally",
                "exp(−Σ p ln p), p = λ/Σλ of G = g·gᵀ",
                "1: all in one line; as many as are kept: none alike",
            ),
            MetricInfo("top1_variance", "share of the strongest direction", "λ₁/Σλ", "1: all in one line"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Take a step in; report when it is time."""
        if self.off:
            return None
        if ctx.hook_point is HookPoint.POST_STEP:
            self._take(work_of(ctx).flat_step_gradient)
            return None
        return self._report()

    def _take(self, flat: Tensor | None) -> None:
        if flat is None or not self.fits(self.window, flat, "max_lag", self.max_gib):
            return
        self.window.add(flat)
        if self.window.fresh == _AT_ONCE:
            self._compare()

    def _compare(self) -> None:
        """Add the cosines of the steps since the last time up, where they are."""
        if not self.lags:
            return
        newest = self.window.slices(self.window.fresh)
        products = self.window.products()
        squares = products.diagonal()
        # Of each step and the one a lag before; a row that nothing was written to yet has length 0, and is none.
        pairs = torch.stack([products.roll(lag, 1).diagonal() for lag in self.lags])
        before = torch.stack([squares.roll(lag) for lag in self.lags])
        is_one = ~((squares < _NONE**2) | (before < _NONE**2))  # NaN is one
        cosines = torch.where(is_one, pairs / (squares * before).sqrt(), 0.0)
        for rows in newest:
            sums, counts = cosines[:, rows].sum(dim=1), is_one[:, rows].sum(dim=1)
            self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums
            self.counts = counts if self.counts is None else self.counts.to(counts.device) + counts

    def _report(self) -> dict[str, Any] | None:
        if self.window.count == 0:
            return None
        fresh = self.window.places(self.window.fresh)
        products = self.window.products().double().cpu().numpy()
        found = zip(self.lags, *self._means_over(products, np.array(fresh, dtype=np.int64)), strict=True)
        metrics = {f"lag_{lag}": float(total / count) for lag, total, count in found if count}
        if metrics:
            metrics["autocorrelation_mean"] = sum(metrics.values()) / len(metrics)
        self.sums = self.counts = None
        newest = self.window.places(self.window.count)
        gram = products[np.ix_(newest, newest)]
        return {**metrics, **self._efficiencies(gram), **_directions(gram)}

    def _means_over(self, products: NDArray[Any], rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Sums and counts of the cosines since the last report: those of the newest steps, and what `_compare` added.

        As there, but on the host, where the products are about to be read anyway.
        """
        squares = np.diagonal(products)
        others = rows - np.array(self.lags, dtype=np.int64)[:, None]  # below 0 is counted from the end, as in a ring
        is_one = ~((squares[rows] < _NONE**2) | (squares[others] < _NONE**2))  # NaN is one
        with np.errstate(all="ignore"):  # what overflows has no angle: NaN
            cosines = products[rows, others] / np.sqrt(squares[rows] * squares[others])
        sums = np.where(is_one, cosines, 0.0).sum(axis=1)
        counts = is_one.sum(axis=1)
        if self.sums is not None and self.counts is not None:
            before = torch.stack((self.sums, self.counts)).double().cpu().numpy()
            return sums + before[0], counts + before[1]
        return sums, counts

    def _efficiencies(self, gram: NDArray[Any]) -> dict[str, float]:
        lengths = np.sqrt(np.diag(gram))
        found = {}
        for size in self.windows:
            total = float(lengths[:size].sum())
            if lengths.size >= size and not total < _NONE:
                squared = float(gram[:size, :size].sum())
                found[f"efficiency_{size}"] = math.sqrt(max(squared, 0.0)) / total if squared == squared else math.nan
        return found

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.window.clear()
        self.sums = None
        self.counts = None


def _directions(gram: NDArray[Any]) -> dict[str, float]:
    if not np.isfinite(gram).all():
        return {"effective_rank": math.nan, "top1_variance": math.nan}
    if (np.diag(gram) >= _NONE**2).sum() < 2:
        return {}
    shares = torch.linalg.eigvalsh(torch.from_numpy(gram)).numpy().clip(min=0)[::-1]
    shares = shares / shares.sum()
    there = shares[shares > 0]
    return {"effective_rank": float(np.exp(-(there * np.log(there)).sum())), "top1_variance": float(shares[0])}
