"""Builders: functions that make the hooks of a component when a run begins.

A builder is called with the name of a component and a `ComponentContext`, puts its tracker into the context if none is
there, and gives back a hook that feeds it. Handed to `TrainTool`, which calls them when there is a policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, TypeVar

from hookline.errors import HooklineWarning
from hookline.lifecycle.run_phase import checked_phases
from hookline.metta.components import ComponentContext
from hookline.metta.extract import Extractor, build_extractor, mark_of
from hookline.metta.fisher import FisherInformationState
from hookline.metta.fisher_hook import FisherHook
from hookline.metta.gradient_flow_state import GradientFlowState, ReLUGradientFlowState
from hookline.metta.relu import ReLUActivationState
from hookline.metta.saturated import SaturatedActivationState
from hookline.metta.tracked_components import BlendOptions, UnitOptions
from hookline.metta.tracker_hooks import ActivationHook, GradientFlowHook, ReLUGradientFlowHook

__all__ = [
    "TRACKERS",
    "BackwardHookBuilder",
    "ComponentBackwardHookSpec",
    "ComponentHookSpec",
    "HookBuilder",
    "attach_fisher_information_hooks",
    "attach_gradient_flow_hooks",
    "attach_relu_activation_hooks",
    "attach_relu_gradient_flow_hooks",
    "attach_saturated_activation_hooks",
    "build_extractor",
]

HookBuilder: TypeAlias = Callable[[str, ComponentContext], Callable[[Any, tuple[Any, ...], Any], None] | None]
"""Makes the forward hook ``(module, args, output)`` of a component; None attaches nothing."""

BackwardHookBuilder: TypeAlias = Callable[
    [str, ComponentContext], Callable[[Any, tuple[Any, ...], tuple[Any, ...]], None] | None
]
"""Makes the backward hook ``(module, grad_input, grad_output)`` of a component; None attaches nothing."""

ComponentHookSpec: TypeAlias = tuple[str, HookBuilder]
"""The name of a component, and what makes its forward hook."""

ComponentBackwardHookSpec: TypeAlias = tuple[str, BackwardHookBuilder]
"""The name of a component, and what makes its backward hook."""

TRACKERS: Final[dict[str, type]] = {
    "relu_activation_state": ReLUActivationState,
    "fisher_information_state": FisherInformationState,
    "saturated_activation_state_tanh": SaturatedActivationState,
    "saturated_activation_state_sigmoid": SaturatedActivationState,
    "gradient_flow_state": GradientFlowState,
    "relu_gradient_flow_state": ReLUGradientFlowState,
}
"""What is kept where in ``context.model_metrics``, in the order it is reported."""

Phases: TypeAlias = str | Iterable[str]


def attach_relu_activation_hooks(
    *, extractor: Any = "actor_hidden", unit_dim: int | None = None, during: Phases = "train"
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
    UnitOptions(unit_dim)
    phases = checked_phases(during)

    def builder(component: str, context: ComponentContext) -> ActivationHook | None:
        state = _state(context, "relu_activation_state", ReLUActivationState)
        extract = _extractor(component, extractor)
        if extract is None:
            return None
        state.register_component(component, unit_dim=unit_dim, extractor=mark_of(extract))
        return ActivationHook(state, component, extract, phases)

    return builder


def attach_saturated_activation_hooks(
    *,
    activation: str = "tanh",
    saturation_threshold: float = 0.95,
    extractor: Any = "critic_1",
    unit_dim: int | None = None,
    during: Phases = "train",
) -> HookBuilder:
    """Make a builder of forward hooks that count how often each unit of a component is saturated.

    Recipe::

        tool.add_training_hook("critic_head", hookline.metta.attach_saturated_activation_hooks(activation="tanh"))
        ...
        context.model_metrics["saturated_activation_state_tanh"].to_metrics()

    Args:
        activation: ``"tanh"`` or ``"sigmoid"``: what the component's output has passed.
        saturation_threshold: From where on it is saturated, strictly between 0 and 1, for a sigmoid above 0.5; kept by
            component.
        extractor: Which tensor of the output (see `build_extractor`); an output that is a tensor is taken itself.
        unit_dim: The dimension of the units, if not the usual one (see `ReLUActivationState`).
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    SaturatedActivationState(activation, saturation_threshold, unit_dim=unit_dim)  # checks them
    phases = checked_phases(during)

    def builder(component: str, context: ComponentContext) -> ActivationHook | None:
        key = f"saturated_activation_state_{activation}"
        found = context.model_metrics.get(key)
        if not isinstance(found, SaturatedActivationState) or found.activation != activation:
            found = context.model_metrics[key] = SaturatedActivationState(activation, saturation_threshold)
        extract = _extractor(component, extractor)
        if extract is None:
            return None
        found.register_component(
            component, saturation_threshold=saturation_threshold, unit_dim=unit_dim, extractor=mark_of(extract)
        )
        return ActivationHook(found, component, extract, phases)

    return builder


