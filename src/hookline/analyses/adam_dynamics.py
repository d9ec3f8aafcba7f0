"""``adam_dynamics``: measure how Adam changes a gradient, by its state; compare Adam's step with a plain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.analyses._base import ReferenceIntervention
from hookline.analyses._values import (
    cosine,
    flat_vector,
    flat_vector_or_none,
    norm,
    parameters_of,
    ratio,
    weight_names,
    widest_float,
)
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext


def _aims(prefix: str, aim: str, sign: str) -> list[tuple[str, ...]]:
    return [
        (f"momentum_{prefix}_cossim", f"momentum and {aim}", f"cos(m, {aim})", sign),
        (f"update_{prefix}_cossim", f"Adam's step and {aim}", f"cos(u, {aim})", sign),
        (f"grad_{prefix}_cossim", f"gradient and {aim}", f"cos(g, {aim})", sign),
        (f"optimizer_{prefix}_amplification", "what Adam adds to that", "the second less the third"),
    ]


class AdamDynamicsHook(ReferenceIntervention):
    """Measure how Adam turns and stretches the gradient of a step: momentum, per-weight rates, and where the step aims.

    Recipe: ``hookline.HookManager(["adam_dynamics"], sinks=[...])``.

    Reads the state of Adam and AdamW (plain, foreach, fused, capturable, with amsgrad or maximize), each parameter by
    its own group; weight decay is left out, as are biases. Of other optimizers there are no metrics. Nothing is
    changed or run again, so it costs a few passes over the weights in the steps that are due.

    Args:
        every_n_steps: How many steps from one burst to the next; the first begins at that step.
        burst_length: How many steps in a row are looked at.
    """

    name = "adam_dynamics"
    description = "what Adam makes of the gradient: momentum, stretch, turn, and aim"
    scope = "reads"
    metrics = (
        ("momentum_grad_cossim", "momentum and gradient", "cos(m, g)", "below 0: the past disagrees"),
        ("amplification_ratio", "Adam's step over a plain one", "‖u‖/‖η·g‖, u = η·m̂/(√v̂+ε)", ">1: longer"),
        ("update_deflection", "share of the step across the gradient", "‖u⊥g‖/‖u‖", "1: turned fully"),
        ("effective_lr_cv", "how unequal the rates of weights are", "std/mean of η/(√v̂+ε)", "0: alike"),
        *_aims("solution", "θ_ref − θ", "below 0: the step, which is subtracted, goes there"),
        *_aims("probe", "the target gradient", "above 0: the step lowers the target's loss"),
    )

    def __init__(self, every_n_steps: int = 500, burst_length: int = 10) -> None:
        self.set_schedule(every_n_steps, burst_length)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Read the state of Adam, and compare."""
        parts = _parts(model_ctx)
        if not parts:
            return None
        metrics = _turn_and_stretch(parts)
        for prefix, aim in (
            ("solution", self.way_to_solution(model_ctx.model)),
            ("probe", run_ctx.target_grad or {}),
        ):
            names = weight_names(parts, aim)
            metrics |= _aim(prefix, [parts[name] for name in names], flat_vector_or_none(aim[name] for name in names))
        return metrics


class _Part(NamedTuple):
    """Hold flat vectors of one parameter."""

    momentum: Tensor
    update: Tensor
    """What Adam subtracts from the weights."""
    gradient: Tensor
    plain: Tensor
    """What plain gradient descent with the same rate subtracts."""
    rates: Tensor


def _parts(model_ctx: ModelDataContext) -> dict[str, _Part]:
    gradients, parameters = model_ctx.gradients, parameters_of(model_ctx.model)
    # Adam and AdamW alone have amsgrad in their groups; RAdam and NAdam keep the same moments, and step otherwise.
    groups = {id(p): group for group in model_ctx.param_groups if "amsgrad" in group for p in group["params"]}
    found: dict[str, _Part] = {}
    for name in weight_names(gradients, parameters):
        group = groups.get(id(parameters[name]))
        part = None if group is None else _part(gradients[name], group, model_ctx.optimizer_state(name))
        if part is not None:
            found[name] = part
    return found


def _part(gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> _Part | None:
    first, second = state.get("exp_avg"), state.get("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
    if first is None or second is None or "step" not in state:
        return None  # a parameter that has not been trained yet
    momentum, square, descent = flat_vector([first]), flat_vector([second]), flat_vector([gradient])
    if group.get("maximize"):
        descent = -descent
    # The count is a tensor on the device for some kinds of Adam: it is not waited for.
    count = torch.as_tensor(state["step"]).to(widest_float(descent.device))
    beta1, beta2 = (1 - beta ** count.clamp(min=1) for beta in group["betas"])
    rates = group["lr"] / ((square / beta2).sqrt() + group["eps"])
    return _Part(momentum, rates * (momentum / beta1), descent, group["lr"] * descent, rates)


def _joined(parts: list[_Part]) -> _Part:
    return _Part(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _turn_and_stretch(parts: Mapping[str, _Part]) -> dict[str, Any]:
    momentum, update, gradient, plain, rates = _joined(list(parts.values()))
    unit = ratio(gradient, norm(gradient))
    across = update - torch.dot(update, unit) * unit
    turned = torch.where(norm(gradient) == 0, torch.zeros_like(across[0]), ratio(norm(across), norm(update)))
    return {
        "momentum_grad_cossim": cosine(momentum, gradient),
        "amplification_ratio": ratio(norm(update), norm(plain)),
        "update_deflection": turned,
        "effective_lr_cv": ratio(rates.std(), rates.mean()) if rates.numel() > 1 else torch.zeros_like(across[0]),
    }


def _aim(prefix: str, parts: list[_Part], aim: Tensor | None) -> dict[str, Any]:
    if aim is None:
        return {}
    all_parts = _joined(parts)
    update, gradient = cosine(all_parts.update, aim), cosine(all_parts.gradient, aim)
    return {
        f"momentum_{prefix}_cossim": cosine(all_parts.momentum, aim),
        f"update_{prefix}_cossim": update,
        f"grad_{prefix}_cossim": gradient,
        f"optimizer_{prefix}_amplification": update - gradient,
    }
