"""``batch_dynamics``: measure how the gradients of single steps relate to those of steps before."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.analyses._base import StepAnalysis, mean_of
from hookline.analyses._history import GradientWindow
from hookline.analyses._values import values_of
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo

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
