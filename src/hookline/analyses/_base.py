"""Define what the built-in hooks share: base classes, checked options, state by attribute, comparing with a reference.

Every analysis derives from one of the classes here, and they from `TrainingHook`. To add an analysis, write one file
with a class that has ``name``, ``description``, ``metrics`` and ``compute``, and one line in ``analyses.BUILT_IN``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from hookline.analyses._values import GradientWindow, StepNumbers, dense_float, parameters_of
from hookline.errors import HooklineWarning, OptionError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import InterventionHook, LoopPoints, MetricInfo, TrainingHook
from hookline.messages import caller_stacklevel
from hookline.when import HookPoint, StepSchedule

_WITH_STATE: Final = (GradientWindow, StepNumbers)
"""Attributes that have ``state``, ``load`` and ``clear`` of their own."""


class BuiltInHook(TrainingHook):
    """Describe metrics by a table, check options, and turn off where there is nothing to measure."""

    metrics: ClassVar[Sequence[tuple[str, ...]]] = ()
    """A row for each metric, with the fields of `MetricInfo`: name, description, formula, what its value says, label,
    what its keys are. Fields at the end may be left out."""
    single: ClassVar[tuple[str, ...]] = ()
    """The metrics that every parameter has as well: as ``"metric/parameter"``."""
    off = ""
    """Why it has turned itself off, if it has."""
    _has_warned = False

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric."""
        found = [MetricInfo(*row) for row in self.metrics]
        single = [each for each in found if each.name in self.single]
        return found + [
            MetricInfo(f"{info.name}/{{param}}", f"{info.description}, of one parameter") for info in single
        ]

    def step_of(self, ctx: RunDataContext) -> int:
        """Return the step; by the manager's count in a loop that does not give it in the context."""
        return ctx.step if ctx.step is not None else max(int(getattr(self.manager, "global_step", 0)), 0)

    def turn_off(self, why: str) -> None:
        """Return no metrics in this run from now on, and warn once."""
        self.off = why
        if not self._has_warned:
            self._has_warned = True
            silent = HooklineWarning(f"Hook {self.name!r} {why}, so it stays silent.")
            warnings.warn(silent, stacklevel=caller_stacklevel())

    def reset(self) -> None:
        """Begin another run, in which there may be something to measure."""
        self.off = ""

    def number(self, option: str, value: Any) -> float:
        """Return ``value``; raise unless it is a number over 0."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise OptionError(f"{option}= of hook {self.name!r} is a number over 0, got {value!r}.")
        return float(value)

    def one_of(self, option: str, value: Any, choices: Sequence[str]) -> str:
        """Return ``value``; raise unless it is one of ``choices``."""
        if value not in choices:
            raise OptionError(f"{option}= of hook {self.name!r} is one of {', '.join(choices)}; got {value!r}.")
        return str(value)

    def whole_number(self, option: str, value: Any, least: int) -> int:
        """Return ``value``; raise unless it is a whole number of at least ``least``."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(
                f"{option}= of hook {self.name!r} must be a whole number of at least {least}, got {value!r}."
            )
        return value


