"""How much each parameter matters: a running mean of its squared gradients, the diagonal of the Fisher information.

Fed with gradients of parameters by ``attach_fisher_information_hooks``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, overload

import torch
from torch import Tensor

from hookline.metta.tracked_components import LOCK, BlendOptions, ComponentTracker
from hookline.observe.host_values import countable, fetch, outside_inference

__all__ = ["FisherInformationState"]

_DEAD: Final = 1e-8
"""A parameter whose mean is below is dead."""


class FisherInformationState(ComponentTracker[BlendOptions]):
    """By parameter, the running mean of the squared gradient: ``F = beta * F + (1 - beta) * g²``, from zero.

    Recipe::

        state = hookline.metta.FisherInformationState()
        state.update("actor_mlp", "actor_mlp.weight", torch.tensor([1.0, 2.0]))
        state.to_metrics()["fisher_info/actor_mlp/actor_mlp.weight/trace"]  # 0.25: 0.05 * (1 + 4)

    It is not corrected for having started at zero, as in the source, so it grows over the first 1 / (1 - beta) updates
    of an epoch. Kept in float32, or float64 for gradients that are.

    Args:
        beta: At least 0, less than 1; higher remembers longer.
    """

    def __init__(self, beta: float = 0.95) -> None:
        super().__init__(BlendOptions(beta=beta))
        self._means: dict[str, dict[str, Tensor]] = {}

    @property
    def beta(self) -> float:
        """The beta of components that were not given one of their own."""
        return self._defaults.beta

    def register_component(self, component: str, *, beta: float | None = None) -> None:
        """Make a component known; another ``beta`` than it has is an error."""
        self._register(component, beta=beta)

    @overload
    def update(self, component: str, parameter: str, gradient: Tensor | None) -> None: ...
    @overload
    def update(self, component: str, parameter: Tensor) -> None: ...
    def update(self, component: str, parameter: str | Tensor, gradient: Tensor | None = None) -> None:
        """Take in the gradient of one parameter; without a name, of the component's ``weight``."""
        name = parameter if isinstance(parameter, str) else f"{component}.weight"
        seen = countable(gradient if isinstance(parameter, str) else parameter)
        beta = self._options(component).beta
        if seen is None or not seen.numel():
            return
        with LOCK, outside_inference():
            means = self._means.setdefault(component, {})
            mean = means.get(name)
            if seen.itemsize < 4:
                seen = seen.float()
            if mean is None or mean.shape != seen.shape:
                mean = torch.zeros_like(seen)
            elif mean.device != seen.device:
                mean = mean.to(seen.device)
            means[name] = mean.mul_(beta).addcmul_(seen, seen, value=1 - beta)

    def to_metrics(self) -> dict[str, float]:
        """``fisher_info/{component}/{parameter}/`` with ``mean``, ``trace`` (the sum), ``max`` and ``dead`` (0 or 1).

        A component with dead parameters, those with a mean below 1e-8, also has ``fisher_info/{component}/dead_count``
        and ``dead_fraction``; one without does not.
        """
        metrics: dict[str, float] = {}
        dead: Counter[str] = Counter()
        with LOCK:
            names = self._in_order(self._means)
            rows = [(name, key, mean) for name in names for key, mean in self._means[name].items()]
            numbers = fetch(torch.stack([mean.mean(), mean.sum(), mean.max()]) for _, _, mean in rows)
        for (component, parameter, _), (mean, trace, largest) in zip(rows, numbers, strict=True):
            prefix = f"fisher_info/{component}/{parameter}"
            is_dead = mean < _DEAD
            dead[component] += is_dead
            metrics |= {f"{prefix}/mean": mean, f"{prefix}/trace": trace, f"{prefix}/max": largest}
            metrics[f"{prefix}/dead"] = float(is_dead)
        of = Counter(component for component, _, _ in rows)  # as many as were fetched: there may be more by now
        for component, count in dead.items():
            if count:
                metrics[f"fisher_info/{component}/dead_fraction"] = count / of[component]
                metrics[f"fisher_info/{component}/dead_count"] = float(count)
        return metrics

    def reset(self) -> None:
        """Start at zero; components and their betas stay."""
        with LOCK:
            self._means.clear()

    def counted(self) -> dict[str, Any]:
        """The running means so far, by component and parameter."""
        with LOCK:
            return {name: dict(means) for name, means in self._means.items()}

    def load_counted(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``counted`` gave."""
        self.reset()
        for name, means in state.items():
            self._options(name)  # makes it known: it may not have been found yet
            self._means[name] = dict(means)

    def _drop(self, component: str) -> None:
        self._means.pop(component, None)

    def _has_begun(self, component: str) -> bool:
        return component in self._means
