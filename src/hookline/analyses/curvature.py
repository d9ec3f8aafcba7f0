"""Measure the loss around the weights: ``hessian``, ``hessian_spectrum``, ``loss_landscape``, ``paired_step``.

All are interventions: they try other weights on the batch of a step, and the guard undoes that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.analyses._base import (
    Intervention,
    ReferenceIntervention,
    by_parameter,
    loss_on_batch,
    same_random_numbers,
)
from hookline.analyses._values import (
    GIB,
    cosine,
    flat_vector,
    flat_vector_or_none,
    norm,
    parameters_of,
    ratio,
    weight_names,
)
from hookline.errors import HooklineWarning, OptionError
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
            warnings.warn(
                f"Hook 'hessian' found no second derivative of the loss ({str(error).splitlines()[0][:120]}); it takes "
                f"the difference of two gradients over epsilon={self.epsilon:g} instead. To have that said once and "
                "for all: method='difference'.",
                HooklineWarning,
                stacklevel=caller_stacklevel(),
            )
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


# -- other weights ----------------------------------------------------------------------------------------------------


class LossLandscapeHook(Intervention):
    """Measure the loss on the batch of the step, at weights along a line through those after it.

    Recipe: ``hookline.HookManager(["loss_landscape"], hook_config={"loss_landscape": {"radius": 0.05}}, sinks=[...])``.

    The line goes ``radius`` times the length of all trained parameters to either side. Dropout is the same at each
    point. A firing costs ``points`` forwards, and a backward for the gradient.

    Args:
        every_n_steps: How many steps from one look to the next; the first is at that step.
        points: How many points on the line, an odd number, so that one is where the weights are.
        radius: How far it goes, as a share of the length of the parameters.
        direction: ``"gradient"``, of which the positive side is downhill; or ``"random"``, of as many parts as there
            are parameters, each as long as its parameter.
    """

    name = "loss_landscape"
    description = "the loss along a line through the weights"
    requires = frozenset({"loss_fn"})
    # With a from −radius to radius, and ‖θ‖·d the direction.
    metrics = (
        ("losses", "along the line, from one end to the other", "L(θ + a·‖θ‖·d)"),
        ("loss", "in the middle, where the weights are", "L(θ)"),
        ("lowest", "the smallest on the line", "min L"),
        ("lowest_at", "where that is", "a of min L", "0: here; radius: still falling at the end"),
        ("curvature", "how the line bends at the weights", "(L(h) − 2·L(0) + L(−h))/h²", ">0: a valley"),
    )

    def __init__(
        self, every_n_steps: int = 500, points: int = 11, radius: float = 0.1, direction: str = "gradient"
    ) -> None:
        self.set_schedule(every_n_steps)
        self.points = self.whole_number("points", points, 3)
        if points % 2 == 0:
            raise OptionError(f"points= of hook 'loss_landscape' is an odd number, got {points}; take {points + 1}.")
        self.radius = self.number("radius", radius)
        self.direction = self.one_of("direction", direction, ("gradient", "random"))

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Measure the loss at each point of the line."""
        step = self.step_of(run_ctx)
        trained = {name: p for name, p in parameters_of(model_ctx.model).items() if p.requires_grad}
        line = self._line(step, model_ctx, trained)
        if line is None:
            return None
        here = {name: p.detach().clone() for name, p in trained.items()}
        places = np.linspace(-self.radius, self.radius, self.points)
        found = []
        for place in places:
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(here[name] + float(place) * line[name])
            found.append(loss_on_batch(model_ctx, step))
        losses, middle = torch.stack(found).tolist(), self.points // 2
        width = self.radius / middle
        lowest = int(np.nanargmin(losses)) if not np.isnan(losses).all() else middle
        return {
            "losses": losses,
            "loss": losses[middle],
            "lowest": losses[lowest],
            "lowest_at": float(places[lowest]) if lowest != middle else 0.0,
            "curvature": (losses[middle + 1] - 2 * losses[middle] + losses[middle - 1]) / width**2,
        }

    def _line(self, step: int, model_ctx: ModelDataContext, trained: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the direction by parameter, as long as all of them together; None if there is none."""
        length = flat_vector_or_none(trained.values())
        if length is None:
            return None
        if self.direction == "random":
            draw = torch.Generator().manual_seed(step)
            drawn = {n: torch.randn(p.shape, generator=draw).to(p.device, p.dtype) for n, p in trained.items()}
            return {name: each * _fit(trained[name], each) for name, each in drawn.items()}
        gradients = model_ctx.gradients
        whole = flat_vector_or_none(gradients[name] for name in trained if name in gradients)
        if whole is None or float(norm(whole)) == 0.0:
            return None
        scale = norm(length) / norm(whole)
        return {
            name: -gradients[name] * scale.to(p.device, p.dtype) if name in gradients else torch.zeros_like(p)
            for name, p in trained.items()
        }


def _fit(parameter: Tensor, direction: Tensor) -> Tensor:
    """Return the factor that makes a direction as long as its parameter."""
    return ratio(norm(parameter.detach().flatten()), norm(direction.flatten()))


class PairedStepHook(Intervention):
    """Make the next step on the batch of this one twice, with the same random numbers, and compare.

    Recipe: ``hookline.HookManager(["paired_step"], hook_config={"paired_step": {"lr_factor": 0.5}}, sinks=[...])``.

    Both begin at the weights after the step and the state of the optimizer then; everything is put back. A firing
    costs two steps, three forwards and a snapshot.

    Args:
        every_n_steps: How many steps from one look to the next; the first is at that step.
        lr_factor: What the learning rates are multiplied by in the changed step.
    """

    name = "paired_step"
    description = "one step with and without a change, from the same state"
    requires = frozenset({"loss_fn"})
    # With p the plain step, c the changed one; losses are of the same batch.
    metrics = (
        ("loss_before", "before either", "L(θ)"),
        ("loss_plain", "after the step as it would be", "L(θ + p)"),
        ("loss_changed", "after the changed one", "L(θ + c)"),
        ("loss_difference", "what the change does", "L(θ + c) − L(θ + p)", "below 0: it helps"),
        ("step_length_ratio", "the changed step over the plain one", "‖c‖/‖p‖"),
        ("step_cosine", "whether they go the same way", "cos(c, p)", "1: the same way"),
    )

    def __init__(self, every_n_steps: int = 500, lr_factor: float = 2.0) -> None:
        self.set_schedule(every_n_steps)
        self.lr_factor = self.number("lr_factor", lr_factor, allow_zero=True)

    def change(self, model_ctx: ModelDataContext) -> None:
        """Change the second step: scale the learning rates, unless defined otherwise. It is undone."""
        model_ctx.scale_learning_rates(self.lr_factor)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Make the plain step, go back, make the changed step, and compare."""
        step = self.step_of(run_ctx)
        start = flat_vector_or_none(parameters_of(model_ctx.model).values())
        if start is None or not model_ctx.param_groups:
            return None
        before = loss_on_batch(model_ctx, step)
        token = model_ctx.save_checkpoint()
        plain, plain_loss = self._stepped(step, model_ctx, start)
        model_ctx.restore_checkpoint(token)
        model_ctx.discard_checkpoint(token)
        self.change(model_ctx)
        changed, changed_loss = self._stepped(step, model_ctx, start)
        return {
            "loss_before": before,
            "loss_plain": plain_loss,
            "loss_changed": changed_loss,
            "loss_difference": changed_loss - plain_loss,
            "step_length_ratio": ratio(norm(changed), norm(plain)),
            "step_cosine": cosine(changed, plain),
        }

    def _stepped(self, step: int, model_ctx: ModelDataContext, start: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step; return the move of the weights, and the loss after it."""
        with same_random_numbers(step):
            model_ctx.run_training_epoch([model_ctx.current_batch()], step=True)
        return flat_vector(parameters_of(model_ctx.model).values()) - start, loss_on_batch(model_ctx, step)
