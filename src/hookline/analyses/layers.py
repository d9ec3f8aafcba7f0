"""Measure layers from report to report: ``stats``, a `hookline.watch` as a lifecycle hook.

Layers are found when training starts, and the hooks are removed when it ends. The trackers of ``hookline.metta`` count
by unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from hookline.analyses._base import Analysis
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo
from hookline.observe.watch.hooks import checked_kinds
from hookline.observe.watch.row import Layout
from hookline.observe.watch.watch import Watch, watch
from hookline.when import StepSchedule

_EVERY: Final = 10
_STATS: Final = ("mean", "std", "norm", "absmax", "zero_fraction", "nonfinite")


class StatsHook(Analysis):
    """Measure mean, spread, norm and extremes of activations, gradients and parameters, layer by layer.

    Recipe: ``hookline.HookManager(["stats"], hook_config={"stats": {"every": 5}}, sinks=[...])``.

    Metrics are ``{layer}/{kind}/{stat}``; those of the whole model have no layer in front. A step is one of the
    optimizer, with all batches that it has. Gradients of parameters are as the optimizer sees them: of the whole step,
    unscaled, and after clipping; ``norms`` has their length before it. What is reported is of the steps looked at since
    the last report, of which ``looked_at`` is the newest.

    Args:
        targets: Which modules, and parameters below them; as in ``hookline.watch``.
        on: What to look at: ``"forward"``, ``"backward"``, ``"param"``, ``"param_grad"``; one, or several with commas.
        stats: Which statistics; as in ``hookline.watch``, with commas if it is one string.
        every: Look at every n-th step. If left out: at every tenth, or, where a run reports by steps
            (`hookline.follow`, callbacks, scripts), at just the steps that it reports. The others cost next to nothing.
            What a look takes goes with the number of modules and parameters: in small models a step and more, in large
            ones a fifth of a step.
        exclude: Modules and parameters to leave out.
    """

    name = "stats"
    description = "statistics of activations, gradients and parameters, layer by layer"
    reduce = MappingProxyType({"*absmax": "max", "max_*": "max", "*nonfinite": "max"})

    def __init__(
        self,
        targets: str = "*",
        on: str | Sequence[str] = ("forward", "backward", "param", "param_grad"),
        stats: str | Sequence[str] = _STATS,
        every: int | StepSchedule | None = None,
        exclude: str | None = None,
    ) -> None:
        self.targets, self.exclude = targets, exclude
        self.on, self.stats = checked_kinds(_listed(on)), _listed(stats)
        Layout.of(self.stats)  # a statistic that there is not is an error now, and not when training starts
        self.every = StepSchedule.of(_EVERY if every is None else every)
        self._takes_reports = every is None
        self._watch: Watch | None = None
        self._state_to_load: Mapping[str, Any] = {}

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric, for the statistics that were chosen."""
        kinds = {
            "forward": "outputs of a layer",
            "backward": "gradients of a layer's outputs",
            "param": "a parameter as it is",
            "param_grad": "gradients of a parameter, after clipping",
        }
        found = [MetricInfo("nonfinite", "tensors with NaN or Inf in them, everywhere", sign_info="0 is healthy")]
        found.append(MetricInfo("looked_at", "newest step that was looked at; the others are of it and those before"))
        for kind in self.on:
            what = kinds.get(kind, kind)
            found.append(MetricInfo(f"max_{kind}", f"largest magnitude in {what}, over all", "max |x|"))
            for stat in self.stats:
                found.append(MetricInfo(f"{{layer}}/{kind}/{stat}", f"{stat} over {what} since the last report"))
                found.append(MetricInfo(f"{kind}/{stat}", f"{stat} over {what}, of the model as a whole"))
        return found

    def look_at_reports(self, reports: Any) -> None:
        """Look at the steps for which ``reports.is_due(step)``, unless ``every`` says otherwise; hosts call it."""
        if self._takes_reports:
            self.every = ReportedSteps(reports=reports)

    def start(self, model: nn.Module) -> None:
        """Attach the watch."""
        self.finish()
        self._watch = watch(model, self.targets, on=self.on, stats=self.stats, every=self.every, exclude=self.exclude)
        if self._state_to_load:
            self._watch.load_state_dict(self._state_to_load)
        self._state_to_load = {}

    def finish(self) -> None:
        """Remove the watch."""
        if self._watch is not None:
            self._watch.remove(quiet=True)
        self._watch = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Report what was counted, and reset."""
        if ctx.model is None:
            return None
        if self._watch is None:  # the loop has not called start(): count from now on
            self.start(ctx.model)
            return None
        ago, metrics = self._watch.steps_since_look, self._watch.to_metrics(reset=True)
        looked_at = {} if ago is None or self.manager is None else {"looked_at": self.manager.global_step - ago}
        return {**_summaries(metrics, self.on), **looked_at, **metrics}

    def reset(self) -> None:
        """Begin another run."""
        super().reset()
        self._state_to_load = {}
        if self._watch is not None:
            self._watch.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted since the last report."""
        return dict(self._state_to_load) if self._watch is None else self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting, if need be when training starts."""
        if self._watch is None:
            self._state_to_load = dict(state)
        elif state:
            self._watch.load_state_dict(state)


def _listed(given: str | Sequence[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts)


def _summaries(metrics: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return a few metrics over everything, with names short enough for a console."""
    bad = [value for name, value in metrics.items() if name.endswith("nonfinite")]
    found: dict[str, Any] = {"nonfinite": int(sum(bad))} if bad else {}
    for kind in kinds:
        sizes = [value for name, value in metrics.items() if f"/{name}".endswith(f"/{kind}/absmax")]
        if sizes:
            found[f"max_{kind}"] = float(torch.tensor(sizes).max())  # NaN if one is
    return found


@dataclass(frozen=True, slots=True)
class ReportedSteps(StepSchedule):
    """Only the steps at whose ends a run reports: so what is reported is of the step in the record.

    `StatsHook` gives it to ``watch``, where the host of a run says when it reports.
    """

    reports: Any = None
    """Tells by ``is_due(step)`` whether the run reports at the end of a step."""

    def is_active(self, step: int) -> bool:
        """Return whether there is a report at the end of ``step``."""
        return bool(self.reports.is_due(step))
