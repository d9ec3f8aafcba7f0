"""``hessian_spectrum``: measure the largest and smallest curvatures of the loss, and their sum.

Eigenvalues by Lanczos, the trace by Hutchinson's random signs, both from products of the Hessian with vectors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.analyses._analysis import Intervention, same_random_numbers
from hookline.analyses._firing_values import parameters_of
from hookline.analyses._history import GIB
from hookline.analyses._vectors import flat_vector, norm
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext

_Product = Callable[[Tensor], Tensor]


class HessianSpectrumHook(Intervention):
    """Measure extreme eigenvalues and trace of the loss's Hessian on the batch of the step, at the weights after it.

    Recipe: ``hookline.HookManager(["hessian_spectrum"], sinks=[...])``.

    Over all parameters that are trained, biases too. Each firing takes ``iterations + probes`` products of Hessian and
    vector, each about two backward passes, and holds ``iterations`` + 1 copies of the parameters. Dropout is the same
    in all of them, so that there is one Hessian; random vectors are its own.

    Args:
        every_n_steps: How many steps from one look to the next; the first is at that step.
        iterations: Steps of Lanczos. More make ``top_eigenvalue`` right where eigenvalues lie close together;
            ``top_eigenvalue_error`` tells how far it may be off.
        top: How many of the largest eigenvalues to tell.
        probes: Random vectors for the trace; 0 leaves it out.
        max_gib: The most memory that the copies may take; over it, the hook says so and stays silent.
    """

    name = "hessian_spectrum"
    description = "largest and smallest curvatures of the loss, and their sum"
    requires = frozenset({"loss_fn"})
    # With λ the eigenvalues of the Hessian H, descending.
    metrics = (
        ("top_eigenvalue", "sharpness: the largest curvature", "λ₁", "high: a sharp valley"),
        ("top_eigenvalue_error", "how far it may be off", "‖H·v − λ₁·v‖", "small against λ₁: right"),
        ("eigenvalue_{number}", "the largest ones in turn", "λ₁, λ₂, …"),
        ("smallest_eigenvalue", "the most negative curvature", "λ_min", "below 0: a saddle"),
        ("lr_times_sharpness", "whether plain gradient descent is stable", "η·λ₁", "over 2: it is not"),
        ("trace", "sum of all curvatures", "mean of z·H·z, z of random signs"),
        ("trace_error", "standard error of that", "std/√probes", "small against the trace: right"),
    )

    def __init__(
        self, every_n_steps: int = 500, iterations: int = 20, top: int = 3, probes: int = 4, max_gib: float = 8.0
    ) -> None:
        self.set_schedule(every_n_steps)
        self.iterations = self.whole_number("iterations", iterations, 2)
        self.top = self.whole_number("top", top, 1)
        self.probes = self.whole_number("probes", probes, 0)
        self.max_gib = max_gib

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Multiply the Hessian with vectors, and return its eigenvalues and trace."""
        trained = {name: p for name, p in parameters_of(model_ctx.model).items() if p.requires_grad}
        if self.off or not trained or not self._check_memory(sum(p.numel() for p in trained.values())):
            return None
        like = flat_vector(trained.values())
        step = self.step_of(run_ctx)

        def product(vector: Tensor) -> Tensor:
            parts = torch.split(vector, [p.numel() for p in trained.values()])
            named = {name: part.view_as(p) for part, (name, p) in zip(parts, trained.items(), strict=True)}
            with same_random_numbers(step):
                found = model_ctx.hvp(named)
            return flat_vector(found[name] for name in trained)

        draw = torch.Generator().manual_seed(step)
        values, error = _lanczos(product, _normal(like, draw), min(self.iterations, like.numel()))
        metrics = self._spectrum_metrics(values, error, run_ctx.lr)
        return metrics | (_trace(product, like, draw, self.probes) if self.probes else {})

    def _check_memory(self, count: int) -> bool:
        """Return True if the vectors of Lanczos, of ``count`` numbers each, are within the limit; else turn off."""
        gib = min(self.iterations + 1, count) * count * torch.float32.itemsize / GIB
        if gib > self.max_gib:
            self.turn_off(
                f"would keep {self.iterations + 1} copies of the parameters in {gib:.1f} GiB, and max_gib="
                f"{self.max_gib:g} (give it fewer iterations=, or a larger max_gib=)"
            )
        return not self.off

    def _spectrum_metrics(self, values: NDArray[Any], error: float, rate: float | None) -> dict[str, float]:
        found = {f"eigenvalue_{number}": float(value) for number, value in enumerate(values[: self.top], start=1)}
        found |= {"top_eigenvalue": float(values[0]), "top_eigenvalue_error": error}
        found["smallest_eigenvalue"] = float(values[-1])
        return found if rate is None else {**found, "lr_times_sharpness": rate * float(values[0])}


def _normal(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=draw, dtype=like.dtype).to(like.device)


def _lanczos(product: _Product, start: Tensor, count: int) -> tuple[NDArray[Any], float]:
    """Return eigenvalues of the Hessian in the space of the first products, descending; and the largest's error."""
    basis = [start / norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(count):
        vector = product(basis[-1])
        diagonal.append(float(torch.dot(vector, basis[-1])))
        for _twice in range(2):  # against all before: rounding would bring back eigenvalues that were found
            for before in basis:
                vector = vector - torch.dot(vector, before) * before
        beside.append(float(norm(vector)))
        if not beside[-1] > 1e-6 * max(map(abs, diagonal)):
            break  # the space is closed (or not a number): there is nothing more to find
        basis.append(vector / norm(vector))
    if not np.isfinite([*diagonal, *beside]).all():
        return np.full(len(diagonal), np.nan), float("nan")
    size = len(diagonal)
    matrix = np.diag(diagonal) + np.diag(beside[: size - 1], 1) + np.diag(beside[: size - 1], -1)
    values, vectors = np.linalg.eigh(matrix)
    return values[::-1], abs(beside[-1] * float(vectors[-1, -1]))


def _trace(product: _Product, like: Tensor, draw: torch.Generator, probes: int) -> dict[str, float]:
    found = []
    for _ in range(probes):
        signs = torch.randint(2, like.shape, generator=draw).to(like.device, like.dtype) * 2 - 1
        found.append(float(torch.dot(signs, product(signs))))
    error = {"trace_error": float(np.std(found, ddof=1)) / probes**0.5} if probes > 1 else {}
    return {"trace": float(np.mean(found)), **error}
