"""Measure layers by hooks of their own, from report to report: statistics, and Metta's trackers.

Six hooks: ``relu_activations``, ``saturated_activations``, ``fisher_information``, ``gradient_flow`` and
``relu_gradient_flow`` (trackers and feeders are those of `hookline.metta`), and ``stats`` (a `hookline.watch`).
Layers are found when training starts, and the hooks are removed when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from hookline.analyses._base import Analysis, mean_of
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import MetricInfo
from hookline.metta.builders import ActivationFeeder, GradientFeeder, ParameterFeeder, TrackerFeeder, parameters_in
from hookline.metta.trackers import (
    FisherInformationState,
    GradientFlowState,
    ReLUActivationState,
    ReLUGradientFlowState,
    SaturatedActivationState,
)
from hookline.observe.host_values import fetch
from hookline.observe.watch.hooks import checked_kinds
from hookline.observe.watch.row import Layout
from hookline.observe.watch.watch import Watch, watch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.targets import select
from hookline.sites.wrappers import clean_modules
from hookline.when import ReportedSteps, StepSchedule

_NEXT_TO_NONE: Final = 1e-6
"""Sums over all layers count a gradient as none below this share of the mean. The bound of a tracker itself, 1e-8, is
absolute: a trained model has gradients below it everywhere."""


class TrackedAnalysis(Analysis):
    """Feed a tracker from layers of the model by hooks of its own, and report it.

    Args:
        tracker: What the layers feed.
        targets: Which layers, by name or glob; if left out, all that `is_wanted` accepts.
        per_unit: Report a metric for each unit, which may be many; if False, those of layers and over all alone.
    """

    kind: ClassVar[str] = "forward"
    """Which kind of hook feeds it."""
    layers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """The types of the layers to track, where no targets are given."""
    looks_for = ""
    """What these are, for the warning that there are none."""
    of_units: ClassVar[str] = ""
    """What the names of the metrics of single units have in them."""

    def __init__(self, tracker: Any, targets: str | None, per_unit: bool = True) -> None:
        self.tracker, self.targets, self.per_unit = tracker, targets, per_unit
        self._handles: HandleSet | None = None

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` is a layer to track, where no targets are given."""
        return isinstance(module, self.layers)

    def new_feeder(self, component: str) -> TrackerFeeder:
        """Return the hook that feeds the tracker from the layer ``component``."""
        return (ActivationFeeder if self.kind == "forward" else GradientFeeder)(self.tracker, component)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a few metrics over all layers, from the ``metrics`` of the tracker, which is not reset yet."""
        raise NotImplementedError

    def start(self, model: nn.Module) -> None:
        """Attach the feeders to the layers."""
        self.finish()
        self._handles = HandleSet()
        for name, module in self._layers(model):
            component = name or "model"
            self.tracker.register_component(component)
            feeder: Any = self.new_feeder(component)
            if isinstance(feeder, ParameterFeeder):
                self._handles.add(feeder.attach_to(model, module))
            else:
                label = f"{self.name} of {name or 'the model'!r}"
                self._handles.add(attach(model, module, feeder, on=self.kind, observe=True, name=label))

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.targets is not None:
            chosen: list[Any] = self.targets.split(",")
        else:
            chosen = [module for _, module in clean_modules(model) if self.is_wanted(module)]
            if not chosen:
                self.turn_off(f"looked for {self.looks_for} (name others by targets='layers.*') and found none")
                return []
        return [(name, module) for name, module, *_ in select(model, chosen)]

    def finish(self) -> None:
        """Remove the hooks; what was counted stays."""
        if self._handles is not None:
            self._handles.remove(quiet=True)
        self._handles = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Report what was counted, and reset the tracker."""
        if self.off or ctx.model is None:
            return None
        if self._handles is None:  # the loop has not called start(): count from now on
            self.start(ctx.model)
        metrics = self.tracker.to_metrics()
        if not metrics:
            return None
        summary = self.summary(metrics)
        self.tracker.reset()
        if not self.per_unit:
            metrics = {name: value for name, value in metrics.items() if self.of_units not in name}
        return {**summary, **{name.removeprefix(f"{self.name}/"): value for name, value in metrics.items()}}

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