def attach_fisher_information_hooks(*, beta: float = 0.95, during: Phases = "train") -> BackwardHookBuilder:
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
        beta: The share of what was that stays at each update; at least 0, less than 1; kept by component.
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    BlendOptions(beta=beta)
    phases = checked_phases(during)

    def builder(component: str, context: ComponentContext) -> FisherHook:
        state = _state(context, "fisher_information_state", FisherInformationState, beta=beta)
        state.register_component(component, beta=beta)
        return FisherHook(state, component, phases)

    return builder


def attach_gradient_flow_hooks(
    *, beta: float = 0.95, unit_dim: int | None = None, during: Phases = "train"
) -> BackwardHookBuilder:
    """Make a builder of backward hooks that keep a running mean of the size of the gradient at each unit.

    Recipe::

        tool.add_training_backward_hook("actor_mlp", hookline.metta.attach_gradient_flow_hooks())
        ...
        context.model_metrics["gradient_flow_state"].to_metrics()  # "gradient_flow/actor_mlp/unit_0": 0.01, …

    It looks at the gradient of the component's first output, ``grad_output[0]``.

    Args:
        beta: The share of what was that stays at each update; at least 0, less than 1; kept by component.
        unit_dim: The dimension of the units, if not the usual one (see `ReLUActivationState`).
        during: In which phases of a run to count: ``"train"``, ``"eval"``, ``"intervention"``, or several of them.
    """
    BlendOptions(unit_dim=unit_dim, beta=beta)
    phases = checked_phases(during)

    def builder(component: str, context: ComponentContext) -> GradientFlowHook:
        state = _state(context, "gradient_flow_state", GradientFlowState, beta=beta)
        state.register_component(component, beta=beta, unit_dim=unit_dim)
        return GradientFlowHook(state, component, phases)

    return builder


def attach_relu_gradient_flow_hooks(*, unit_dim: int | None = None, during: Phases = "train") -> BackwardHookBuilder:
    """Make a builder of backward hooks that count how often a gradient comes out of each unit of a ReLU.

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
    UnitOptions(unit_dim)
    phases = checked_phases(during)

    def builder(component: str, context: ComponentContext) -> ReLUGradientFlowHook:
        state = _state(context, "relu_gradient_flow_state", ReLUGradientFlowState)
        state.register_component(component, unit_dim=unit_dim)
        return ReLUGradientFlowHook(state, component, phases)

    return builder


StateT = TypeVar("StateT")


def _state(context: ComponentContext, key: str, kind: type[StateT], **options: Any) -> StateT:
    """The tracker of that kind in the context; put there if there is none, or something else."""
    found = context.model_metrics.get(key)
    if not isinstance(found, kind):
        found = context.model_metrics[key] = kind(**options)
    return found


def _extractor(component: str, spec: Any) -> Extractor | None:
    extract = build_extractor(spec)
    if extract is None:
        warnings.warn(
            f"Component {component!r} is not tracked: extractor= is a function or the key of a tensor in its output, "
            f"got {spec!r}.",
            HooklineWarning,
            stacklevel=3,
        )
    return extract
