"""``fisher_information``: measure how much the loss depends on each parameter, by its mean squared gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from hookline.analyses._tracked import NEXT_TO_NONE, TRAINING, TrackedAnalysis, mean_of
from hookline.metta.parameter_feeder import ParameterFeeder
from hookline.metta.trackers import FisherInformationState
from hookline.sites.wrappers import walk


class FisherInformationHook(TrackedAnalysis):
    """Measure the diagonal of the empirical Fisher information, parameter by parameter, since the last report.

    Recipe: ``hookline.HookManager(["fisher_information"], sinks=[...])``.

    Each backward pass is one update with the gradient of that pass: of batches, not of single samples, so it is smaller
    than the Fisher information proper by up to the size of the batch. The mean starts at zero and is not corrected:
    after n backward passes it is too small, by the factor 1 − betaⁿ. Keeps one copy of the gradients. Each parameter
    counts once: in the innermost layer that holds it, or in the first of the layers that share it.

    Args:
        beta: The share of the old mean that stays at each update.
        targets: Which layers, by name or glob, with commas; if left out, every one with parameters of its own. Of a
            layer that holds others, all parameters that are in none of the others chosen.
        exclude: Layers to leave out.
    """

    name = "fisher_information"
    description = "running mean of squared gradients, parameter by parameter"
    reduce = MappingProxyType({"max": "max", "*/max": "max", "*dead*": "min"})
    roots = ("fisher_info/",)
    kind = "backward"
    looks_for = "layers with parameters to train"
    # With F = beta·F + (1 − beta)·g², from zero.
    metrics = (
        ("trace", "over all parameters", "Σ F", "how sharply the loss depends on the weights"),
        ("max", "largest single entry", "max F"),
        (
            "dead_count",
            "parameters with next to no gradient beside the others",
            "count of m ≤ 1e-6·m̄; m: mean F of one parameter, m̄: mean of m over parameters",
            "0 is healthy",
        ),
        ("dead_fraction", "their share", "dead / parameters", "0 is healthy"),
        ("fisher_info/{layer}/{param}/mean", "of one parameter", "mean F"),
        ("fisher_info/{layer}/{param}/trace", "of one parameter", "Σ F"),
        ("fisher_info/{layer}/{param}/max", "of one parameter", "max F"),
        (
            "fisher_info/{layer}/{param}/dead",
            "whether it has next to no gradient",
            "1 if mean F < 1e-8, else 0",
            "an absolute bound; that of dead_count is relative",
        ),
        ("fisher_info/{layer}/dead_count", "dead parameters of a layer that has some"),
        ("fisher_info/{layer}/dead_fraction", "their share in the layer"),
    )

    def __init__(self, beta: float = 0.95, targets: str | None = None, exclude: str | None = None) -> None:
        self.beta = beta
        self._names: dict[str, frozenset[str]] = {}
        """By layer, the names in it of the parameters that are counted there."""
        super().__init__(targets, exclude)

    def new_tracker(self) -> FisherInformationState:
        """Return a tracker that keeps the means."""
        return FisherInformationState(self.beta)

    def new_feeder(self, component: str) -> ParameterFeeder:
        """Return a hook on the parameters of a layer."""
        return ParameterFeeder(self.tracker, component, TRAINING, self._names[component])

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        layers = super()._layers(model)
        self._names = _names_by_layer(layers)
        return [(name, module) for name, module in layers if self._names[name or "model"]]

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` has parameters to train of its own, apart from the layers in it."""
        return any(p.requires_grad for p in module.parameters(recurse=False))

    def is_of_unit(self, name: str) -> bool:
        """Return False: no metric is of a unit."""
        return False

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all parameters."""
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


def _names_by_layer(layers: list[tuple[str, nn.Module]]) -> dict[str, frozenset[str]]:
    """Return, by layer, the parameters that no layer further in has, by their names in it."""
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
