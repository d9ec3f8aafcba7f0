"""``fisher_information``: how much the loss depends on each parameter, by a running mean of its squared gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hookline.analyses._tracked import TRAINING, Tracked, described
from hookline.hooks.fisher_hook import FisherHook
from hookline.hooks.metric_info import MetricInfo
from hookline.observe.trackers.fisher import FisherInformationState

__all__ = ["FisherInformationHook"]


class FisherInformationHook(Tracked):
    """The diagonal of the empirical Fisher information, parameter by parameter, since the last report.

    Recipe: ``hookline.HookManager(["fisher_information"], sinks=[...])``.

    Each backward pass is one update with the gradient of that pass: of batches, not of single samples, so it is smaller
    than the Fisher information proper by up to the size of the batch. The mean starts at zero and is not corrected:
    after n passes it has 1 − betaⁿ of its height. Keeps one copy of the gradients.

    Args:
        beta: The share of what was that stays at each update.
        targets: Which layers, by name or glob, with commas; if left out, every one with parameters of its own.
        exclude: Layers to leave out.
    """

    name = "fisher_information"
    description = "running mean of squared gradients, parameter by parameter"
    roots = ("fisher_info/",)
    kind = "backward"
    looks_for = "layers with parameters to train"

    def __init__(self, beta: float = 0.95, targets: str | None = None, exclude: str | None = None) -> None:
        self.beta = beta
        super().__init__(targets, exclude, per_unit=True)

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; F = beta·F + (1 − beta)·g², from zero."""
        one = "fisher_info/{layer}/{param}"
        return described(
            [
                ("trace", "over all parameters", "Σ F", "how sharply the loss depends on the weights"),
                ("max", "largest single entry", "max F", ""),
                ("dead_count", "parameters with next to no gradient", "count of mean F < 1e-8", "0 is healthy"),
                ("dead_fraction", "their share", "dead / parameters", "0 is healthy"),
                (f"{one}/mean", "of one parameter", "mean F", ""),
                (f"{one}/trace", "of one parameter", "Σ F", ""),
                (f"{one}/max", "of one parameter", "max F", ""),
                (f"{one}/dead", "whether it has next to no gradient", "1 if mean F < 1e-8, else 0", "0 is healthy"),
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
        return FisherHook(self._counter, component, TRAINING)

    def is_wanted(self, module: nn.Module) -> bool:
        """Layers without layers in them, that have something to train."""
        return not any(module.children()) and any(p.requires_grad for p in module.parameters(recurse=False))

    def is_of_unit(self, name: str) -> bool:
        """None is."""
        return False

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all parameters."""
        dead = [value for name, value in metrics.items() if name.endswith("/dead")]
        return {
            "trace": sum(value for name, value in metrics.items() if name.endswith("/trace")),
            "max": max(value for name, value in metrics.items() if name.endswith("/max")),
            "dead_count": int(sum(dead)),
            "dead_fraction": sum(dead) / len(dead),
        }
