"""Track activations and gradients of components: the five trackers of Metta.

The hooks of ``feeders`` and ``parameter_feeder`` call ``update``; ``builders`` makes trackers and hooks for a
`ComponentContext`, and the analyses of the same names make them for a run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from decimal import Decimal
from typing import Final, overload

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.metta.component_tracker import (
    LOCK,
    ComponentTracker,
    CountingTracker,
    MeanOptions,
    UnitOptions,
    as_number,
    set_plain,
)
from hookline.observe.host_values import countable, fetch, outside_inference

__all__ = [
    "FisherInformationState",
    "GradientFlowState",
    "ReLUActivationState",
    "ReLUGradientFlowState",
    "SaturatedActivationState",
    "check_activation",
]

_NO_GRADIENT: Final = 1e-8
"""A gradient below counts as none; a parameter whose mean is below is dead."""


class ReLUActivationState(CountingTracker[UnitOptions]):
    """Count, by unit, the share of samples in which the activation is above zero: a dead unit has 0.

    Recipe::

        state = hookline.metta.ReLUActivationState()
        state.update("actor_mlp", torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 3.0]]))
        state.to_metrics()  # {"activations/relu/actor_mlp/0": 1.0, ".../1": 0.0, ".../2": 0.5}

    Args:
        unit_dim: The dimension whose entries are the units. Unless given, it is the last of (B, F) and (B, T, F), and
            the channels of (N, C, H, W); everything else is samples. One dimension alone is one sample.
    """

    def __init__(self, *, unit_dim: int | None = None) -> None:
        super().__init__(UnitOptions(unit_dim))

    def to_metrics(self) -> dict[str, float]:
        """Return ``activations/relu/{component}/{unit}`` for every unit seen since the last reset."""
        return self._fractions("activations/relu")

    def _is_hit(self, tensor: Tensor, options: UnitOptions) -> Tensor:
        return tensor > 0


# -- saturated activations -------------------------------------------------------------------------------------


def check_activation(activation: str) -> None:
    """Raise ValueError unless ``activation`` is ``"tanh"`` or ``"sigmoid"``."""
    if activation not in ("tanh", "sigmoid"):
        raise ValueError(f"Unsupported activation '{activation}'. Expected 'tanh' or 'sigmoid'.")


@dataclasses.dataclass(frozen=True, slots=True)
class _SaturationOptions(UnitOptions):
    saturation_threshold: float = 0.95
    activation: str = "tanh"

    def __post_init__(self) -> None:
        UnitOptions.__post_init__(self)
        threshold = as_number(self.saturation_threshold)
        if threshold is None or not 0 < threshold < 1:
            raise OptionError(f"saturation_threshold= must lie between 0 and 1, got {self.saturation_threshold!r}.")
        if self.activation == "sigmoid" and threshold <= 0.5:
            raise OptionError(
                f"saturation_threshold= of a sigmoid must be above 0.5, got {self.saturation_threshold!r}: what is "
                "above it or below one minus it is saturated, which would be everything."
            )
        set_plain(self, saturation_threshold=threshold)


class SaturatedActivationState(CountingTracker[_SaturationOptions]):
    """Count, by unit, the share of samples in which the activation is saturated; the same by component and in all.

    Recipe::

        state = hookline.metta.SaturatedActivationState("tanh")
        state.update("critic_head", torch.tensor([[0.95, 0.96], [-0.99, 0.0]]))
        state.to_metrics()["activations/tanh/saturation/critic_head/fraction"]  # 0.5

    A tanh is saturated where its absolute value is above the threshold, a sigmoid where it is above the threshold or
    below one minus it; the threshold itself is not. Values are compared in their own type, so in bfloat16 the threshold
    is the bfloat16 nearest to it.

    Args:
        activation: ``"tanh"`` or ``"sigmoid"``.
        saturation_threshold: Strictly between 0 and 1, for a sigmoid above 0.5.
        unit_dim: The dimension whose entries are the units, as for `ReLUActivationState`.
    """

    def __init__(self, activation: str, saturation_threshold: float = 0.95, *, unit_dim: int | None = None) -> None:
        check_activation(activation)
        super().__init__(_SaturationOptions(unit_dim, saturation_threshold, activation))
        self.activation = activation

    @property
    def saturation_threshold(self) -> float:
        """Return the threshold of components that were not given one of their own."""
        return self._defaults.saturation_threshold

    def to_metrics(self) -> dict[str, float]:
        """Return ``activations/{activation}/saturated_fraction/{component}/{unit}``, and sums under ``…/saturation/``.

        The sums are ``total_neurons``, ``saturated_neurons``, ``fraction`` and ``active_fraction``, once per component
        and once for all. A neuron counts there once per sample.
        """
        prefix = f"activations/{self.activation}"
        metrics: dict[str, float] = {}
        saturated, seen = 0, 0
        for component, hits, totals in self._results():
            for unit, (hit, total) in enumerate(zip(hits, totals, strict=True)):
                metrics[f"{prefix}/saturated_fraction/{component}/{unit}"] = hit / total
            metrics |= _saturation(f"{prefix}/saturation/{component}", sum(hits), sum(totals))
            saturated, seen = saturated + sum(hits), seen + sum(totals)
        return metrics | _saturation(f"{prefix}/saturation", saturated, seen) if seen else metrics

    def _is_hit(self, tensor: Tensor, options: _SaturationOptions) -> Tensor:
        high = options.saturation_threshold
        if self.activation == "tanh":
            return tensor.abs() > high
        low = float(1 - Decimal(repr(high)))  # 1 - 0.95 is 0.05000000000000004, which 0.05 in float64 would be below
        return (tensor < low) | (tensor > high)


def _saturation(prefix: str, saturated: int, total: int) -> dict[str, float]:
    fraction = saturated / total
    return {
        f"{prefix}/total_neurons": float(total),
        f"{prefix}/saturated_neurons": float(saturated),
        f"{prefix}/fraction": fraction,
        f"{prefix}/active_fraction": 1.0 - fraction,
    }


# -- gradients of units ----------------------------------------------------------------------------------------


class _MeanTracker(ComponentTracker[MeanOptions]):
    """Keep running means; each component may have a ``beta`` of its own."""

    @property
    def beta(self) -> float:
        """Return the beta of components that were not given one of their own."""
        return self._defaults.beta


class GradientFlowState(_MeanTracker):
    """Keep, by unit, a running mean of the size of its gradient: ``G = beta * G + (1 - beta) * n``, from zero.

    Recipe::

        state = hookline.metta.GradientFlowState()
        state.update("actor_mlp", torch.tensor([1.0, 0.0, 2.0]))  # ready sizes, by unit
        state.update("actor_mlp", gradient)  # or a gradient (B, F), (B, T, F), (N, C, H, W)
        state.to_metrics()["gradient_flow/actor_mlp/blocked_fraction"]

    The size of a unit's gradient is the root of the mean over the batch of its square, after the mean over all other
    dimensions. Kept in float32, or float64 for gradients that are. With a loss that a ``GradScaler`` has scaled,
    gradients of activations are scaled too.

    Args:
        beta: At least 0, less than 1; higher remembers longer.
        unit_dim: The dimension whose entries are the units, as for `ReLUActivationState`.
    """

    def __init__(self, beta: float = 0.95, *, unit_dim: int | None = None) -> None:
        super().__init__(MeanOptions(unit_dim=unit_dim, beta=beta))

    def update(self, component: str, tensor: Tensor) -> None:
        """Add sizes by unit, if ``tensor`` has one dimension; a gradient, if it has more."""
        found = self._readable(component, tensor)
        if found is None:
            return
        seen, axis, options = found
        with LOCK, outside_inference():
            sizes = _sizes_by_unit(seen if seen.itemsize >= 4 else seen.float(), axis)
            mean = _widened(self._kept.get(component), sizes)
            mean[: sizes.numel()].mul_(options.beta).add_(sizes, alpha=1 - options.beta)
            self._kept[component] = mean

    def to_metrics(self) -> dict[str, float]:
        """Return ``gradient_flow/{component}/`` with ``mean``, ``unit_{unit}`` where not blocked, and two fractions.

        ``blocked_fraction`` is the share of units below 1e-8, ``active_fraction`` the rest.
        """
        with LOCK:
            names = self._counted_names()
            numbers = dict(zip(names, fetch(self._kept[name] for name in names), strict=True))
        metrics: dict[str, float] = {}
        for component, sizes in numbers.items():
            prefix = f"gradient_flow/{component}"
            metrics[f"{prefix}/mean"] = sum(sizes) / len(sizes)
            # A NaN is not blocked: it is shown.
            metrics |= {f"{prefix}/unit_{unit}": size for unit, size in enumerate(sizes) if not size <= _NO_GRADIENT}
            blocked = sum(size < _NO_GRADIENT for size in sizes) / len(sizes)
            metrics[f"{prefix}/blocked_fraction"] = blocked
            metrics[f"{prefix}/active_fraction"] = 1.0 - blocked
        return metrics


def _sizes_by_unit(gradient: Tensor, axis: int) -> Tensor:
    """Return the sizes (units,) of a gradient with units along ``axis``; the first other dimension is the batch."""
    if gradient.dim() == 1:
        return gradient
    rows = gradient.movedim(axis, 1)  # (B, units, …)
    if rows.dim() > 2:
        rows = rows.flatten(2).mean(2)
    return rows.square().mean(0).sqrt()


def _widened(mean: Tensor | None, sizes: Tensor) -> Tensor:
    """Return the running mean with room for all units of ``sizes``, zero for new ones."""
    if mean is None:
        return torch.zeros_like(sizes)
    missing = sizes.numel() - mean.numel()
    mean = mean.to(sizes.device)
    return torch.cat([mean, mean.new_zeros(missing)]) if missing > 0 else mean


class ReLUGradientFlowState(CountingTracker[UnitOptions]):
    """Count, by unit, the share of samples in which a gradient leaves a ReLU: its absolute value is above 1e-8.

    Recipe::

        state = hookline.metta.ReLUGradientFlowState()
        state.update("actor_mlp", torch.tensor([[1e-9, 1.0], [0.0, -1.0]]))  # gradients of its input
        state.to_metrics()  # {"gradient_flow/relu/actor_mlp/0": 0.0, "gradient_flow/relu/actor_mlp/1": 1.0}

    Args:
        unit_dim: The dimension whose entries are the units, as for `ReLUActivationState`.
    """

    def __init__(self, *, unit_dim: int | None = None) -> None:
        super().__init__(UnitOptions(unit_dim))

    def to_metrics(self) -> dict[str, float]:
        """Return ``gradient_flow/relu/{component}/{unit}`` for every unit seen since the last reset."""
        return self._fractions("gradient_flow/relu")

    def _is_hit(self, tensor: Tensor, options: UnitOptions) -> Tensor:
        # 1e-8 is zero in float16, whose smallest number is 6e-8: there, whatever is not zero passes.
        return tensor.abs() > _NO_GRADIENT


# -- gradients of parameters -----------------------------------------------------------------------------------


class FisherInformationState(_MeanTracker):
    """Keep, by parameter, the running mean of the squared gradient: ``F = beta * F + (1 - beta) * g²``, from zero.

    Recipe::

        state = hookline.metta.FisherInformationState()
        state.update("actor_mlp", "actor_mlp.weight", torch.tensor([1.0, 2.0]))
        state.to_metrics()["fisher_info/actor_mlp/actor_mlp.weight/trace"]  # 0.25: 0.05 * (1 + 4)

    It is the diagonal of the empirical Fisher information. As in Metta, it is not corrected for having started at zero,
    so it grows over the first 1 / (1 - beta) updates of an epoch. Kept in float32, or float64 for gradients that are.

    Args:
        beta: At least 0, less than 1; higher remembers longer.
    """

    def __init__(self, beta: float = 0.95) -> None:
        super().__init__(MeanOptions(beta=beta))

    @overload
    def update(self, component: str, parameter: str, gradient: Tensor | None) -> None: ...
    @overload
    def update(self, component: str, parameter: Tensor) -> None: ...
    def update(self, component: str, parameter: str | Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradient of one parameter; without a name, of the component's ``weight``."""
        name = parameter if isinstance(parameter, str) else f"{component}.weight"
        seen = countable(gradient if isinstance(parameter, str) else parameter)
        beta = self._options(component).beta
        if seen is None or not seen.numel():
            return
        with LOCK, outside_inference():
            means = self._kept.setdefault(component, {})
            mean = means.get(name)
            if seen.itemsize < 4:
                seen = seen.float()
            if mean is None or mean.shape != seen.shape:
                mean = torch.zeros_like(seen)
            elif mean.device != seen.device:
                mean = mean.to(seen.device)
            means[name] = mean.mul_(beta).addcmul_(seen, seen, value=1 - beta)

    def to_metrics(self) -> dict[str, float]:
        """Return ``fisher_info/{component}/{parameter}/`` with ``mean``, ``trace`` (the sum), ``max`` and ``dead``.

        ``dead`` is 0 or 1. A component with dead parameters, those with a mean below 1e-8, also has
        ``fisher_info/{component}/dead_count`` and ``dead_fraction``; one without does not.
        """
        metrics: dict[str, float] = {}
        dead: Counter[str] = Counter()
        with LOCK:
            rows = [(name, key, mean) for name in self._counted_names() for key, mean in self._kept[name].items()]
            numbers = fetch(torch.stack([mean.mean(), mean.sum(), mean.max()]) for _, _, mean in rows)
        for (component, parameter, _), (mean, trace, largest) in zip(rows, numbers, strict=True):
            prefix = f"fisher_info/{component}/{parameter}"
            is_dead = mean < _NO_GRADIENT
            dead[component] += is_dead
            metrics |= {f"{prefix}/mean": mean, f"{prefix}/trace": trace, f"{prefix}/max": largest}
            metrics[f"{prefix}/dead"] = float(is_dead)
        of = Counter(component for component, _, _ in rows)  # as many as were fetched: there may be more by now
        for component, count in dead.items():
            if count:
                metrics[f"fisher_info/{component}/dead_fraction"] = count / of[component]
                metrics[f"fisher_info/{component}/dead_count"] = float(count)
        return metrics

    def _to_plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)

    def _from_plain(self, plain: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(plain)
