"""Give a model named components that take hooks, and keep the trackers of a run.

`PolicyAutoBuilder` attaches hooks to modules by component name; `TrainTool` calls it. `ComponentContext` holds the
trackers for builders and `StatsReporter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline.errors import NoMatchError, OptionError
from hookline.messages import nearest_names, type_name
from hookline.sites.attach import attach
from hookline.sites.signature import hook_name
from hookline.sites.wrappers import clean_modules, unwrap

__all__ = ["AttachesItself", "ComponentContext", "PolicyAutoBuilder"]


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


@runtime_checkable
class AttachesItself(Protocol):
    """A hook that attaches itself elsewhere than to the component's own call."""

    def attach_to(self, model: nn.Module, module: nn.Module) -> RemovableHandle:
        """Attach it to ``module``, a part of ``model``; the handle removes it."""


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

        By then its parameters have their gradients, also in a first layer; what the hook returns is ignored. A hook
        that has ``attach_to(model, module)`` attaches itself by that.

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
        if kind == "backward" and isinstance(hook, AttachesItself):
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
