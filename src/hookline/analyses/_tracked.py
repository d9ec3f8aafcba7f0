"""Run a tracker of components as an analysis: find layers, attach the hooks that feed the tracker, report and reset.

`TrackedAnalysis` is the base of ``relu_activations``, ``saturated_activations``, ``fisher_information``,
``gradient_flow`` and ``relu_gradient_flow``; trackers and feeders are those of `hookline.metta`. Layers are found when
training starts, and the hooks are removed when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import nn

from hookline.analyses._analysis import CountingAnalysis
from hookline.metta.components import AttachesItself
from hookline.phases import validate_phases
from hookline.sites.attach import attach
from hookline.sites.targets import select
from hookline.sites.wrappers import clean_modules

__all__ = ["NEXT_TO_NONE", "TRAINING", "ReLUAnalysis", "TrackedAnalysis", "mean_of"]

TRAINING: Final = validate_phases("train")
"""Forwards of evaluations and of other hooks do not count."""
NEXT_TO_NONE: Final = 1e-6
"""Sums over all layers count a gradient as none below this share of the mean. The bound of a tracker itself, 1e-8, is
absolute: a trained model has gradients below it everywhere."""


class TrackedAnalysis(CountingAnalysis):
    """Feed a tracker from layers of the model, and report it.

    Args:
        targets: Which layers, by name or glob; if left out, all that `is_wanted` accepts.
        exclude: Layers to leave out.
        per_unit: Report a metric for each unit, which may be many; if False, those of layers and over all alone.
    """

    kind: ClassVar[str] = "forward"
    """Which kind of hook feeds the tracker."""
    looks_for: ClassVar[str] = ""
    """What its layers are, for the warning that there are none."""

    def __init__(self, targets: str | None = None, exclude: str | None = None, per_unit: bool = True) -> None:
        self.targets, self.exclude, self.per_unit = targets, exclude, per_unit
        self.tracker = self.new_tracker()
        super().__init__()

    # -- what each analysis defines ------------------------------------------------------------------------------

    def new_tracker(self) -> Any:
        """Return a new tracker."""
        raise NotImplementedError

    def new_feeder(self, component: str) -> Any:
        """Return the hook that feeds the tracker from the layer ``component``."""
        raise NotImplementedError

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` is a layer to track, where no targets are given."""
        raise NotImplementedError

    def is_of_unit(self, name: str) -> bool:
        """Return whether the metric ``name`` is one of a single unit."""
        raise NotImplementedError

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a few metrics over all layers, from the ``metrics`` of the tracker, which is not reset yet."""
        raise NotImplementedError

    # -- attaching and reporting ---------------------------------------------------------------------------------

    def start(self, model: nn.Module) -> None:
        """Attach the feeders to the layers."""
        self.finish()
        for name, module in self._layers(model):
            component = name or "model"
            self.tracker.register_component(component)
            feeder = self.new_feeder(component)
            if isinstance(feeder, AttachesItself):
                self._handles.add(feeder.attach_to(model, module))
            else:
                label = f"{self.name} of {name or 'the model'!r}"
                self._handles.add(attach(model, module, feeder, on=self.kind, observe=True, name=label))
            self._is_on = True

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.targets is None:
            found = [(name, module) for name, module in clean_modules(model) if self.is_wanted(module)]
            if not found:
                self.turn_off(f"looked for {self.looks_for} (name others by targets='layers.*') and found none")
                return []
        if self.targets is None and self.exclude is None:
            return found
        chosen = [module for _, module in found] if self.targets is None else self.targets.split(",")
        return [(name, module) for name, module, *_ in select(model, chosen, exclude=self.exclude)]

    def report(self) -> Mapping[str, Any] | None:
        """Return what was counted, and reset the tracker."""
        metrics = self.tracker.to_metrics()
        if not metrics:
            return None
        summary = self.summary(metrics)
        self.tracker.reset()
        shown = {name: value for name, value in metrics.items() if self.per_unit or not self.is_of_unit(name)}
        return {**summary, **{name.removeprefix(f"{self.name}/"): v for name, v in shown.items()}}

    def reset(self) -> None:
        """Begin another run."""
        super().reset()
        self.tracker.reset()

    def get_state_tensors(self) -> dict[str, Any]:
        """Return what was counted since the last report."""
        found = self.tracker.counted()
        return {"counts": found} if found else {}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take back what ``get_state_tensors`` gave."""
        self.tracker.load_counted(tensors.get("counts", {}))


class ReLUAnalysis(TrackedAnalysis):
    """Track units behind ReLUs: how often an event came for each, and the units without any event."""

    looks_for = "nn.ReLU, nn.ReLU6 or nn.LeakyReLU"
    event: ClassVar[str]
    """What is counted for each unit: "active"; the metric ``{event}_fraction`` is its mean over units."""
    no_event: ClassVar[str]
    """The word for a unit without any event: "dead"; ``{no_event}_units`` is their number."""

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` is a ReLU."""
        return isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU)

    def is_of_unit(self, name: str) -> bool:
        """Return True: all metrics of the tracker are of units."""
        return True

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all units."""
        values = list(metrics.values())
        count = sum(value == 0 for value in values)
        return {
            f"{self.event}_fraction": mean_of(values),
            f"{self.no_event}_units": count,
            f"{self.no_event}_fraction": count / len(values),
        }


def mean_of(values: list[float]) -> float:
    """Return the mean of ``values``; there has to be one."""
    return sum(values) / len(values)
