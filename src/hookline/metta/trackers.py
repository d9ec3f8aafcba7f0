"""Track activations and gradients of components: the protocol `Tracker`, and Metta's five trackers.

The hooks of ``builders`` call ``update``; `StatsReporter` reads and resets. Numbers stay on the device of
the tensors until ``to_metrics`` fetches them at once.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections import Counter
from decimal import Decimal
from typing import Any, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.observe.host_values import countable, fetch, outside_inference, unit_axis

_LOCK: Final = threading.RLock()
"""Held while a tracker's state changes: two threads may run one model (0.1 µs). One for all, since a lock among the
attributes would keep a tracker from being copied."""
_NO_GRADIENT: Final = 1e-8
"""A gradient below counts as none; a parameter whose mean is below is dead."""


@runtime_checkable
class Tracker(Protocol):
    """Accumulate numbers for named components; ``isinstance`` asks for the three methods.

    Recipe::

        class LargestOutput:
            def __init__(self):
                self.largest = {}

            def update(self, component, tensor):
                self.largest[component] = tensor.detach().max()

            def to_metrics(self):
                return {f"largest/{name}": value.item() for name, value in self.largest.items()}

            def reset(self):
                self.largest.clear()
    """

    def update(self, component: str, tensor: Any, /) -> None:
        """Add the ``tensor`` that one pass gave for ``component``."""

    def to_metrics(self) -> dict[str, float]:
        """Return all numbers since the last reset, by name."""

    def reset(self) -> None:
        """Start at zero; the components stay known, so that attached hooks go on counting."""


def as_number(value: Any) -> float:
    """Return a real number of any type (NumPy's too) as a float; NaN for anything else."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan


def check_activation(activation: str) -> None:
    """Raise ValueError unless ``activation`` is ``"tanh"`` or ``"sigmoid"``."""
    if activation not in ("tanh", "sigmoid"):
        raise ValueError(f"Unsupported activation '{activation}'. Expected 'tanh' or 'sigmoid'.")


def _check_beta(beta: float) -> float:
    """Return ``beta``; raise unless it is a share."""
    if not 0 <= as_number(beta) < 1:
        raise OptionError(f"beta= must be at least 0 and less than 1, got {beta!r}.")
    return beta


class ComponentTracker:
    """Keep a state for each component."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        """The components, in the order in which they came."""
        self._kept: dict[str, Any] = {}
        """By component: its state, in plain tensors and numbers."""
        self._fed: set[str] = set()
        """The components that have a hook."""

    def register_component(self, component: str) -> None:
        """Register ``component``, if it is not known yet."""
        self._known[component] = None

    def has_component(self, component: str) -> bool:
        """Return whether ``component`` is registered."""
        return component in self._known

    def begin_feeding(self, component: str) -> bool:
        """Note that a hook feeds ``component``; return False if one does already."""
        is_new = component not in self._fed
        self._fed.add(component)
        return is_new

    def end_feeding(self, component: str) -> None:
        """Note that the hook that feeds ``component`` is off; what was counted stays."""
        self._fed.discard(component)

    def forget_counts(self, component: str) -> None:
        """Start ``component`` at zero."""
        with _LOCK:
            self._kept.pop(component, None)

    def reset(self) -> None:
        """Start at zero; the components stay."""
        with _LOCK:
            self._kept.clear()

    def _readable(self, component: str, value: Any) -> tuple[Tensor, int] | None:
        """Register ``component``; return the tensor to count and the dimension of its units, None if it has none."""
        self.register_component(component)
        seen = countable(value)
        axis = None if seen is None else unit_axis(seen)
        return None if seen is None or axis is None or not seen.numel() else (seen, axis)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._known) or 'no component yet'}>"


def _widened(so_far: Tensor | None, new: Tensor) -> Tensor:
    """Return the numbers by unit ``so_far`` with room for all units of ``new``: zeros for those that come with it."""
    if so_far is None:
        return torch.zeros_like(new)
    missing = new.numel() - so_far.numel()
    so_far = so_far.to(new.device)
    return torch.cat([so_far, so_far.new_zeros(missing)]) if missing > 0 else so_far


# -- counting by unit ------------------------------------------------------------------------------------------


_UnitCount: TypeAlias = tuple[str, list[int], list[int]]
"""A component; by unit, how often it was hit, and in how many samples it was."""


class _CountingTracker(ComponentTracker):
    """Count, by unit, how often `_is_hit` was true.

    A state is ``hits``, whole numbers by unit, which stay exact past 2^24; and ``samples``, how many had that many
    units: shapes are known without asking the device.
    """

    _prefix: ClassVar[str]
    """What the name of a unit's metric begins with."""

    def update(self, component: str, tensor: Tensor) -> None:
        """Count one tensor; do nothing with one that cannot be counted (see `countable`)."""
        found = self._readable(component, tensor)
        if found is None:
            return
        seen, axis = found
        others = [dim for dim in range(seen.dim()) if dim != axis]
        with _LOCK, outside_inference():
            is_hit = self._is_hit(seen)
            new = is_hit.sum(dim=others) if others else is_hit.long()
            counts = self._kept.setdefault(component, {"hits": None, "samples": {}})
            hits, samples, width = _widened(counts["hits"], new), counts["samples"], str(new.numel())
            hits[: new.numel()] += new
            samples[width] = samples.get(width, 0) + seen.numel() // seen.shape[axis]
            counts["hits"] = hits

    def _is_hit(self, tensor: Tensor) -> Tensor:
        """Return a tensor of bools: true where there is something to count."""
        raise NotImplementedError

    def to_metrics(self) -> dict[str, float]:
        """Return, for every unit seen since the last reset, the share of samples that were hits."""
        return self._fractions(self._prefix, self._results())

    def _results(self) -> list[_UnitCount]:
        """Return the counts of every component, with one transfer for all of them."""
        with _LOCK:
            hits = fetch(counts["hits"] for counts in self._kept.values())
            samples = [{int(width): count for width, count in c["samples"].items()} for c in self._kept.values()]
            return [
                (component, found, [sum(n for width, n in by_width.items() if width > at) for at in range(len(found))])
                for component, found, by_width in zip(self._kept, hits, samples, strict=True)
            ]

    @staticmethod
    def _fractions(prefix: str, results: list[_UnitCount]) -> dict[str, float]:
        return {
            f"{prefix}/{component}/{unit}": hit / total
            for component, hits, totals in results
            for unit, (hit, total) in enumerate(zip(hits, totals, strict=True))
        }


class ReLUActivationState(_CountingTracker):
    """Count, by unit, the share of samples in which the activation is above zero: a dead unit has 0.

    Recipe::

        state = hookline.metta.ReLUActivationState()
        state.update("actor_mlp", torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 3.0]]))
        state.to_metrics()  # {"activations/relu/actor_mlp/0": 1.0, ".../1": 0.0, ".../2": 0.5}

    Units are the entries of the last dimension of (B, F) and (B, T, F), and the channels of (N, C, H, W); everything
    else is samples. One dimension alone is one sample.
    """

    _prefix = "activations/relu"

    def _is_hit(self, tensor: Tensor) -> Tensor:
        return tensor > 0


class SaturatedActivationState(_CountingTracker):
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
    """

    def __init__(self, activation: str, saturation_threshold: float = 0.95) -> None:
        super().__init__()
        check_activation(activation)
        threshold = as_number(saturation_threshold)
        if not 0 < threshold < 1:
            raise OptionError(f"saturation_threshold= must lie between 0 and 1, got {saturation_threshold!r}.")
        if activation == "sigmoid" and threshold <= 0.5:
            raise OptionError(
                f"saturation_threshold= of a sigmoid must be above 0.5, got {saturation_threshold!r}: what is above it "
                "or below one minus it is saturated, which would be everything."
            )
        self.activation, self.saturation_threshold = activation, saturation_threshold

    def to_metrics(self) -> dict[str, float]:
        """Return ``activations/{activation}/saturated_fraction/{component}/{unit}``, and sums under ``…/saturation/``.

        The sums are ``total_neurons``, ``saturated_neurons``, ``fraction`` and ``active_fraction``, once per component
        and once for all. A neuron counts there once per sample.
        """
        prefix = f"activations/{self.activation}"
        results = self._results()
        metrics = self._fractions(f"{prefix}/saturated_fraction", results)
        sums = {f"/{component}": (sum(hits), sum(totals)) for component, hits, totals in results}
        everything = {"": tuple(map(sum, zip(*sums.values(), strict=True)))} if sums else {}
        for where, (saturated, seen) in (sums | everything).items():
            fraction = saturated / seen
            metrics |= {
                f"{prefix}/saturation{where}/total_neurons": float(seen),
                f"{prefix}/saturation{where}/saturated_neurons": float(saturated),
                f"{prefix}/saturation{where}/fraction": fraction,
                f"{prefix}/saturation{where}/active_fraction": 1.0 - fraction,
            }
        return metrics

    def _is_hit(self, tensor: Tensor) -> Tensor:
        high = self.saturation_threshold
        if self.activation == "tanh":
            return tensor.abs() > high
        low = float(1 - Decimal(str(high)))  # 1 - 0.95 is 0.05000000000000004, which 0.05 in float64 would be below
        return (tensor < low) | (tensor > high)


class ReLUGradientFlowState(_CountingTracker):
    """Count, by unit, the share of samples in which a gradient leaves a ReLU: its absolute value is above 1e-8.

    Recipe::

        state = hookline.metta.ReLUGradientFlowState()
        state.update("actor_mlp", torch.tensor([[1e-9, 1.0], [0.0, -1.0]]))  # gradients of its input
        state.to_metrics()  # {"gradient_flow/relu/actor_mlp/0": 0.0, "gradient_flow/relu/actor_mlp/1": 1.0}
    """

    _prefix = "gradient_flow/relu"

    def _is_hit(self, tensor: Tensor) -> Tensor:
        # 1e-8 is zero in float16, whose smallest number is 6e-8: there, whatever is not zero passes.
        return tensor.abs() > _NO_GRADIENT


# -- running means ---------------------------------------------------------------------------------------------


class GradientFlowState(ComponentTracker):
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
    """

    def __init__(self, beta: float = 0.95) -> None:
        super().__init__()
        self.beta = _check_beta(beta)

    def update(self, component: str, tensor: Tensor) -> None:
        """Add sizes by unit, if ``tensor`` has one dimension; a gradient, if it has more."""
        found = self._readable(component, tensor)
        if found is None:
            return
        seen, axis = found
        with _LOCK, outside_inference():
            sizes = _sizes_by_unit(seen if seen.itemsize >= 4 else seen.float(), axis)
            mean = _widened(self._kept.get(component), sizes)
            mean[: sizes.numel()].mul_(self.beta).add_(sizes, alpha=1 - self.beta)
            self._kept[component] = mean

    def to_metrics(self) -> dict[str, float]:
        """Return ``gradient_flow/{component}/`` with ``mean``, ``unit_{unit}`` where not blocked, and two fractions.

        ``blocked_fraction`` is the share of units below 1e-8, ``active_fraction`` the rest.
        """
        with _LOCK:
            numbers = zip(list(self._kept), fetch(self._kept.values()), strict=True)
        metrics: dict[str, float] = {}
        for component, sizes in numbers:
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


class FisherInformationState(ComponentTracker):
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
        super().__init__()
        self.beta = _check_beta(beta)

    def update(self, component: str, parameter: str | Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradient of one parameter; without a name, of the component's ``weight``."""
        name, value = (parameter, gradient) if isinstance(parameter, str) else (f"{component}.weight", parameter)
        self.register_component(component)
        seen, beta = countable(value), self.beta
        if seen is None or not seen.numel():
            return
        with _LOCK, outside_inference():
            means = self._kept.setdefault(component, {})
            mean = means.get(name)
            if seen.itemsize < 4:
                seen = seen.float()
            mean = torch.zeros_like(seen) if mean is None or mean.shape != seen.shape else mean.to(seen.device)
            means[name] = mean.mul_(beta).addcmul_(seen, seen, value=1 - beta)

    def to_metrics(self) -> dict[str, float]:
        """Return ``fisher_info/{component}/{parameter}/`` with ``mean``, ``trace`` (the sum), ``max`` and ``dead``.

        ``dead`` is 0 or 1. A component with dead parameters, those with a mean below 1e-8, also has
        ``fisher_info/{component}/dead_count`` and ``dead_fraction``; one without does not.
        """
        with _LOCK:
            rows = [(name, key, mean) for name, means in self._kept.items() for key, mean in means.items()]
            numbers = fetch(torch.stack([mean.mean(), mean.sum(), mean.max()]) for _, _, mean in rows)
        metrics: dict[str, float] = {}
        dead: Counter[str] = Counter()
        for (component, parameter, _), (mean, trace, largest) in zip(rows, numbers, strict=True):
            prefix = f"fisher_info/{component}/{parameter}"
            is_dead = mean < _NO_GRADIENT
            dead[component] += is_dead
            metrics |= {f"{prefix}/mean": mean, f"{prefix}/trace": trace, f"{prefix}/max": largest}
            metrics[f"{prefix}/dead"] = float(is_dead)
        of = Counter(component for component, _, _ in rows)
        for component, count in (+dead).items():
            metrics[f"fisher_info/{component}/dead_fraction"] = count / of[component]
            metrics[f"fisher_info/{component}/dead_count"] = float(count)
        return metrics
