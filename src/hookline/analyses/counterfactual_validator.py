"""``counterfactual_validator``: measure whether k shuffled epochs are enough for ``counterfactual``.

It trains one more, and compares every choice of k among them with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hookline.analyses._analysis import ReferenceIntervention, shuffled_epochs
from hookline.analyses._firing_values import parameters_of
from hookline.analyses._vectors import cosine, flat_vector, norm, ratio, weight_names
from hookline.analyses.counterfactual import COUNTERFACTUAL_POINTS
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import DebugInterventionHook
from hookline.when import HookPoint


class CounterfactualValidatorHook(ReferenceIntervention, DebugInterventionHook):
    """Train k + 1 shuffled epochs, and measure how far the mean of k of them is from that of all.

    Recipe: ``hookline.HookManager(["counterfactual_validator"], sinks=[...])``; groups leave it out, as it is for
    finding out whether ``counterfactual`` is right.

    A firing costs ``k + 1`` epochs. Biases are left out.

    Args:
        k: How many shuffled epochs are to be enough.
    """

    name = "counterfactual_validator"
    description = "whether k shuffled epochs are enough for counterfactual"
    requires = frozenset({"loader", "loss_fn"})
    reduce = MappingProxyType({"*_max": "max", "*_min": "min", "kp1_norm_strictly_lower": "min"})
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = COUNTERFACTUAL_POINTS
    needs_grads = True
    needs_pre_epoch_state = True
    scope = "trains"
    # With c the mean gradient of all k + 1 epochs, cᵢ that of all but the i-th.
    metrics = (
        ("kp1_content_norm", "mean of all k + 1", "‖c‖"),
        ("k_content_norm_max", "longest mean of k", "max ‖cᵢ‖"),
        ("k_content_norm_min", "shortest mean of k", "min ‖cᵢ‖"),
        ("k_content_norm_mean", "mean length of a mean of k", "mean ‖cᵢ‖"),
        ("kp1_norm_strictly_lower", "shorter than any of k", "1 if ‖c‖ < min ‖cᵢ‖, else 0", "1: settles"),
        ("norm_convergence_gap", "what one more changes", "(mean ‖cᵢ‖ − ‖c‖)/‖c‖", "small: k is enough"),
        ("k_to_kp1_cossim_mean", "direction of k and of all", "mean cos(cᵢ, c)", "1: k is enough"),
        ("k_to_kp1_cossim_min", "the worst of these", "min cos(cᵢ, c)", "1: k is enough"),
        ("kp1_cossim_to_solution", "all and the way to the reference", "cos(−c, θ_ref − θ_before)"),
        ("k_cossim_to_solution_mean", "any k and that way", "mean cos(−cᵢ, θ_ref − θ_before)"),
        ("k_cossim_to_solution_std", "how far these are apart", "std over i, by n", "small: k is enough"),
        ("k_cossim_to_solution_spread", "the largest less the smallest", "max − min over i", "small: k is enough"),
    )

    def __init__(self, k: int = 3) -> None:
        self.k = self.whole_number("k", k, 1)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Train k + 1 epochs, and compare each mean of k with the mean of all."""
        names = weight_names(run_ctx.accumulated_grads or {})
        if not names:
            return None
        model_ctx.restore_pre_epoch()
        way = self.way_to_solution(model_ctx.model)
        shapes = parameters_of(model_ctx.model)
        # On the CPU: there are k + 1 of them, each as large as the model.
        rows = [_row(gradients, names, shapes) for gradients in shuffled_epochs(model_ctx, self.k + 1)]
        means = [torch.stack(chosen).mean(0) for chosen in combinations(rows, self.k)]
        everything = torch.stack(rows).mean(0)
        return _agreement(means, everything) | _aim(means, everything, _flat_way(way, names, shapes))


def _row(gradients: Mapping[str, Tensor], names: list[str], shapes: Mapping[str, Tensor]) -> Tensor:
    return flat_vector(gradients.get(name, torch.zeros_like(shapes[name])) for name in names).cpu()


def _flat_way(
    way: Mapping[str, Tensor], names: list[str], shapes: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return the way in one vector, and where it has a reference; None if nowhere."""
    known = [name in way for name in names]
    if not any(known):
        return None
    sizes = torch.tensor([shapes[name].numel() for name in names])
    return _row(way, names, shapes), torch.tensor(known).repeat_interleave(sizes)


def _agreement(means: list[Tensor], everything: Tensor) -> dict[str, Any]:
    lengths, length = torch.stack([norm(mean) for mean in means]), norm(everything)
    angles = torch.stack([cosine(mean, everything) for mean in means])
    return {
        "kp1_content_norm": length,
        "k_content_norm_max": lengths.max(),
        "k_content_norm_min": lengths.min(),
        "k_content_norm_mean": lengths.mean(),
        "kp1_norm_strictly_lower": (length < lengths.min()).to(length.dtype),
        "norm_convergence_gap": ratio(lengths.mean() - length, length),
        "k_to_kp1_cossim_mean": angles.mean(),
        "k_to_kp1_cossim_min": angles.min(),
    }


def _aim(means: list[Tensor], everything: Tensor, way: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    if way is None:
        return {}
    to, known = way
    angles = torch.stack([cosine(-mean[known], to[known]) for mean in means])
    return {
        "kp1_cossim_to_solution": cosine(-everything[known], to[known]),
        "k_cossim_to_solution_mean": angles.mean(),
        "k_cossim_to_solution_std": angles.std(correction=0),
        "k_cossim_to_solution_spread": angles.max() - angles.min(),
    }
