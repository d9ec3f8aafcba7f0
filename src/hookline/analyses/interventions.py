"""``hessian``, ``adam_dynamics``, ``counterfactual``: try something after a step or an epoch, which the guard undoes.

``hessian`` measures the curvature along the last step, and what that step did to the gradient of this one: it goes back
to the weights before the last step. ``adam_dynamics`` measures how Adam changes a gradient, by its state, and compares
Adam's step with a plain one. ``counterfactual`` measures how much of an epoch's gradient is due to the order of its
data: it trains the epoch again from its beginning, a few times, with the data shuffled; what the run's own gradient
shares with those is content, the rest is ordering. ``counterfactual_validator`` measures whether that is enough.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.analyses._base import ReferenceIntervention, by_parameter, same_random_numbers
from hookline.analyses._values import (
    cosine,
    flat_vector,
    flat_vector_or_none,
    is_bias,
    norm,
    parameters_of,
    ratio,
    weight_names,
    widest_float,
)
from hookline.errors import HooklineWarning
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import DebugInterventionHook, LoopPoints
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
        self, epsilon: float = 1e-4, every_n_steps: int = 1000, burst_length: int = 11, method: str = "exact"
    ) -> None:
        self.epsilon = self.number("epsilon", epsilon)
        self.method = self.one_of("method", method, ("exact", "difference"))
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
        metrics = look.whole(look.names) | by_parameter(look.names, lambda name: look.parts([name]))
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


# -- Adam -------------------------------------------------------------------------------------------------------------


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
        for prefix, aim in (("solution", self.way_to_solution(model_ctx.model)), ("probe", run_ctx.target_grad or {})):
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


# -- the order of the data --------------------------------------------------------------------------------------------


class _ShuffledEpochs(ReferenceIntervention):
    """Train the last epoch again with its data in other orders.

    Every epoch at first, when the order matters most; from the fiftieth on, at snapshots. The step loop has no epochs
    to train again.
    """

    requires = frozenset({"loader", "loss_fn"})
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points: LoopPoints = MappingProxyType(
        {"epoch": {HookPoint.POST_EPOCH: (None, 49), HookPoint.SNAPSHOT: (50, None)}}
    )
    needs_grads = True
    needs_pre_epoch_state = True

    def train_again(self, model_ctx: ModelDataContext, count: int) -> Iterator[dict[str, Tensor]]:
        """Train the last epoch again ``count`` times, each in another order; yield the mean gradients of each."""
        for _ in range(count):
            model_ctx.restore_pre_epoch()
            yield model_ctx.run_training_epoch(model_ctx.get_shuffled_loader(), step=True)


class CounterfactualHook(_ShuffledEpochs):
    """Train the epoch again with shuffled data, and split the run's gradient into content and ordering.

    Recipe: ``hookline.HookManager(["counterfactual"], hook_config={"counterfactual": {"k": 5}}, sinks=[...])``.

    A firing costs ``k`` epochs, and everything is put back. With reference weights it also measures which of the two
    parts leads to them, for which it keeps ``2 · window_size`` vectors of all parameters on the CPU.

    Args:
        k: How many shuffled epochs; each has its own order.
        window_size: How many past firings count in the energy fractions.
    """

    name = "counterfactual"
    description = "how much of an epoch's gradient is due to the order of its data"

    # With g the epoch's mean gradient, g_cf that of the shuffled epochs.
    metrics = (
        ("counterfactual_mean_norm", "mean gradient of shuffled epochs", "‖g_cf‖"),
        ("content_component_norm", "what any order gives", "‖c‖, c = (g·g_cf/‖g_cf‖²)·g_cf"),
        ("ordering_component_norm", "what this order adds", "‖o‖, o = g − c"),
        ("ordering_fraction", "share of the order", "‖o‖²/‖g‖²",
         "by chance 1 − c for large k, more for small (c: mean cosine of two random epochs); 1: all"),
        ("ordering_alignment", "gradient and shuffled one", "cos(g, g_cf)",
         "by chance √c for large k, less for small; 1: the order does nothing; below 0: turned round"),
        *((f"{part}_grad_cossim_to_solution", f"{part} and the way to the reference",
           f"cos(−{symbol}, θ_ref − θ_before)", "above 0: leads there")
          for part, symbol in (("content", "c"), ("ordering", "o"), ("cf", "g_cf"))),
        *((f"{part}_energy_fraction_toward_solution", f"past {part}s along the way to the reference",
           "Σ(xᵢ·s)²/Σ‖xᵢ‖², s of length 1", "1: all of it leads to or from there")
          for part in ("content", "ordering")),
    )  # fmt: skip
    single = tuple(name for name, *_ in metrics[1:8])

    def __init__(self, k: int = 3, window_size: int = 20) -> None:
        self.k = self.whole_number("k", k, 1)
        self.window_size = self.whole_number("window_size", window_size, 1)
        self._windows: dict[str, list[Tensor]] = {"content": [], "ordering": []}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Train the epoch again, and compare."""
        actual = run_ctx.accumulated_grads
        if not actual:
            return None
        model_ctx.restore_pre_epoch()
        way = self.way_to_solution(model_ctx.model)
        shuffled = self._mean_of_shuffled(model_ctx, actual)
        if shuffled is None:
            return None
        names = sorted(actual)
        split = _Split.of(flat_vector(actual[name] for name in names), flat_vector(shuffled[name] for name in names))
        single = by_parameter(
            [name for name in names if not is_bias(name)],
            lambda name: _Split.of(flat_vector([actual[name]]), flat_vector([shuffled[name]])).metrics(),
        )
        metrics = {"counterfactual_mean_norm": norm(split.shuffled), **split.metrics(), **single}
        return metrics | self._compare(actual, shuffled, split.share, way)

    def _mean_of_shuffled(self, model_ctx: ModelDataContext, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the mean gradient of k shuffled epochs, 0 where there was none; None if there was none at all."""
        total = {name: torch.zeros_like(gradient) for name, gradient in like.items()}
        found = False
        for gradients in self.train_again(model_ctx, self.k):
            for name in like.keys() & gradients.keys():
                found = True
                total[name] += gradients[name].to(total[name].dtype) / self.k
        return total if found else None

    def _compare(
        self, actual: Mapping[str, Tensor], shuffled: Mapping[str, Tensor], share: Tensor, way: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return where content and ordering lead, as seen from before the epoch."""
        names = sorted(name for name in actual if name in way)
        if not names:
            return {}

        def aims(names: list[str]) -> tuple[dict[str, Tensor], Tensor]:
            g, cf, to = (flat_vector(tensors[name] for name in names) for tensors in (actual, shuffled, way))
            return {"content": -share * cf, "ordering": share * cf - g, "cf": -cf}, to

        def cosines(names: list[str]) -> dict[str, Tensor]:
            vectors, to = aims(names)
            return {f"{part}_grad_cossim_to_solution": cosine(vector, to) for part, vector in vectors.items()}

        single = by_parameter([name for name in names if not is_bias(name)], lambda name: cosines([name]))
        return cosines(names) | self._energies(*aims(names)) | single

    def _energies(self, vectors: Mapping[str, Tensor], to: Tensor) -> dict[str, Any]:
        """Return how much of all firings in the window lies along the way; of one alone it is the squared cosine."""
        unit = ratio(to, norm(to)).cpu()
        found: dict[str, Any] = {}
        for part, window in self._windows.items():
            if window and window[-1].shape != unit.shape:
                window.clear()  # other parameters have a reference now
            window.append(vectors[part].cpu())
            del window[: -self.window_size]
            if len(window) > 1:
                # Σσᵢ²(vᵢ·s)²/Σσᵢ² over all singular values of the stacked vectors is this, without computing them.
                along, lengths = torch.stack([row @ unit for row in window]), torch.stack([norm(row) for row in window])
                found[f"{part}_energy_fraction_toward_solution"] = ratio(along.square().sum(), lengths.square().sum())
        return found

    def reset(self) -> None:
        """Begin another run."""
        super().reset()
        self._windows = {part: [] for part in self._windows}

    def get_state_tensors(self) -> dict[str, Any]:
        """Return the window."""
        return {part: list(window) for part, window in self._windows.items()}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take back what ``get_state_tensors`` gave."""
        self._windows = {part: [row.cpu() for row in tensors.get(part, ())] for part in self._windows}


class _Split(NamedTuple):
    """Split a gradient in two: along the one of shuffled epochs, and across."""

    actual: Tensor
    shuffled: Tensor
    share: Tensor
    """The content is this many times the shuffled gradient."""

    @classmethod
    def of(cls, actual: Tensor, shuffled: Tensor) -> _Split:
        return cls(actual, shuffled, ratio(torch.dot(actual, shuffled), torch.dot(shuffled, shuffled)))

    def metrics(self) -> dict[str, Tensor]:
        content = self.share * self.shuffled
        ordering = norm(self.actual - content)
        return {
            "content_component_norm": norm(content),
            "ordering_component_norm": ordering,
            "ordering_fraction": ratio(ordering, norm(self.actual)).square(),
            "ordering_alignment": cosine(self.actual, self.shuffled),
        }


class CounterfactualValidatorHook(_ShuffledEpochs, DebugInterventionHook):
    """Train k + 1 shuffled epochs, and measure how far the mean of k of them is from that of all.

    Recipe: ``hookline.HookManager(["counterfactual_validator"], sinks=[...])``; groups leave it out, as it is for
    finding out whether ``counterfactual`` is right.

    A firing costs ``k + 1`` epochs. Biases are left out.

    Args:
        k: How many shuffled epochs are to be enough.
    """

    name = "counterfactual_validator"
    description = "whether k shuffled epochs are enough for counterfactual"
    reduce = MappingProxyType({"*_max": "max", "*_min": "min", "kp1_norm_strictly_lower": "min"})
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
        rows = [_row(gradients, names, shapes) for gradients in self.train_again(model_ctx, self.k + 1)]
        means = [torch.stack(chosen).mean(0) for chosen in combinations(rows, self.k)]
        everything = torch.stack(rows).mean(0)
        return _agreement(means, everything) | _aim_of_means(means, everything, _flat_way(way, names, shapes))


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


def _aim_of_means(means: list[Tensor], everything: Tensor, way: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
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
