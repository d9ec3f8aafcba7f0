"""Give a model named components that take hooks, and make these hooks when a run begins: Metta's ``attach_…_hooks``.

`PolicyAutoBuilder` attaches hooks to modules by component name; `ComponentContext` holds the trackers of a run, for
builders and `StatsReporter`. A builder is called with the name of a component and that context; `TrainTool` calls it
when there is a policy. It puts its tracker into the context if none is there, and returns a feeder: the hook that hands
the tensors of that component to the tracker. No feeder changes anything, and what cannot be
counted (a tuple, a missing key, no gradient) is passed over. Training counts; evaluations and other hooks do not (see
`During`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hookline.errors import HooklineWarning, NoMatchError, OptionError
from hookline.messages import caller_stacklevel, nearest_names, type_name
from hookline.metta.trackers import (
    FisherInformationState,
    GradientFlowState,
    ReLUActivationState,
    ReLUGradientFlowState,
    SaturatedActivationState,
    check_activation,
)
from hookline.phases import During
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.hook_at_site import Site
from hookline.sites.signature import hook_name
from hookline.sites.tensors import attach_tensor
from hookline.sites.wrappers import clean_modules, unwrap, walk


class ComponentContext:
    """Hold what a run shares with its hooks: the trackers, by name.

    Recipe::

        context = hookline.metta.ComponentContext()
        hook = hookline.metta.attach_relu_activation_hooks()("actor_mlp", context)
        context.model_metrics["relu_activation_state"]  # the tracker that the hook feeds
    """

    def __init__(self) -> None:
        self.model_metrics: dict[str, Any] = {}
        """Trackers by key: ``relu_activation_state``, ``fisher_information_state``, …"""

    def __repr__(self) -> str:
        return f"<ComponentContext with {', '.join(self.model_metrics) or 'nothing yet'}>"


class PolicyAutoBuilder(nn.Module):
    """Build a model of named components, each of which takes hooks.

    Recipe::

        policy = hookline.metta.PolicyAutoBuilder(OrderedDict(actor_mlp=nn.Linear(4, 8), head=nn.Linear(8, 2)))
        handle = policy.register_component_hook_rule(component_name="actor_mlp", hook=hook)
        policy(x)  # head(actor_mlp(x))
        handle.remove()

        policy = hookline.metta.PolicyAutoBuilder.of(model)  # any model: its modules by their dotted names

    Args:
        components: Modules by name, in the order they run; they are children of the policy under the same names.
        forward: What a call does, if not one component after the other: ``forward(components, *args, **kwargs)``.
    """

    def __init__(self, components: Mapping[str, nn.Module], *, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._run = forward
        if not isinstance(components, Mapping | nn.ModuleDict):
            raise OptionError(
                f"PolicyAutoBuilder takes modules by name, got {type_name(components)}; for a whole model write "
                "PolicyAutoBuilder.of(model)."
            )
        for name, module in components.items():
            try:
                self.add_module(name, module)
            except (KeyError, TypeError) as error:
                raise OptionError(
                    f"Component {name!r} cannot be added: {error.args[0]}. For modules by their dotted names write "
                    "PolicyAutoBuilder.of(model)."
                ) from None

    @staticmethod
    def of(model: nn.Module) -> PolicyAutoBuilder:
        """Return a policy of any model: its components are all modules, by their dotted names without wrappers.

        The policy has the model as its child ``model`` and calls it; hooks fire whichever of the two is called.
        """
        return _WholeModel(model)

    @property
    def components(self) -> dict[str, nn.Module]:
        """Return the components by name as they are by now: a module replaced in the policy is replaced here too.

        To replace one, set it where it lives: ``policy.head = module``, or in the model.
        """
        return {name: module for name, module in self._modules.items() if module is not None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the components in order, each on the output of the one before; or call ``forward=``."""
        modules = self.components
        if self._run is not None:
            return self._run(modules, *args, **kwargs)
        if not modules:
            raise OptionError("This policy has no components to run: give it some, or a forward=.")
        value: Any = None
        for index, module in enumerate(modules.values()):
            value = module(value) if index else module(*args, **kwargs)
        return value

    def register_component_hook_rule(self, *, component_name: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(module, args, output)`` after each forward of a component; what it returns is ignored.

        Raises:
            NoMatchError: (a KeyError) if there is no such component.
        """
        return self._attach(component_name, hook, "forward")

    def register_component_backward_hook_rule(
        self, *, component_name: str, hook: Callable[..., Any]
    ) -> RemovableHandle:
        """Call ``hook(module, grad_input, grad_output)`` when a backward pass has come through a component.

        By then its parameters have their gradients, also in a first layer; what the hook returns is ignored. A
        `ParameterFeeder` attaches itself to the parameters.

        Raises:
            NoMatchError: (a KeyError) if there is no such component.
        """
        return self._attach(component_name, hook, "backward")

    def _attach(self, name: str, hook: Callable[..., Any], kind: str) -> RemovableHandle:
        module = self.components.get(name)
        if module is None:
            near = nearest_names(str(name), self.components, n=3)
            hint = f" Nearest: {', '.join(map(repr, near))}." if near else ""
            raise NoMatchError(f"Component '{name}' not found in policy.{hint}")
        root = self._root()
        if isinstance(hook, ParameterFeeder) and kind == "backward":
            return hook.attach_to(root, module)
        return attach(root, module, hook, on=kind, observe=True, name=f"{hook_name(hook)} of {name!r}")

    def _root(self) -> nn.Module:
        """Return the module whose forwards count."""
        return self


class _WholeModel(PolicyAutoBuilder):
    """Take all modules of one model as components."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__({})
        self.add_module("model", model)

    @property
    def components(self) -> dict[str, nn.Module]:
        """Return all modules of the model by their dotted names."""
        return {name: module for name, module in clean_modules(self.model) if name}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def _root(self) -> nn.Module:
        return unwrap(self.model)  # it may be called by itself


# -- feeders ----------------------------------------------------------------------------------------------------------


_TRAINING: Final = frozenset({"train"})


class TrackerFeeder:
    """Hand the tensors of one component to a tracker, in the passes that count as training."""

    def __init__(self, tracker: Any, component: str) -> None:
        self.tracker, self.component = tracker, component
        self.has_fed = False
        """Whether there was anything to hand on."""
        self._during = During(_TRAINING, partial(tracker.forget_counts, component))
        self.__qualname__ = type(tracker).__name__  # its name in reports

    def release(self) -> None:
        """Let another hook take its place: this one is off."""
        self.tracker.end_feeding(self.component)

    def _feed(self, *what: Any) -> None:
        self.has_fed = True
        self.tracker.update(self.component, *what)


class ActivationFeeder(TrackerFeeder):
    """Feed a tracker with the output of a component, of which ``extract`` takes a tensor."""

    def __init__(self, tracker: Any, component: str, extract: Callable[[Any], Any]) -> None:
        super().__init__(tracker, component)
        self.extract = extract

    def __call__(self, module: nn.Module, args: Any, output: Any, *, site: Site | None = None) -> None:
        """Count ``output``, as a forward hook; not again where activation checkpointing repeats the forward."""
        if site is None:
            counts = self._during.count_forward(module.training, torch.is_grad_enabled(), object())
        else:
            counts = not site.recompute and self._during.count_forward(site.training, site.gradients, site.step)
        tensor = self.extract(output) if counts else None
        if isinstance(tensor, Tensor):
            self._feed(tensor)


class GradientFeeder(TrackerFeeder):
    """Feed a tracker with the gradient of a component's first output, or with ``of_input`` of its first input."""

    def __init__(self, tracker: Any, component: str, *, of_input: bool = False) -> None:
        super().__init__(tracker, component)
        self.of_input = of_input

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """Count the gradient, as a backward hook."""
        grads = grad_input if self.of_input else grad_output
        grad = grads[0] if isinstance(grads, tuple) and grads else grads
        training = module.training if site is None else site.training
        if isinstance(grad, Tensor) and self._during.count_forward(training, True, object()):
            # One dimension is one sample; to the tracker it would be ready sizes, which are not negative.
            self._feed(grad.detach().abs() if grad.dim() == 1 else grad)


class ParameterFeeder(TrackerFeeder):
    """Feed a tracker with the gradients of a component's parameters, those of modules below it included.

    A backward hook can only read ``.grad``. Where a component is called twice in a pass, that is not there yet when the
    first of the calls is through; where micro-batches are accumulated, it is the sum of all so far. So it attaches
    itself to the parameters: a hook on the leaf is shown the gradient of each pass, whole and by itself.

    Args:
        tracker: What the hook feeds.
        component: The name it does so under.
    """

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """Count the gradients as they are accumulated by now, where it is attached as a plain backward hook."""
        for name, owner, key in parameters_in(module):
            parameter = owner._parameters[key]
            if parameter is not None and isinstance(parameter.grad, Tensor):
                self.take(name, parameter.grad, training=module.training if site is None else site.training)

    def attach_to(self, model: nn.Module, module: nn.Module) -> RemovableHandle:
        """Attach it to every parameter of ``module``, and to those that take their place later."""
        return _OnLeaves(self, model, module)

    def take(self, name: str, gradient: Tensor, *, training: bool) -> None:
        """Count the gradient of the parameter ``name`` in the backward pass that is running."""
        if self._during.count_forward(training, True, _torch.graph_task_id()):
            self._feed(f"{self.component}.{name}", gradient)


class _OnLeaves(HandleSet):
    """Hold a feeder on the parameters of one module, and on those that take their place."""

    def __init__(self, feeder: ParameterFeeder, model: nn.Module, module: nn.Module) -> None:
        super().__init__()
        # Weak: a hook on a leaf is invisible to the garbage collector.
        self._feeder, self._model = feeder, weakref.ref(model)
        self._places = {name: (weakref.ref(owner), key) for name, owner, key in parameters_in(module)}
        self._hooked: dict[str, tuple[int, HookHandle]] = {}
        """By name: the id of the parameter that has the hook, and its handle."""
        # Parameters are looked up before each forward: FSDP, load_state_dict(assign=True) and a plain assignment put
        # others in their place, and lazy ones have no shape until then.
        self.add(attach(model, module, self._follow, on="forward_pre", observe=True, name="FisherInformationState"))
        self._follow(module, ())

    def _follow(self, module: nn.Module, args: Any) -> None:
        for name in self._places:
            parameter = self._parameter(name)
            if parameter is None or not parameter.requires_grad or not parameter.is_leaf or is_lazy(parameter):
                continue
            # By id: a weak reference would forbid torch.utils.swap_tensors. A new parameter with the id of a deleted
            # one has no hook yet: that went with the other.
            before = self._hooked.get(name)
            hooks = (getattr(hook, "attachment", None) for hook in _torch.tensor_hooks_of(parameter))
            orders = [getattr(attachment, "order", None) for attachment in hooks]
            if before is None or before[0] != id(parameter) or before[1].id not in orders:
                if before is not None:
                    before[1].remove()
                handle = attach_tensor(parameter, partial(self._take, name), observe=True, name=name)
                self._hooked[name] = id(parameter), handle

    def _parameter(self, name: str) -> Tensor | None:
        owner, key = self._places[name]
        module = owner()
        return None if module is None else module._parameters.get(key)

    def _take(self, name: str, gradient: Tensor) -> None:
        parameter, model = self._parameter(name), self._model()
        if parameter is None or _accumulates(parameter):
            self._feeder.take(name, gradient, training=model is None or model.training)

    def remove(self, *, quiet: bool = False) -> None:
        """Remove the hook from all parameters."""
        super().remove(quiet=True)  # a module that is never called (nn.ModuleList) may well have gradients
        for _, handle in self._hooked.values():
            handle.remove()


def _accumulates(parameter: Tensor) -> bool:
    """Return whether the gradient goes into ``.grad``: one that ``torch.autograd.grad`` asks for does not."""
    try:
        return _torch.will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch raises this in autograd.grad()
        return False


def parameters_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield, for every parameter in ``module``, its name without wrappers, its owner, and its key there."""
    seen: set[int] = set()
    for path, owner, *_ in walk(module):
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{path}.{key}" if path else key), owner, key


# -- builders ---------------------------------------------------------------------------------------------------------

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


def attach_relu_activation_hooks(*, extractor: Any = "actor_hidden") -> HookBuilder:
    """Make a builder of forward hooks that count how often each unit of a component is above zero.

    Recipe::

        tool.add_training_hook("actor_mlp", hookline.metta.attach_relu_activation_hooks())
        ...
        context.model_metrics["relu_activation_state"].to_metrics()  # "activations/relu/actor_mlp/0": 0.53, …

    Args:
        extractor: Which tensor of the output (see `build_extractor`); an output that is a tensor is taken itself.
    """
    return _builder("relu_activation_state", _activation_feeder(extractor))


def attach_saturated_activation_hooks(
    *, activation: str = "tanh", saturation_threshold: float = 0.95, extractor: Any = "critic_1"
) -> HookBuilder:
    """Make a builder of forward hooks that count how often each unit of a component is saturated.

    Recipe::

        tool.add_training_hook("critic_head", hookline.metta.attach_saturated_activation_hooks(activation="tanh"))
        ...
        context.model_metrics["saturated_activation_state_tanh"].to_metrics()

    Args:
        activation: ``"tanh"`` or ``"sigmoid"``: the activation behind the component's output.
        saturation_threshold: Where saturation begins, strictly between 0 and 1, for a sigmoid above 0.5.
        extractor: Which tensor of the output (see `build_extractor`); an output that is a tensor is taken itself.
    """
    check_activation(activation)
    return _builder(
        f"saturated_activation_state_{activation}",
        _activation_feeder(extractor),
        activation=activation,
        saturation_threshold=saturation_threshold,
    )


def attach_fisher_information_hooks(*, beta: float = 0.95) -> BackwardHookBuilder:
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
        beta: The share of the old mean that stays at each update; at least 0, less than 1.
    """
    return _builder("fisher_information_state", ParameterFeeder, beta=beta)


def attach_gradient_flow_hooks(*, beta: float = 0.95) -> BackwardHookBuilder:
    """Make a builder of backward hooks that keep a running mean of the size of the gradient at each unit.

    Recipe::

        tool.add_training_backward_hook("actor_mlp", hookline.metta.attach_gradient_flow_hooks())
        ...
        context.model_metrics["gradient_flow_state"].to_metrics()  # "gradient_flow/actor_mlp/unit_0": 0.01, …

    It looks at the gradient of the component's first output, ``grad_output[0]``.

    Args:
        beta: The share of the old mean that stays at each update; at least 0, less than 1.
    """
    return _builder("gradient_flow_state", GradientFeeder, beta=beta)


def attach_relu_gradient_flow_hooks() -> BackwardHookBuilder:
    """Make a builder of backward hooks that count how often a gradient leaves each unit of a ReLU.

    Recipe::

        tool.add_training_backward_hook("actor_relu", hookline.metta.attach_relu_gradient_flow_hooks())
        ...
        context.model_metrics["relu_gradient_flow_state"].to_metrics()  # "gradient_flow/relu/actor_relu/0": 0.5, …

    It looks at the gradient of the component's first input, ``grad_input[0]``; a component whose input needs no
    gradient (a first layer) has none.
    """
    return _builder("relu_gradient_flow_state", partial(GradientFeeder, of_input=True))


def _builder(key: str, feeder: Callable[..., Any], **options: Any) -> Callable[[str, ComponentContext], Any]:
    """Return a builder of hooks that feed the tracker under ``key``; for a component that has one it returns None."""
    kind = TRACKERS[key]
    kind(**options)  # checks them

    def builder(component: str, context: ComponentContext) -> Any:
        tracker: Any = context.model_metrics.get(key)
        if not isinstance(tracker, kind):
            tracker = context.model_metrics[key] = kind(**options)
        hook = feeder(tracker, component)
        if hook is None or not tracker.begin_feeding(component):
            return None
        tracker.register_component(component)
        return hook

    return builder


def _activation_feeder(spec: Any) -> Callable[..., ActivationFeeder | None]:
    def feeder(tracker: Any, component: str) -> ActivationFeeder | None:
        extract = build_extractor(spec)
        if extract is not None:
            return ActivationFeeder(tracker, component, extract)
        text = f"Component {component!r} is not tracked: extractor= is a function or the key of a tensor in its output"
        warnings.warn(f"{text}, got {spec!r}.", HooklineWarning, stacklevel=caller_stacklevel())
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
        spec: A function, which is used as it is; or a key: it looks into a dict, a TensorDict or whatever else has keys
            and values, and finds nothing (None) if the key is missing, or in other outputs. Keys of nested TensorDicts
            are tuples.
    """
    if callable(spec):
        return cast("Callable[[Any], Any]", spec)
    if isinstance(spec, str) or (isinstance(spec, tuple) and spec and all(isinstance(part, str) for part in spec)):
        return partial(_value_of, spec)
    return None


def _value_of(key: Any, output: Any) -> Tensor | None:
    """Return the tensor under ``key`` in ``output``, or ``output`` itself if it is one; None if there is none."""
    if isinstance(output, Tensor):
        return output
    try:
        found = output[key] if isinstance(output, Mapping) or hasattr(type(output), "keys") else None
    except (LookupError, TypeError, ValueError):
        return None
    return found if isinstance(found, Tensor) else None
