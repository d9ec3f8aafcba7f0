"""Give a model named components that take hooks, and keep the trackers of a run.

`PolicyAutoBuilder` attaches hooks to modules by component name; `TrainTool` calls it. `ComponentContext` holds the
trackers for builders and `StatsReporter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, Self, runtime_checkable

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookline.errors import NoMatchError, OptionError, TargetError
from hookline.messages import nearest_names, type_name
from hookline.sites.attach import attach
from hookline.sites.signature import hook_name
from hookline.sites.wrappers import clean_modules, submodule, unwrap

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

    model: nn.Module
    """Of a policy that was made by ``of``: the model."""
    _is_whole = False
    _run: Callable[..., Any] | None = None

    def __init__(self, components: Mapping[str, nn.Module], *, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._run = forward
        self._names: list[str] = []
        self._added: dict[str, nn.Module] = {}
        for name, module in _checked(components).items():
            self._adopt(name, module)

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return a policy of any model: its components are all modules, by their dotted names without wrappers.

        The policy has the model as its child ``model`` and calls it; hooks fire whichever of the two is called. In a
        subclass, its own ``__init__`` is not run.
        """
        policy = cls.__new__(cls)  # a subclass may have other arguments
        PolicyAutoBuilder.__init__(policy, {})
        policy._is_whole = True
        policy.add_module("model", model)
        return policy

    @property
    def components(self) -> MutableMapping[str, nn.Module]:
        """Return the components by name, looked up at each use: a module replaced in the policy is replaced here too.

        ``policy.components["head"] = module`` replaces or adds a child; of a policy that was made by ``of``, a module
        of the model. A name that no module of the policy can have is kept for hooks alone.
        """
        if self._is_whole:
            return ModelComponents(self.model, self._added)
        return ChildComponents(self)

    @components.setter
    def components(self, components: Mapping[str, nn.Module]) -> None:
        wanted = _checked(components)
        for name in self._children():
            del self.components[name]
        self._added.clear()
        self.components.update(wanted)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the components in order, each on the output of the one before; or call ``forward=``."""
        if self._is_whole:
            return self.model(*args, **kwargs)
        modules = self._children()
        if self._run is not None:
            return self._run(modules | self._added, *args, **kwargs)
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
        components = dict(self.components)
        module = components.get(name)
        if module is None:
            near = nearest_names(str(name), components, n=3)
            hint = f" Nearest: {', '.join(map(repr, near))}." if near else ""
            raise NoMatchError(f"Component '{name}' not found in policy.{hint}")
        if kind == "backward" and isinstance(hook, AttachesItself):
            return hook.attach_to(self._around(), module)
        label = f"{hook_name(hook)} of {name!r}"
        try:
            return attach(self._around(), module, hook, on=kind, observe=True, name=label)
        except TargetError:  # put into `components` by hand, and no part of the policy
            return attach(module, hook, on=kind, observe=True, name=label)

    def _around(self) -> nn.Module:
        """Return the model whose forwards count: with ``of(model)`` that model, which may be called by itself."""
        return unwrap(self.model) if self._is_whole else self

    def _children(self) -> dict[str, nn.Module]:
        """Return the components that are children, as they are by now; plain, since compiled code runs this."""
        found = [(name, self._modules.get(name)) for name in self._names]  # one that was deleted may come back
        return {name: module for name, module in found if module is not None}

    def _adopt(self, name: str, module: nn.Module) -> None:
        try:
            self.add_module(name, module)
        except (KeyError, TypeError) as error:
            raise OptionError(
                f"A component cannot be called {name!r}: {error.args[0]}. For modules by their dotted names write "
                "PolicyAutoBuilder.of(model)."
            ) from None
        if name not in self._names:
            self._names.append(name)


def _checked(components: Any) -> Mapping[str, nn.Module]:
    if isinstance(components, nn.Module) and not isinstance(components, nn.ModuleDict):
        raise OptionError(
            f"PolicyAutoBuilder takes modules by name, got {type_name(components)}; for a whole model write "
            "PolicyAutoBuilder.of(model)."
        )
    found: dict[Any, Any] = dict(components.items() if hasattr(components, "items") else components)
    for name, module in found.items():
        if not isinstance(module, nn.Module):
            raise OptionError(f"Component {name!r} has to be an nn.Module, got {type_name(module)}.")
    return found


# -- the components of a policy, looked up at each use -----------------------------------------------------------
#
# A module of a policy may be replaced at any time: by ``torch.compile``, LoRA, quantisation, or an assignment. A
# dictionary made once would go on naming the old one.


class Components(MutableMapping[str, nn.Module]):
    """Map names to modules of a policy, and to those added by hand, whose name no module of the policy can have."""

    __slots__ = ("_added",)

    def __init__(self, added: dict[str, nn.Module]) -> None:
        self._added = added

    def _find(self) -> dict[str, nn.Module]:
        """Return the modules that are part of the policy, in order."""
        raise NotImplementedError

    def _put(self, name: str, module: nn.Module) -> bool:
        """Make ``module`` a part of the policy as ``name``; return False if that cannot be."""
        raise NotImplementedError

    def _take_out(self, name: str) -> None:
        raise NotImplementedError

    def __getitem__(self, name: str) -> nn.Module:
        return (self._added | self._find())[name]

    def __setitem__(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise OptionError(f"Component {name!r} has to be an nn.Module, got {type_name(module)}.")
        if self._put(name, module):
            self._added.pop(name, None)
        else:
            self._added[name] = module

    def __delitem__(self, name: str) -> None:
        if name in self._find():
            self._take_out(name)
        else:
            del self._added[name]

    def __iter__(self) -> Iterator[str]:
        found = self._find()
        yield from found
        yield from (name for name in self._added if name not in found)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


class ChildComponents(Components):
    """Map names to children of the policy; children that are no components are left out."""

    __slots__ = ("_policy",)

    def __init__(self, policy: PolicyAutoBuilder) -> None:
        super().__init__(policy._added)
        self._policy = policy

    def _find(self) -> dict[str, nn.Module]:
        return self._policy._children()

    def _put(self, name: str, module: nn.Module) -> bool:
        try:
            self._policy._adopt(name, module)
        except OptionError:  # a dotted name, say: hooks can be put on it, but it is no child
            return False
        return True

    def _take_out(self, name: str) -> None:
        delattr(self._policy, name)
        self._policy._names.remove(name)


class ModelComponents(Components):
    """Map the dotted names of all modules of a model, without wrappers, to the modules."""

    __slots__ = ("_model",)

    def __init__(self, model: nn.Module, added: dict[str, nn.Module]) -> None:
        super().__init__(added)
        self._model = model

    def _find(self) -> dict[str, nn.Module]:
        return {name: module for name, module in clean_modules(self._model) if name}

    def _put(self, name: str, module: nn.Module) -> bool:
        if name not in self._find():
            return False
        path, _, child = name.rpartition(".")
        setattr(submodule(self._model, path), child, module)
        return True

    def _take_out(self, name: str) -> None:
        raise OptionError(f"{name!r} is a module of the model; take it out of the model itself.")
