"""``hessian``: measure the curvature along the last step, and what that step did to the gradient of this one.

An intervention: it goes back to the weights before the last step, and the guard undoes that.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.analyses._base import (
    ReferenceIntervention,
    by_parameter,
    same_random_numbers,
)
from hookline.analyses._values import (
    cosine,
    flat_vector,
    norm,
    ratio,
    weight_names,
)
from hookline.errors import HooklineWarning
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import LoopPoints
from hookline.messages import caller_stacklevel
from hookline.when import HookPoint

_HALF: Final = (torch.float16, torch.bfloat16)
_NO_SECOND: Final = ("not implemented", "double backward", "differentiate twice", "not differentiable")
"""What torch says, in one way or another, of an operation that has no second derivative."""


@dataclass
class _Before:
    """Hold the model before a step."""

    tensors: list[Tensor]
    """Parameters, then buffers."""
    rate: float | None
    """The learning rate of the step."""
    seen_after: bool
    """Whether this was copied after the step before, in a loop that has no point before a step."""


class HessianHook(ReferenceIntervention):
    """Measure the curvature along the gradient of the step before, and how much of this gradient comes from there.

    Recipe: ``hookline.HookManager(["hessian"], hook_config={"hessian": {"every_n_steps": 200}}, sinks=[...])``.

    It takes the gradients of this step and of the one before as they are in ``.grad``, goes back to the weights before
    the last step, and takes a second derivative of the present batch there (``"exact"``), or its gradient twice
    (``"difference"``), with the same random numbers, so that dropout does not count as curvature. During a burst it
    keeps two copies of the model. The first step of a burst yields nothing (in the step loop: the first two).

    Args:
        epsilon: How far the weights are moved for a difference. In float32 rounding adds an error of about 1e-7 of the
            gradient's length over epsilon: at 1e-4 the Rayleigh quotient of a quadratic loss is off by about 1e-2,
            exactly by 1e-5. With kinks (ReLU) the difference counts the units that switch on the way as well, which
            ``"exact"`` does not see: in epoch 13 of ``mod_arithmetic`` (seed 199) ``amplification_ratio`` is 7.1 at
            1e-4, 1.4 at 1e-2, and 0.6 exactly.
        every_n_steps: How many steps from one burst to the next; the first begins at that step.
        burst_length: How many steps in a row are looked at.
        method: ``"exact"``, or the ``"difference"`` of two gradients. A loss without second derivatives (a compiled
            model, say) gets the difference in any case, and one warning; parameters in half precision, in which such
            a move is rounded away, get the exact product where there is one.
        per_parameter: Report each parameter that is no bias as well.
    """

    name = "hessian"
    description = "curvature along the last step's gradient, and how it bends this one's"
    requires = frozenset({"loss_fn"})
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})
    loop_points: LoopPoints = MappingProxyType(
        {"epoch": {HookPoint.PRE_STEP, HookPoint.POST_STEP}, "step": {HookPoint.POST_STEP}}
    )
    intervention_points = frozenset({HookPoint.POST_STEP})
    needs_prev_step_grads = True
    # With g_B the gradient of the step, e = η·H_B·g_A, c = g_B + e.
    metrics = (
        ("entanglement_norm", "what the step before took off this gradient", "‖e‖, e = η·H_B·g_A", "0: no effect"),
        ("content_norm", "this batch's gradient had there been no step before, to first order", "‖c‖, c = g_B + e"),
        ("entanglement_energy_ratio", "what was taken off over what is left", "‖e‖²/‖g_B‖²", ">1: longer than g_B"),
        ("observed_grad_norm", "gradient of this step, as training saw it", "‖g_B‖"),
        ("entanglement_content_cossim", "entanglement and content", "cos(e, c)",
         "above 0: the step before did some of this one's work; below 0: it made more"),
        ("rayleigh_quotient", "curvature along g_A", "g_A·H_B·g_A/‖g_A‖²", "below 0: a saddle"),
        ("amplification_ratio", "how far H_B stretches g_A", "‖H_B·g_A‖/‖g_A‖"),
        ("edge_of_stability", "is the rate too large for it", "2·η·‖H_B·g_A‖/‖g_A‖", "above 4: it is"),
        ("entanglement_coherence", "this and the last one in the burst", "cos(e, e_before)", "1: steady"),
        ("entanglement_cossim_to_solution", "entanglement and the way to the reference", "cos(−e, θ_ref − θ)",
         "below 0: what it did to the step, +e, leads there"),
        ("content_cossim_to_solution", "content and the way to the reference", "cos(−c, θ_ref − θ)",
         "above 0: leads there"),
    )  # fmt: skip
    single = (
        "entanglement_norm", "content_norm", "entanglement_energy_ratio",
        "entanglement_cossim_to_solution", "content_cossim_to_solution",
    )  # fmt: skip

    def __init__(
        self,
        epsilon: float = 1e-4,
        every_n_steps: int = 1000,
        burst_length: int = 11,
        method: str = "exact",
        per_parameter: bool = True,
    ) -> None:
        self.epsilon = self.number("epsilon", epsilon)
        self.method = self.one_of("method", method, ("exact", "difference"))
        self.per_parameter = per_parameter
        self.set_schedule(every_n_steps, burst_length)
        self._before: dict[int, _Before] = {}
        self._last: Tensor | None = None
        self._last_step = -1

    # -- at each step --------------------------------------------------------------------------------------------

    def compute(self, ctx: RunDataContext) -> None:
        """Keep the model as it is before a step."""
        self._keep(self.step_of(ctx), ctx, seen_after=False)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Go back to before the last step and measure the curvature there."""
        step = self.step_of(run_ctx)
        before, now = self._before.get(step - 1), self._before.get(step)
        way = self.way_to_solution(model_ctx.model)  # from here, before going anywhere
        if now is None or now.seen_after:
            self._keep(step + 1, run_ctx, seen_after=True)
        found = None if before is None else self._measure(run_ctx, model_ctx, before, way)
        metrics = None if found is None else found[0] | self._coherence(step, found[1])
        if self.step_schedule is not None and not self.step_schedule.is_active(step + 1):
            self._forget()  # the next burst begins anew
        return metrics

    def _coherence(self, step: int, vector: Tensor) -> dict[str, Any]:
        """Compare with the product of the step before, if that was measured too."""
        last, last_step = self._last, self._last_step
        self._last, self._last_step = vector, step
        if last is None or last_step != step - 1 or last.shape != vector.shape:
            return {}
        return {"entanglement_coherence": cosine(vector, last)}

    def _keep(self, step: int, ctx: RunDataContext, *, seen_after: bool) -> None:
        assert ctx.model is not None
        copies = [tensor.detach().clone() for tensor in _tensors(ctx.model)]
        self._before = {number: one for number, one in self._before.items() if number == step - 1}
        self._before[step] = _Before(copies, ctx.lr, seen_after)

    def _forget(self) -> None:
        self._before, self._last, self._last_step = {}, None, -1

    # -- measuring -----------------------------------------------------------------------------------------------

    def _measure(
        self, run_ctx: RunDataContext, model_ctx: ModelDataContext, before: _Before, way: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], Tensor] | None:
        """Return the metrics, and the product that they are of."""
        last = run_ctx.prev_step_grads or {}
        if not weight_names(last) or not _put_back(model_ctx.model, before):
            return None
        length = norm(flat_vector(last.values()))
        if float(length) == 0.0:
            return None  # a step that went nowhere
        product = self._product(self.step_of(run_ctx), model_ctx, last, length)
        groups = model_ctx.param_groups
        rate = before.rate if before.rate is not None else float(groups[0]["lr"]) if groups else 0.0
        look = _Step(last, model_ctx.gradients, product, rate, way)
        if not look.names:
            return None
        metrics = look.whole(look.names)
        if self.per_parameter:
            metrics |= by_parameter(look.names, lambda name: look.parts([name]))
        return metrics, flat_vector(product[name] for name in look.names)

    def _product(
        self, step: int, model_ctx: ModelDataContext, last: Mapping[str, Tensor], length: Tensor
    ) -> dict[str, Tensor]:
        """Return the Hessian of this batch times the gradient of the last one, at the weights as they are."""
        if self.method == "exact" or any(part.dtype in _HALF for part in last.values()):
            product = self._exactly(step, model_ctx, last)
            if product is not None:
                return product
        with same_random_numbers(step):
            here = model_ctx.compute_batch_gradients()
        model_ctx.apply_perturbation({name: part / length.to(part.device) for name, part in last.items()}, self.epsilon)
        with same_random_numbers(step):
            moved = model_ctx.compute_batch_gradients()
        scale = length / self.epsilon
        return {name: (moved[name] - here[name]) * scale.to(moved[name].device) for name in here.keys() & moved.keys()}

    def _exactly(self, step: int, model_ctx: ModelDataContext, last: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the product; None, and one warning, if the loss has no second derivative."""
        try:
            with same_random_numbers(step):
                return model_ctx.hvp(last)
        except RuntimeError as error:  # NotImplementedError and LifecycleError are some
            if not any(words in str(error) for words in _NO_SECOND):
                raise
            self.method = "difference"
            found = f"Hook 'hessian' found no second derivative of the loss ({str(error).splitlines()[0][:120]})"
            text = f"{found}; it takes the difference of two gradients over epsilon={self.epsilon:g} instead."
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
            return None

    # -- state ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin another run."""
        super().reset()
        self._forget()

    def get_state_tensors(self) -> dict[str, Any]:
        """Return what a burst has kept."""
        found: dict[str, Any] = {"before": {str(step): one.tensors for step, one in self._before.items()}}
        return found if self._last is None else {**found, "last": self._last}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take it back, perhaps on another device."""
        for step, copies in tensors.get("before", {}).items():
            self._before[int(step)].tensors = copies
        self._last = tensors.get("last")

    def state_dict(self) -> dict[str, Any]:
        """Return the same, with the steps that it is of."""
        steps = {str(step): [one.rate, one.seen_after] for step, one in self._before.items()}
        return {**self.get_state_tensors(), "steps": steps, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a burst."""
        self._forget()
        for step, (rate, seen_after) in state.get("steps", {}).items():
            self._before[int(step)] = _Before([], rate, bool(seen_after))
        self._last_step = int(state.get("last_step", -1))
        self.set_state_tensors({key: state[key] for key in ("before", "last") if key in state})


class _Step(NamedTuple):
    """Compute the metrics of one step, each by parameter."""

    last: Mapping[str, Tensor]
    """The gradient of the step before."""
    gradient: Mapping[str, Tensor]
    """That of this step, at the weights after the one before."""
    product: Mapping[str, Tensor]
    rate: float
    way: Mapping[str, Tensor]

    @property
    def names(self) -> list[str]:
        """Return the parameters that all of them have."""
        return weight_names(self.last, self.gradient, self.product)

    @staticmethod
    def _flat(tensors: Mapping[str, Tensor], names: list[str]) -> Tensor:
        return flat_vector(tensors[name] for name in names)

    def parts(self, names: list[str]) -> dict[str, Any]:
        """Return the metrics that each parameter has as well."""
        g, e = self._flat(self.gradient, names), self.rate * self._flat(self.product, names)
        return {
            "entanglement_norm": norm(e),
            "content_norm": norm(g + e),
            "entanglement_energy_ratio": ratio(norm(e), norm(g)).square(),
            **self._aims([name for name in names if name in self.way]),
        }

    def _aims(self, names: list[str]) -> dict[str, Any]:
        if not names:
            return {}
        g, e = self._flat(self.gradient, names), self.rate * self._flat(self.product, names)
        to = self._flat(self.way, names)
        return {"entanglement_cossim_to_solution": cosine(-e, to), "content_cossim_to_solution": cosine(-g - e, to)}

    def whole(self, names: list[str]) -> dict[str, Any]:
        """Return the metrics of all parameters together."""
        g_a, g_b, vector = (self._flat(each, names) for each in (self.last, self.gradient, self.product))
        stretch = ratio(norm(vector), norm(g_a))
        return self.parts(names) | {
            "observed_grad_norm": norm(g_b),
            "entanglement_content_cossim": cosine(self.rate * vector, g_b + self.rate * vector),
            "rayleigh_quotient": ratio(torch.dot(g_a, vector), torch.dot(g_a, g_a)),
            "amplification_ratio": stretch,
            "edge_of_stability": 2 * self.rate * stretch,
        }


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _put_back(model: nn.Module, before: _Before) -> bool:
    """Copy the state ``before`` into the model; return False if its shapes differ. The guard undoes it."""
    now = _tensors(model)
    if [tensor.shape for tensor in now] != [tensor.shape for tensor in before.tensors]:
        return False
    with torch.no_grad():
        for tensor, copy in zip(now, before.tensors, strict=True):
            tensor.copy_(copy)
    return True
