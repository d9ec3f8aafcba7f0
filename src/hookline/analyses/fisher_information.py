"""``fisher_information``: how much the loss depends on each parameter, by a running mean of its squared gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline.analyses._tracked import NEXT_TO_NONE, TRAINING, Tracked, described, mean_of
from hookline.metta.fisher import FisherInformationState
from hookline.metta.fisher_hook import FisherHook
from hookline.sites.wrappers import walk
from hookline.training.training_hook import MetricInfo

__all__ = ["FisherInformationHook"]


class FisherInformationHook(Tracked):
    """The diagonal of the empirical Fisher information, parameter by parameter, since the last report.

    Recipe: ``hookline.HookManager(["fisher_information"], sinks=[...])``.

    Each backward pass is one update with the gradient of that pass: of batches, not of single samples, so it is smaller
    than the Fisher information proper by up to the size of the batch. The mean starts at zero and is not corrected:
    after n passes it has 1 − betaⁿ of its height. Keeps one copy of the gradients. Every parameter is in it once, under
    the innermost of the layers that have it, and under the first of those that share it.

    Args:
        beta: The share of what was that stays at each update.
        targets: Which layers, by name or glob, with commas; if left out, every one with parameters of its own. Of a
            layer that holds others, all parameters that are in none of the others chosen.
        exclude: Layers to leave out.
    """

    name = "fisher_information"
    description = "running mean of squared gradients, parameter by parameter"
    roots = ("fisher_info/",)
    kind = "backward"
    looks_for = "layers with parameters to train"

    def __init__(self, beta: float = 0.95, targets: str | None = None, exclude: str | None = None) -> None:
        self.beta = beta
        self._shares: dict[str, frozenset[str]] = {}
        """By layer, the names in it of the parameters that are counted there."""
        super().__init__(targets, exclude, per_unit=True)

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; F = beta·F + (1 − beta)·g², from zero."""
        one = "fisher_info/{layer}/{param}"
        return described(
            [
                ("trace", "over all parameters", "Σ F", "how sharply the loss depends on the weights"),
                ("max", "largest single entry", "max F", ""),
                (
                    "dead_count",
                    "parameters with next to no gradient beside the others",
                    "count of m ≤ 1e-6·m̄; m = mean F of a parameter, m̄ the mean over parameters",
                    "0 is healthy",
                ),
                ("dead_fraction", "their share", "dead / parameters", "0 is healthy"),
                (f"{one}/mean", "of one parameter", "mean F", ""),
                (f"{one}/trace", "of one parameter", "Σ F", ""),
                (f"{one}/max", "of one parameter", "max F", ""),
                (
                    f"{one}/dead",
                    "whether it has next to no gradient",
                    "1 if mean F < 1e-8, else 0",
                    "absolute: see above",
                ),
                ("fisher_info/{layer}/dead_count", "dead parameters of a layer that has some", "", ""),
                ("fisher_info/{layer}/dead_fraction", "their share in the layer", "", ""),
            ]
        )

    def new_tracker(self) -> FisherInformationState:
        """It keeps the means."""
        return FisherInformationState(self.beta)

    def new_hook(self, component: str) -> FisherHook:
        """On the parameters of a layer."""
        self._counter.register_component(component)
        return _OnShare(self._counter, component, self._shares[component])

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        layers = super()._layers(model)
        self._shares = _shares(layers)
        return [(name, module) for name, module in layers if self._shares[name or "model"]]

    def is_wanted(self, module: nn.Module) -> bool:
        """Layers that have something to train by themselves, apart from the layers in them."""
        return any(p.requires_grad for p in module.parameters(recurse=False))

    def is_of_unit(self, name: str) -> bool:
        """None is."""
        return False

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all parameters."""
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        # Without the infinite ones, beside which all others would be dead; NaN is not dead.
        bound = NEXT_TO_NONE * mean_of([value for value in means if math.isfinite(value)] or [0.0])
        dead = sum(value <= bound for value in means)
        return {
            "trace": sum(value for name, value in metrics.items() if name.endswith("/trace")),
            "max": max(value for name, value in metrics.items() if name.endswith("/max")),
            "dead_count": dead,
            "dead_fraction": dead / len(means),
        }


class _OnShare(FisherHook):
    """On some of the parameters of a layer and of those below it."""

    def __init__(self, tracker: FisherInformationState, component: str, names: Set[str]) -> None:
        super().__init__(tracker, component, TRAINING)
        self.names = names

    def attach_to(self, model: nn.Module, module: nn.Module) -> RemovableHandle:
        """Put it on them, and on those that come to take their place."""
        handle: Any = super().attach_to(model, module)
        for leaf in handle._leaves:
            if leaf.name not in self.names:
                leaf.remove()
        handle._leaves = [leaf for leaf in handle._leaves if leaf.name in self.names]
        return handle  # type: ignore[no-any-return]


def _shares(layers: list[tuple[str, nn.Module]]) -> dict[str, frozenset[str]]:
    """By layer, the parameters in it that no layer further in has, by their names in it."""
    taken: set[int] = set()
    found: dict[str, frozenset[str]] = {}
    for layer, module in sorted(layers, key=lambda each: len(each[0].split(".")) if each[0] else 0, reverse=True):
        names = []
        for path, owner, *_ in walk(module):
            for key, parameter in owner._parameters.items():
                if parameter is not None and id(parameter) not in taken:
                    taken.add(id(parameter))
                    names.append(f"{path}.{key}" if path else key)
        name = layer or "model"
        found[name] = found.get(name, frozenset()).union(names)  # a layer may be called "model"
    return found