# -- units behind ReLUs ----------------------------------------------------------------------------------------------


class _ReLUAnalysis(TrackedAnalysis):
    """Track units behind ReLUs: how often an event came for each, and the units without any event."""

    layers = (nn.ReLU, nn.ReLU6, nn.LeakyReLU)
    looks_for = "nn.ReLU, nn.ReLU6 or nn.LeakyReLU"
    of_units = "/relu/"
    tracker_type: ClassVar[type]
    event: ClassVar[tuple[str, str]]
    """What is counted for each unit, and the word for a unit without any: ``active_fraction``, ``dead_units``."""

    def __init__(self, targets: str | None = None, per_unit: bool = True) -> None:
        super().__init__(self.tracker_type(), targets, per_unit)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all units."""
        some, none = self.event
        count = sum(value == 0 for value in metrics.values())
        return {
            f"{some}_fraction": mean_of(list(metrics.values())),
            f"{none}_units": count,
            f"{none}_fraction": count / len(metrics),
        }


class ReLUActivationsHook(_ReLUAnalysis):
    """Measure the share of samples in which each unit is above zero, since the last report.

    Recipe: ``hookline.HookManager(["relu_activations"], sinks=[...])``.

    A unit is an entry of the last dimension; of images, a channel. Only training forwards count. ReLUs that are called
    as functions are no modules: name the layer before them by ``targets``, its outputs have the same signs.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU``, ``nn.ReLU6`` and
            ``nn.LeakyReLU``.
        per_unit: Report a metric for each unit, which may be many; if False, those over all units alone.
    """

    name = "relu_activations"
    description = "how often units behind ReLUs are on, and which never are"
    reduce = MappingProxyType({"dead_*": "min"})  # a unit that is dead is so on every rank
    roots = ("activations/relu/",)
    tracker_type = ReLUActivationState
    event = ("active", "dead")
    metrics = (
        ("active_fraction", "how often a unit is on, over all units", "mean of x > 0"),
        ("dead_units", "units that were never on", "count of 0", "0 is healthy"),
        ("dead_fraction", "their share of all units", "dead / units", "0 is healthy"),
        ("activations/relu/{layer}/{unit}", "how often this unit is on", "share of x > 0", "0: dead"),
    )


class ReLUGradientFlowHook(_ReLUAnalysis):
    """Measure the share of samples in which a gradient leaves each unit, backwards, since the last report.

    Recipe: ``hookline.HookManager(["relu_gradient_flow"], sinks=[...])``.

    A gradient counts if it is above 1e-8, as in Metta; with a loss that has become small, none is.

    Args:
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.ReLU``, ``nn.ReLU6`` and
            ``nn.LeakyReLU``.
        per_unit: Report every unit, which may be many; without, sums alone.
    """

    name = "relu_gradient_flow"
    description = "how often gradients come through the units of ReLUs"
    reduce = MappingProxyType({"blocked_*": "min"})  # a unit that is blocked is so on every rank
    roots = ("gradient_flow/relu/",)
    kind = "backward"
    event = ("passed", "blocked")
    metrics = (
        ("passed_fraction", "how often a gradient comes through, over all units",
         "mean of |g| > 1e-8"),
        ("blocked_units", "units that never let one through", "count of 0", "0 is healthy"),
        ("blocked_fraction", "their share of all units", "blocked / units", "0 is healthy"),
        ("gradient_flow/relu/{layer}/{unit}", "how often more than 1e-8 comes through this unit", "share of |g| > 1e-8",
         "0: dead, or small everywhere"),
    )  # fmt: skip
    tracker_type = ReLUGradientFlowState

    def new_feeder(self, component: str) -> GradientFeeder:
        """Return a hook on the gradient of a layer's input."""
        return GradientFeeder(self.tracker, component, of_input=True)


