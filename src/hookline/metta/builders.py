"""Make the hooks of a component when a run begins: Metta's ``attach_…_hooks``.

A builder is called with the name of a component and a `ComponentContext`. It puts its tracker into the context if none
is there, and returns a hook of ``feeders`` that feeds it. `TrainTool` calls builders when there is a policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, cast

from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.metta.components import ComponentContext
from hookline.metta.feeders import ActivationFeeder, GradientFeeder, ParameterFeeder
from hookline.metta.trackers import (
    FisherInformationState,
    GradientFlowState,
    ReLUActivationState,
    ReLUGradientFlowState,
    SaturatedActivationState,
    check_activation,
)
from hookline.phases import Phases, validate_phases

__all__ = [
    "TRACKERS", "BackwardHookBuilder", "ComponentBackwardHookSpec", "ComponentHookSpec", "HookBuilder",
    "attach_fisher_information_hooks", "attach_gradient_flow_hooks", "attach_relu_activation_hooks",
    "attach_relu_gradient_flow_hooks", "attach_saturated_activation_hooks", "build_extractor",
]  # fmt: skip

HookBuilder: TypeAlias = Callable[[str, ComponentContext], Callable[[Any, tuple[Any, ...], Any], None] | None]
"""Makes the forward hook ``(module, args, output)`` of a component; None attaches nothing."""

BackwardHookBuilder: TypeAlias = Callable[
    [str, ComponentContext], Callable[[Any, tuple[Any, ...], tuple[Any, ...]], None] | None
]
"""Makes the backward hook ``(module, grad_input, grad_output)`` of a component; None attaches nothing."""

ComponentHookSpec: TypeAlias = tuple[str, HookBuilder]
"""The name of a component, and the builder of its forward hook."""

ComponentBackwardHookSpec: TypeAlias = tuple[str, BackwardHookBuilder]
"""The name of a component, and the builder of its backward hook."""

TRACKERS: Final[dict[str, type]] = {
    "relu_activation_state": ReLUActivationState,
    "fisher_information_state": FisherInformationState,
    "saturated_activation_state_tanh": SaturatedActivationState,
    "saturated_activation_state_sigmoid": SaturatedActivationState,
    "gradient_flow_state": GradientFlowState,
    "relu_gradient_flow_state": ReLUGradientFlowState,
}
"""The class of each tracker by its key in ``context.model_metrics``, in the order of reports."""

PhaseNames: TypeAlias = str | Iterable[str]


def attach_relu_activation_hooks(
    *, extractor: Any = "actor_hidden", unit_dim: int | None = None, during: PhaseNames = "train"
) -> HookBuilder:
    """Make a builder of forward hooks that count how often each unit of a component is above zero.

    Recipe::

        tool.add_training_hook("actor_mlp", hookline.metta.attach_relu_activation_hooks())
        ...
        context.model_metrics["relu_activation_state"].to_metrics()  # "activations/relu/actor_mlp/0": 0.53, …

    Args:
        extractor: Which tensor of the output (see `build_extractor`); an output that is a tensor is taken itself.
        unit_dim: The dimension of the units, if not the usual one (see `ReLUActivationState`).
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    return _builder("relu_activation_state", _activation_feeder(extractor), during, unit_dim=unit_dim)


def attach_saturated_activation_hooks(
    *,
    activation: str = "tanh",
    saturation_threshold: float = 0.95,
    extractor: Any = "critic_1",
    unit_dim: int | None = None,
    during: PhaseNames = "train",
) -> HookBuilder:
    """Make a builder of forward hooks that count how often each unit of a component is saturated.

    Recipe::

        tool.add_training_hook("critic_head", hookline.metta.attach_saturated_activation_hooks(activation="tanh"))
        ...
        context.model_metrics["saturated_activation_state_tanh"].to_metrics()

    Args:
        activation: ``"tanh"`` or ``"sigmoid"``: the activation behind the component's output.
        saturation_threshold: Where saturation begins, strictly between 0 and 1, for a sigmoid above 0.5; by component.
        extractor: Which tensor of the output (see `build_extractor`); an output that is a tensor is taken itself.
        unit_dim: The dimension of the units, if not the usual one (see `ReLUActivationState`).
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    check_activation(activation)
    return _builder(
        f"saturated_activation_state_{activation}",
        _activation_feeder(extractor),
        during,
        activation=activation,
        saturation_threshold=saturation_threshold,
        unit_dim=unit_dim,
    )


def attach_fisher_information_hooks(*, beta: float = 0.95, during: PhaseNames = "train") -> BackwardHookBuilder:
    """Make a builder of backward hooks that keep a running mean of the squared gradients of a component's parameters.

    Recipe::

        tool.add_training_backward_hook("actor_mlp", hookline.metta.attach_fisher_information_hooks())
        ...
        context.model_metrics["fisher_information_state"].to_metrics()  # "fisher_info/actor_mlp/actor_mlp.weight/mean"

    All parameters below the component count, those of its children too. Attached by `TrainTool` or `PolicyAutoBuilder`,
    each backward pass is one update with the gradient of that pass alone: of accumulated micro-batches each counts for
    itself. Attached by hand as a backward hook, it takes ``.grad`` as it is by then, which is the sum of the
    micro-batches so far. Gradients are this process's own, before DDP averages them, and as a ``GradScaler`` has
    scaled them.

    Args:
        beta: The share of the old mean that stays at each update; at least 0, less than 1; by component.
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    return _builder("fisher_information_state", ParameterFeeder, during, beta=beta)


