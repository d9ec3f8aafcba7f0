"""Whether the learning signal comes through: the size of the gradient at each unit, and how often a ReLU lets it pass.

Fed with gradients of outputs by ``attach_gradient_flow_hooks``, and of inputs by ``attach_relu_gradient_flow_hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hookline.metta.counting import CountingTracker
from hookline.metta.tracked_components import LOCK, BlendOptions, ComponentTracker, UnitOptions
from hookline.observe.host_values import fetch, outside_inference

__all__ = ["GradientFlowState", "ReLUGradientFlowState"]

_BLOCKED: Final = 1e-8
"""A gradient below is no gradient."""


class GradientFlowState(ComponentTracker[BlendOptions]):
    """By unit, a running mean of the size of its gradient: ``G = beta * G + (1 - beta) * n``, from zero.

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
        super().__init__(BlendOptions(unit_dim=unit_dim, beta=beta))
        self._sizes: dict[str, Tensor] = {}

    @property
    def beta(self) -> float:
        """The beta of components that were not given one of their own."""
        return self._defaults.beta

    def register_component(self, component: str, *, beta: float | None = None, unit_dim: int | None = None) -> None:
        """Make a component known, and what is special about it; other options than it has are an error."""
        self._register(component, beta=beta, unit_dim=unit_dim)

    def update(self, component: str, tensor: Tensor) -> None:
        """Take in the sizes by unit, if there is one dimension; a gradient, if there are more."""
        found = self._readable(component, tensor)
        if found is None:
            return
        seen, axis, options = found
        with LOCK, outside_inference():
            sizes = _sizes_by_unit(seen if seen.itemsize >= 4 else seen.float(), axis)
            mean = _widened(self._sizes.get(component), sizes)
            mean[: sizes.numel()].mul_(options.beta).add_(sizes, alpha=1 - options.beta)
            self._sizes[component] = mean

    def to_metrics(self) -> dict[str, float]:
        """``gradient_flow/{component}/`` with ``mean``, ``unit_{unit}`` where not blocked, and two fractions.

        ``blocked_fraction`` is the share of units below 1e-8, ``active_fraction`` the rest.
        """
        with LOCK:
            names = self._in_order(self._sizes)
            numbers = dict(zip(names, fetch(self._sizes[name] for name in names), strict=True))
        metrics: dict[str, float] = {}
        for component, sizes in numbers.items():
            prefix = f"gradient_flow/{component}"
            metrics[f"{prefix}/mean"] = sum(sizes) / len(sizes)
            # A NaN is not blocked: it is shown.
            metrics |= {f"{prefix}/unit_{unit}": size for unit, size in enumerate(sizes) if not size <= _BLOCKED}
            blocked = sum(size < _BLOCKED for size in sizes) / len(sizes)
            metrics[f"{prefix}/blocked_fraction"] = blocked
            metrics[f"{prefix}/active_fraction"] = 1.0 - blocked
        return metrics

    def reset(self) -> None:
        """Start at zero; components and their options stay."""
        with LOCK:
            self._sizes.clear()

    def counted(self) -> dict[str, Any]:
        """The running means so far, by component."""
        with LOCK:
            return dict(self._sizes)

    def load_counted(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``counted`` gave."""
        self.reset()
        for name, sizes in state.items():
            self._options(name)  # makes it known: it may not have been found yet
            self._sizes[name] = sizes

    def _drop(self, component: str) -> None:
        self._sizes.pop(component, None)

    def _has_begun(self, component: str) -> bool:
        return component in self._sizes


class ReLUGradientFlowState(CountingTracker[UnitOptions]):
    """By unit, the share of samples in which a gradient comes out of a ReLU: its absolute value is above 1e-8.

    Recipe::

        state = hookline.metta.ReLUGradientFlowState()
        state.update("actor_mlp", torch.tensor([[1e-9, 1.0], [0.0, -1.0]]))  # gradients of its input
        state.to_metrics()  # {"gradient_flow/relu/actor_mlp/0": 0.0, "gradient_flow/relu/actor_mlp/1": 1.0}

    Args:
        unit_dim: The dimension whose entries are the units, as for `ReLUActivationState`.
    """

    def __init__(self, *, unit_dim: int | None = None) -> None:
        super().__init__(UnitOptions(unit_dim))

    def register_component(self, component: str, *, unit_dim: int | None = None) -> None:
        """Make a component known, and what is special about it; another ``unit_dim`` than it has is an error."""
        self._register(component, unit_dim=unit_dim)

    def to_metrics(self) -> dict[str, float]:
        """``gradient_flow/relu/{component}/{unit}`` for every unit that was seen since the last reset."""
        return {
            f"gradient_flow/relu/{component}/{unit}": passed / total
            for component, hits, totals in self._results()
            for unit, (passed, total) in enumerate(zip(hits, totals, strict=True))
        }

    def _marks(self, tensor: Tensor, options: UnitOptions) -> Tensor:
        # 1e-8 is nothing in float16, whose smallest number is 6e-8: there, whatever is not zero passes.
        return tensor.abs() > _BLOCKED


def _sizes_by_unit(gradient: Tensor, axis: int) -> Tensor:
    """(units,) of a gradient whose units are along ``axis``; the first other dimension is the batch."""
    if gradient.dim() == 1:
        return gradient
    rows = gradient.movedim(axis, 1)  # (B, units, …)
    if rows.dim() > 2:
        rows = rows.flatten(2).mean(2)
    return rows.square().mean(0).sqrt()


def _widened(mean: Tensor | None, sizes: Tensor) -> Tensor:
    """The running mean with room for all units, zero for new ones."""
    if mean is None:
        return torch.zeros_like(sizes)
    missing = sizes.numel() - mean.numel()
    mean = mean.to(sizes.device)
    return torch.cat([mean, mean.new_zeros(missing)]) if missing > 0 else mean