class ReferenceHook(BuiltInHook):
    """Compare with reference weights where the run has some."""

    needs_reference_weights = True
    reference_weights: Mapping[str, Tensor] = MappingProxyType({})
    """The weights to compare with, by parameter; none unless the run has some."""

    def reset(self) -> None:
        """Begin another run, which may have other reference weights, or none."""
        super().reset()
        self.reference_weights = {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave, with the reference of this run."""
        reference = self.reference_weights
        super().load_state_dict(state)
        self.reference_weights = reference

    def way_to_reference(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the difference from each parameter to its reference, of those that have one in that shape."""
        ways = {}
        for name, parameter in parameters.items():
            goal = self.reference_weights.get(name, self.reference_weights.get(f"module.{name}"))  # saved under DDP
            if goal is not None and goal.shape == parameter.shape:
                ways[name] = dense_float(goal).to(parameter.device) - dense_float(parameter)
        return ways


class Analysis(BuiltInHook):
    """Observe without drawing random numbers, by default at the end of an epoch or at snapshots of the step loop."""

    pure = True
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points: LoopPoints | None = MappingProxyType({"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.SNAPSHOT}})
    kept: ClassVar[tuple[str, ...]] = ()
    """The attributes that a resumed run has to know. When a run begins, a window or `StepNumbers` is cleared, and any
    other attribute gets the value that it has in the class."""

    def reset(self) -> None:
        """Begin another run: everything that was kept is dropped."""
        super().reset()
        for name in self.kept:
            value = getattr(self, name)
            if isinstance(value, _WITH_STATE):
                value.clear()
            else:
                setattr(self, name, getattr(type(self), name))

    def add_to_window(self, window: GradientWindow, vector: Tensor | None, option: str, max_gib: float) -> bool:
        """Add ``vector`` to ``window``; return False without one, or if the window would exceed ``max_gib``."""
        if self.off or vector is None:
            return False
        if window.count == 0 and window.gib(vector) > max_gib:
            self.turn_off(
                f"would keep {window.size} gradients in {window.gib(vector):.1f} GiB, and max_gib={max_gib:g} (give "
                f"it a smaller {option}=, or a larger max_gib=)"
            )
            return False
        window.add(vector)
        return True

    def get_state_tensors(self) -> dict[str, Any]:
        """Return what it keeps between firings."""
        values = {name: getattr(self, name) for name in self.kept}
        states = {name: v.state() if isinstance(v, _WITH_STATE) else v for name, v in values.items()}
        return {name: state for name, state in states.items() if state is not None}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take back what ``get_state_tensors`` gave."""
        for name, value in tensors.items():
            if isinstance(getattr(self, name, None), _WITH_STATE):
                getattr(self, name).load(value)
            elif name in self.kept:
                setattr(self, name, value)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.reset()
        self.set_state_tensors(dict(state))


class StepAnalysis(Analysis):
    """Look at every step, and report at the end of an epoch or at snapshots; a step waits for no device."""

    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = MappingProxyType(
        {"epoch": {HookPoint.POST_STEP, HookPoint.POST_EPOCH}, "step": {HookPoint.POST_STEP, HookPoint.SNAPSHOT}}
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Look at a step; report at the other points."""
        if self.off:
            return None
        if ctx.hook_point is not HookPoint.POST_STEP:
            return self.report()
        self.take_step(ctx)
        return None

    def take_step(self, ctx: RunDataContext) -> None:
        """Keep what the report needs of one step."""
        raise NotImplementedError

    def report(self) -> dict[str, Any] | None:
        """Return the metrics of the steps since the last report."""
        raise NotImplementedError


# -- interventions -------------------------------------------------------------------------------------------------


class Intervention(BuiltInHook, InterventionHook):
    """Try something after a step, which the guard undoes."""

    hook_points = frozenset({HookPoint.POST_STEP})
    loop_points: LoopPoints | None = MappingProxyType({"epoch": {HookPoint.POST_STEP}, "step": {HookPoint.POST_STEP}})
    scope = "trains"

    def set_schedule(self, every_n_steps: int, burst_length: int = 1) -> None:
        """Fire at ``burst_length`` steps in a row every ``every_n_steps``; the first burst begins at that step."""
        every = self.whole_number("every_n_steps", every_n_steps, 1)
        length = self.whole_number("burst_length", burst_length, 1)
        self.step_schedule = StepSchedule("burst", stride=every, burst_length=length, warmup=every)


class ReferenceIntervention(ReferenceHook, Intervention):
    """Try something after a step, and compare with reference weights where the run has some."""

    def way_to_solution(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the way from the weights of ``model`` to the reference, without parameters that are there."""
        ways = self.way_to_reference(parameters_of(model))
        return {name: way for name, way in ways.items() if bool((way != 0).any())}


def mean_of(values: list[float]) -> float:
    """Return the mean of ``values``; there has to be one."""
    return sum(values) / len(values)


def by_parameter(names: Iterable[str], metrics: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``metrics`` of each parameter, as ``"metric/parameter"``."""
    return {f"{metric}/{name}": value for name in names for metric, value in metrics(name).items()}


@contextmanager
def same_random_numbers(step: int) -> Iterator[None]:
    """Draw random numbers that depend on ``step`` alone: the same in each block, whatever other hooks have drawn."""
    with kept_rng():
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        yield