# -- other activations, and gradients --------------------------------------------------------------------------------


class SaturatedActivationsHook(TrackedAnalysis):
    """Measure the share of samples in which each unit is saturated, since the last report.

    Recipe: ``hookline.HookManager(["saturated_activations"], sinks=[...])``.

    Args:
        activation: ``"tanh"``, saturated where ``abs(x)`` is over the threshold; or ``"sigmoid"``, where x is over it
            or under 1 less the threshold.
        saturation_threshold: From where on it is saturated.
        targets: Which layers, by name or glob, with commas; if left out, every ``nn.Tanh``, or every ``nn.Sigmoid``.
        per_unit: Report every unit, which may be many; without, layers and sums alone.
    """

    name = "saturated_activations"
    description = "how often units behind a tanh or a sigmoid are saturated"
    of_units = "/saturated_fraction/"
    reduce = MappingProxyType({"always_saturated": "min", "*/total_neurons": "sum", "*/saturated_neurons": "sum"})

    def __init__(
        self,
        activation: str = "tanh",
        saturation_threshold: float = 0.95,
        targets: str | None = None,
        per_unit: bool = True,
    ) -> None:
        super().__init__(SaturatedActivationState(activation, saturation_threshold), targets, per_unit)
        self.activation, self.roots = activation, (f"activations/{activation}/",)
        self.looks_for = "nn.Tanh" if activation == "tanh" else "nn.Sigmoid"

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric; in the sums a neuron counts once per sample."""
        root = f"activations/{self.activation}"
        rows = [
            ("fraction", "how often a unit is saturated, over all units", "saturated / seen", "1: nothing passes"),
            ("always_saturated", "units that were saturated every time", "count of 1", "0 is healthy"),
            (f"{root}/saturated_fraction/{{layer}}/{{unit}}", "how often this unit is", "saturated / seen"),
        ]
        for name, what in (
            ("total_neurons", "units times samples that were looked at"),
            ("saturated_neurons", "those that were saturated"),
            ("fraction", "their share"),
            ("active_fraction", "the share of the others"),
        ):
            rows.append((f"{root}/saturation/{name}", what))
            rows.append((f"{root}/saturation/{{layer}}/{name}", f"{what}, of one layer"))
        return [MetricInfo(*row) for row in rows]

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the activation."""
        return isinstance(module, nn.Tanh if self.activation == "tanh" else nn.Sigmoid)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all layers."""
        return {
            "fraction": metrics[f"activations/{self.activation}/saturation/fraction"],
            "always_saturated": sum(value == 1 for name, value in metrics.items() if self.of_units in name),
        }


class GradientFlowHook(TrackedAnalysis):
    """Measure a running mean of the size of the gradient at each unit's output, since the last report.

    Recipe: ``hookline.HookManager(["gradient_flow"], sinks=[...])``.

    The mean starts at zero and is not corrected: after n passes it has 1 − betaⁿ of its height. Gradients of outputs
    are as large as a GradScaler has made them. ``out_proj`` of an ``nn.MultiheadAttention`` is never called and is
    left out: name the attention as a whole by ``targets``.

    Args:
        beta: The share of the old mean that stays at each backward pass.
        targets: Which layers, by name or glob, with commas; if left out, every linear layer and convolution.
        per_unit: Report every unit, which may be many; without, layers and sums alone.
    """

    name = "gradient_flow"
    description = "size of the gradient that arrives at each unit of each layer"
    reduce = MappingProxyType({"smallest": "min", "largest": "max", "*blocked_fraction": "min"})
    kind = "backward"
    of_units = "/unit_"
    looks_for = "linear layers and convolutions"
    # With n = √mean g² over the batch, G = beta·G + (1 − beta)·n, from zero.
    metrics = (
        ("mean", "over layers", "mean of a layer's mean G"),
        ("smallest", "of the layer that gets least", "min of a layer's mean G", "near 0: it does not learn"),
        ("largest", "of the layer that gets most", "max of a layer's mean G", "far over the mean: explodes"),
        ("blocked_fraction", "units that get next to none beside the others, over layers",
         "mean of a layer's share of G ≤ 1e-6·mean", "0 is healthy"),
        ("{layer}/mean", "over the units of a layer", "mean G"),
        ("{layer}/unit_{unit}", "of one unit, where it is not blocked", "G"),
        ("{layer}/blocked_fraction", "units of a layer that get none", "share of G < 1e-8", "absolute: see above"),
        ("{layer}/active_fraction", "the others", "1 less that", "1 is healthy"),
    )  # fmt: skip

    def __init__(self, beta: float = 0.95, targets: str | None = None, per_unit: bool = True) -> None:
        super().__init__(GradientFlowState(beta), targets, per_unit)

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` multiplies with a matrix; an embedding does not, and ``out_proj`` is not called."""
        if isinstance(module, NonDynamicallyQuantizableLinear):  # the type of out_proj, and of nothing else in torch
            return False
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and is_lazy(weight):  # which has no dimensions yet
            return "Norm" not in type(module).__name__
        is_matrix = isinstance(weight, nn.Parameter) and weight.dim() >= 2
        return is_matrix and not isinstance(module, nn.Embedding | nn.EmbeddingBag)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all layers."""
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        has_nan = any(map(math.isnan, means))
        mean = mean_of([value for value in means if math.isfinite(value)] or [0.0])
        shares = fetch((sizes <= _NEXT_TO_NONE * mean).float().mean() for sizes in self.tracker.counted().values())
        return {
            "mean": mean_of(means),
            "smallest": math.nan if has_nan else min(means),
            "largest": math.nan if has_nan else max(means),
            "blocked_fraction": mean_of([share for (share,) in shares]),  # a NaN is not blocked
        }


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
        ("dead_count", "parameters with next to no gradient beside the others",
         "count of m ≤ 1e-6·m̄; m: mean F of one parameter, m̄: mean of m over parameters", "0 is healthy"),
        ("dead_fraction", "their share", "dead / parameters", "0 is healthy"),
        ("fisher_info/{layer}/{param}/mean", "of one parameter", "mean F"),
        ("fisher_info/{layer}/{param}/trace", "of one parameter", "Σ F"),
        ("fisher_info/{layer}/{param}/max", "of one parameter", "max F"),
        ("fisher_info/{layer}/{param}/dead", "whether it has next to no gradient", "1 if mean F < 1e-8, else 0",
         "an absolute bound; that of dead_count is relative"),
        ("fisher_info/{layer}/dead_count", "dead parameters of a layer that has some"),
        ("fisher_info/{layer}/dead_fraction", "their share in the layer"),
    )  # fmt: skip

    def __init__(self, beta: float = 0.95, targets: str | None = None) -> None:
        super().__init__(FisherInformationState(beta), targets)
        self._names: dict[str, frozenset[str]] = {}
        """By layer, the names in it of the parameters that are counted there."""

    def new_feeder(self, component: str) -> ParameterFeeder:
        """Return a hook on the parameters of a layer."""
        return ParameterFeeder(self.tracker, component, self._names[component])

    def _layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        layers = super()._layers(model)
        self._names = _names_by_layer(layers)
        return [(name, module) for name, module in layers if self._names[name or "model"]]

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether ``module`` has parameters to train of its own, apart from the layers in it."""
        return any(p.requires_grad for p in module.parameters(recurse=False))

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics over all parameters."""
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        # Without the infinite ones, beside which all others would be dead; NaN is not dead.
        bound = _NEXT_TO_NONE * mean_of([value for value in means if math.isfinite(value)] or [0.0])
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
        own = {name: id(owner._parameters[key]) for name, owner, key in parameters_in(module)}
        names = [name for name, parameter in own.items() if parameter not in taken]
        taken.update(own.values())
        name = layer or "model"
        found[name] = found.get(name, frozenset()).union(names)  # a layer may be called "model"
    return found


# -- statistics -------------------------------------------------------------------------------------------------------

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
