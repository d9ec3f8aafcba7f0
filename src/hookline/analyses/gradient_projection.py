"""``gradient_projection``: measure whether gradients, and the moves they lead to, point at a known solution.

The manager gives it reference weights (``HookManager(reference_weights=...)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hookline.analyses._analysis import Analysis, ReferenceHook
from hookline.analyses._firing_values import values_of
from hookline.analyses._vectors import dense_float, is_bias, norm_of_all
from hookline.errors import Hint
from hookline.lifecycle.context import RunDataContext

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
        goal = self.goals(parameters)
        if not goal:
            self.turn_off(
                "looked for reference weights with the names and shapes of the model's and found "
                f"{len(self.reference_weights) or 'none'}",
                hint=Hint.REFERENCE_WEIGHTS,
            )
            return None
        now = {name: dense_float(parameters[name]) for name in goal}
        metrics: dict[str, Any] = {"distance_to_reference": norm_of_all(goal[name] - now[name] for name in goal)}
        previous, self.previous = self.previous, {name: value.clone() for name, value in now.items()}
        if previous is not None:
            metrics |= _projections({name: goal[name] for name in goal if name in previous}, previous, now, ctx)
        return metrics


def _projections(
    goal: Mapping[str, Tensor], previous: Mapping[str, Tensor], now: Mapping[str, Tensor], ctx: RunDataContext
) -> dict[str, float]:
    grads = ctx.accumulated_grads or {}
    descents: dict[str, list[float]] = {}
    moves: dict[str, list[float]] = {}
    for name, target in goal.items():
        before = previous[name].to(target.device)
        way = target - before
        move = now[name] - before
        vectors = [move]
        if name in grads and (gradient := dense_float(grads[name])).shape == way.shape:
            vectors.append(-gradient)
        # way·v and v·v of each, in one transfer per parameter
        dots = torch.stack([way.flatten() @ way.flatten(), *(x for v in vectors for x in _two(way, v))]).tolist()
        moves[name] = [dots[0], *dots[1:3]]
        if len(dots) > 3:
            descents[name] = [dots[0], *dots[3:5]]
    return {
        **_cosines("grad", descents, goal),
        **_cosines("disp", moves, goal),
        "displacement_norm": sum(squared for _, _, squared in moves.values()) ** 0.5,
    }


def _two(way: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    flat = vector.flatten()
    return way.flatten() @ flat, flat @ flat


def _cosines(kind: str, dots: Mapping[str, list[float]], goal: Mapping[str, Tensor]) -> dict[str, float]:
    """Return cosines from ``dots``: by parameter the squared way, its product with the vector, the squared vector."""
    if not dots:
        return {}
    cosines = {
        name: product / (way * vector) ** 0.5
        for name, (way, product, vector) in dots.items()
        if not (way <= _NONE**2 or vector <= _NONE**2)
    }
    way, product, vector = (sum(column) for column in zip(*dots.values(), strict=True))
    found = {
        f"{kind}_cossim_to_solution/{name}": value
        for name, value in cosines.items()
        if goal[name].dim() >= 2 and not is_bias(name)
    }
    lengths = (way * vector) ** 0.5
    found[f"overall_{kind}_cossim_to_solution"] = 0.0 if lengths == 0 else product / lengths
    if cosines:  # none of them has a direction if all gradients, or all moves, are zero
        found[f"mean_layer_{kind}_cossim_to_solution"] = sum(cosines.values()) / len(cosines)
    return found