def attach_gradient_flow_hooks(
    *, beta: float = 0.95, unit_dim: int | None = None, during: PhaseNames = "train"
) -> BackwardHookBuilder:
    """Make a builder of backward hooks that keep a running mean of the size of the gradient at each unit.

    Recipe::

        tool.add_training_backward_hook("actor_mlp", hookline.metta.attach_gradient_flow_hooks())
        ...
        context.model_metrics["gradient_flow_state"].to_metrics()  # "gradient_flow/actor_mlp/unit_0": 0.01, …

    It looks at the gradient of the component's first output, ``grad_output[0]``.

    Args:
        beta: The share of the old mean that stays at each update; at least 0, less than 1; by component.
        unit_dim: The dimension of the units, if not the usual one (see `ReLUActivationState`).
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    return _builder("gradient_flow_state", GradientFeeder, during, beta=beta, unit_dim=unit_dim)


def attach_relu_gradient_flow_hooks(
    *, unit_dim: int | None = None, during: PhaseNames = "train"
) -> BackwardHookBuilder:
    """Make a builder of backward hooks that count how often a gradient leaves each unit of a ReLU.

    Recipe::

        tool.add_training_backward_hook("actor_relu", hookline.metta.attach_relu_gradient_flow_hooks())
        ...
        context.model_metrics["relu_gradient_flow_state"].to_metrics()  # "gradient_flow/relu/actor_relu/0": 0.5, …

    It looks at the gradient of the component's first input, ``grad_input[0]``; a component whose input needs no
    gradient (a first layer) has none.

    Args:
        unit_dim: The dimension of the units, if not the usual one (see `ReLUActivationState`).
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    return _builder("relu_gradient_flow_state", partial(GradientFeeder, of_input=True), during, unit_dim=unit_dim)


def _builder(
    key: str, feeder: Callable[..., Any], during: PhaseNames, **options: Any
) -> Callable[[str, ComponentContext], Any]:
    """Return a builder of hooks that feed the tracker under ``key``; for a component that has one it returns None."""
    phases, kind = validate_phases(during), TRACKERS[key]
    kind(**options)  # checks them

    def builder(component: str, context: ComponentContext) -> Any:
        tracker: Any = context.model_metrics.get(key)
        if not isinstance(tracker, kind):
            tracker = context.model_metrics[key] = kind(**options)
        hook = feeder(tracker, component, phases)
        if hook is None or not tracker.begin_feeding(component):
            return None
        tracker.register_component(component, **options)
        return hook

    return builder


def _activation_feeder(spec: Any) -> Callable[..., ActivationFeeder | None]:
    def feeder(tracker: Any, component: str, phases: Phases) -> ActivationFeeder | None:
        extract = build_extractor(spec)
        if extract is not None:
            return ActivationFeeder(tracker, component, phases, extract)
        text = f"Component {component!r} is not tracked: extractor= is a function or the key of a tensor in its output"
        warnings.warn(f"{text}, got {spec!r}.", HooklineWarning, stacklevel=3)
        return None

    return feeder


# -- which tensor of an output -----------------------------------------------------------------------------------


def build_extractor(spec: Any) -> Callable[[Any], Any] | None:
    """Return the function that ``extractor=spec`` stands for, or None if it stands for none.

    Recipe::

        hookline.metta.build_extractor("hidden")({"hidden": x, "value": v})  # x
        hookline.metta.build_extractor("hidden")(x)  # x: an output that is a tensor is taken itself
        hookline.metta.build_extractor(lambda output: output[0])((x, state))  # x

    Args:
        spec: A function, which is used as it is (if it raises in a tracker's hook, there is one warning, and the output
            is not counted); or a key: it looks into a dict, a TensorDict or whatever else has keys and values, and
            finds nothing (None) if the key is missing, or in other outputs. Keys of nested TensorDicts are tuples.
    """
    if callable(spec):
        return cast("Callable[[Any], Any]", spec)
    if isinstance(spec, str) or (isinstance(spec, tuple) and spec and all(isinstance(part, str) for part in spec)):
        return _KeyExtractor(spec)
    return None


class _KeyExtractor:
    """Look a key up."""

    __slots__ = ("_key",)

    def __init__(self, key: str | tuple[str, ...]) -> None:
        self._key = key

    def __call__(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            return output
        if not (isinstance(output, Mapping) or hasattr(type(output), "keys")):
            return None
        try:
            found = output[self._key]
        except (LookupError, TypeError, ValueError):
            return None
        return found if isinstance(found, Tensor) else None

    def __repr__(self) -> str:
        return repr(self._key)
