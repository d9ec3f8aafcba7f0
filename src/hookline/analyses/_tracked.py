"""What the trackers of components have in common as hooks over time: they find layers, watch them, and report.

`Tracked` is the base of ``relu_activations``, ``saturated_activations``, ``fisher_information``, ``gradient_flow`` and
``relu_gradient_flow``. Layers are found when training starts, and let go of when it ends; what a tracker of
`hookline.observe.trackers` has counted goes out at reports, and it begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.lifecycle.points import HookPoint
from hookline.lifecycle.run_phase import checked_phases
from hookline.metta.components import AttachesItself
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.targets import select
from hookline.sites.wrappers import clean_modules
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["NEXT_TO_NONE", "TRAINING", "Tracked", "described", "mean_of", "units_of"]

TRAINING: Final = checked_phases("train")
"""Forwards of evaluations and of other hooks do not count."""
NEXT_TO_NONE: Final = 1e-6
"""Sums over all layers count a gradient as none below this share of the mean. The bound of a tracker itself, 1e-8, is
absolute: a model that has learnt has gradients below it everywhere."""


class Tracked(Analysis):
    """A tracker that looks after its own attachments.

    Args:
        targets: Which layers, by name or glob; if left out, those of the kind that it is about.
        exclude: Layers to leave out.
        per_unit: Report every unit, which may be many; without, layers and sums alone.
    """

    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    kind: ClassVar[str] = "forward"
    """Which kind of hook feeds the tracker."""
    looks_for: ClassVar[str] = ""
    """What its layers are, for saying that there are none."""

    def __init__(self, targets: str | None, exclude: str | None, per_unit: bool) -> None:
        self.targets, self.exclude, self.per_unit = targets, exclude, per_unit
        self._counter = self.new_tracker()
        self._handles = HandleSet()
        self._is_on = False

    # -- what each of them says ----------------------------------------------------------------------------------

    def new_tracker(self) -> Any:
        """The tracker, with nothing counted."""
        raise NotImplementedError

    def new_hook(self, component: str) -> Any:
        """What shows the tracker one layer."""
        raise NotImplementedError

    def is_wanted(self, module: nn.Module) -> bool:
        """Whether a layer is one of its kind."""
        raise NotImplementedError

    def is_of_unit(self, name: str) -> bool:
        """Whether a metric is one of a single unit."""
        raise NotImplementedError

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A few figures over all layers; what the tracker has counted is still there."""
        raise NotImplementedError

    # -- going along ---------------------------------------------------------------------------------------------

    def start(self, model: nn.Module) -> None:
        """Watch the layers."""
        self.finish()
        for name, module in self._layers(model):
            hook = self.new_hook(name or "model")
            if isinstance(hook, AttachesItself):
                self._handles.add(hook.attach_to(model, module))
            else:
                label = f"{self.name} of {name or 'the model'!r}"
                self._handles.add(attach(model, module, hook, on=self.kind, observe=True, name=label))
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

    def finish(self) -> None:
        """Take everything off; what was counted stays."""
        self._handles.remove(quiet=True)
        self._handles = HandleSet()
        self._is_on = False

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Tell what was counted, and begin anew."""
        if self.off or ctx.model is None:
            return None
        if not self._is_on:  # in a loop that does not start hooks: from now on
            self.start(ctx.model)
        metrics = self._counter.to_metrics()
        if not metrics:
            return None
        summary = self.summary(metrics)
        self._counter.reset()
        shown = {name: value for name, value in metrics.items() if self.per_unit or not self.is_of_unit(name)}
        return {**summary, **{name.removeprefix(f"{self.name}/"): v for name, v in shown.items()}}

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self._counter.reset()

    def get_state_tensors(self) -> dict[str, Any]:
        """What was counted since the last report."""
        found = self._counter.counted()
        return {"counts": found} if found else {}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take it back."""
        self._counter.load_counted(tensors.get("counts", {}))


def units_of(metrics: Mapping[str, float], is_unit: Callable[[str], bool]) -> list[float]:
    """The values of single units."""
    return [value for name, value in metrics.items() if is_unit(name)]


def mean_of(values: list[float]) -> float:
    """Their mean; there has to be one."""
    return sum(values) / len(values)


def described(rows: list[tuple[str, str, str, str]]) -> list[MetricInfo]:
    """Name, description, formula and sign of each."""
    return [MetricInfo(*row) for row in rows]
