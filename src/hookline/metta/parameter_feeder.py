"""Feed `FisherInformationState`: a hook that sits on the parameters of a component, not on its call.

``builders`` and the analysis ``fisher_information`` make it. A backward hook can only read ``.grad``. Where a component
is called twice in a pass, that is not there yet when the first of the calls is through; where micro-batches are
accumulated, it is the sum of all so far. A hook on the leaf is shown the gradient of each pass, whole and by itself,
just before it is added to ``.grad``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Set
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hookline.errors import TargetError
from hookline.metta.feeders import TrackerFeeder
from hookline.metta.trackers import FisherInformationState
from hookline.phases import Phases
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.site_info import Site
from hookline.sites.tensors.tensor_hooks import attach_tensor
from hookline.sites.wrappers import walk

__all__ = ["ParameterFeeder"]


class ParameterFeeder(TrackerFeeder):
    """Feed a tracker with the gradients of a component's parameters, those of modules below it included.

    Args:
        names: The parameters to count, by their names in the component; all of them if left out.
    """

    tracker: FisherInformationState

    def __init__(self, tracker: Any, component: str, during: Phases, names: Set[str] | None = None) -> None:
        super().__init__(tracker, component, during)
        self.names = names

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """Count the gradients as they are accumulated by now, where it is attached as a plain backward hook."""
        if not self._feeds() or not self._count_backward(module, site):
            return
        for name, owner, key in _parameters(module):
            parameter = owner._parameters[key]
            if parameter is not None and isinstance(parameter.grad, Tensor):
                self._take(name, parameter.grad)

    def attach_to(self, model: nn.Module, module: nn.Module) -> RemovableHandle:
        """Attach it to every parameter of ``module``, and to those that take their place later."""
        return _OnLeaves(self, model, module)

    def take(self, leaf: _Leaf, gradient: Tensor) -> None:
        """Count the gradient of one parameter in one backward pass."""
        if (
            self._feeds()
            and leaf.accumulates()
            and self.during.count_forward(leaf.is_training(), True, _torch.graph_task_id())
        ):
            self._take(leaf.name, gradient)

    def note_without_parameters(self, are_frozen: bool) -> None:
        """Note a call of the component that has no parameter to train."""
        self._note(_no_parameters, are_frozen)

    def _take(self, name: str, gradient: Tensor) -> None:
        self.tracker.update(self.component, f"{self.component}.{name}", gradient)
        self._note(_no_numbers)


class _Leaf:
    """Find one parameter by its name, and hold the handle of the hook on it."""

    __slots__ = ("_handle", "_hook", "_model", "_owner", "key", "name", "seen")

    def __init__(self, hook: ParameterFeeder, model: nn.Module, name: str, owner: nn.Module, key: str) -> None:
        self._hook, self.name, self.key = hook, name, key
        self._model = weakref.ref(model)
        self._owner = weakref.ref(owner)  # a hook on a leaf is invisible to the garbage collector
        self._handle: HookHandle | None = None
        self.seen: int | None = None
        """The id of the parameter that the hook is on."""

    def now(self) -> Tensor | None:
        """Return the parameter that is there by now."""
        owner = self._owner()
        return None if owner is None else owner._parameters.get(self.key)

    def is_training(self) -> bool:
        """Return whether the model is in training mode."""
        model = self._model()
        return model is None or model.training

    def follow(self) -> None:
        """Attach the hook to the parameter that is there by now."""
        parameter = self.now()
        if parameter is None or not parameter.requires_grad or not parameter.is_leaf or is_lazy(parameter):
            return
        # By id: a weak reference would forbid torch.utils.swap_tensors. A new parameter with the id of a deleted one
        # has no hook yet: that went with the other.
        if self.seen == id(parameter) and self._is_on():
            return
        self.remove()
        self._handle = attach_tensor(parameter, functools.partial(self._hook.take, self), observe=True, name=self.name)
        self.seen = id(parameter)

    def _is_on(self) -> bool:
        # As report().attached, for 0.3 µs instead of 5: it is asked for every parameter at every forward.
        return self._handle is not None and self._handle.alive

    def accumulates(self) -> bool:
        """Return whether the gradient goes into ``.grad``: one that ``torch.autograd.grad`` asks for does not."""
        parameter = self.now()
        try:
            return parameter is None or _torch.will_execute(get_gradient_edge(parameter).node)
        except RuntimeError:  # torch raises this in autograd.grad()
            return False

    def remove(self) -> None:
        """Remove the hook from the parameter."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class _OnLeaves(HandleSet):
    """Hold a feeder on the parameters of one module."""

    def __init__(self, hook: ParameterFeeder, model: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self._hook = hook
        self._leaves = [
            _Leaf(hook, model, name, owner, key)
            for name, owner, key in _parameters(module)
            if hook.names is None or name in hook.names
        ]
        # Parameters are looked up before each forward: FSDP, load_state_dict(assign=True) and a plain assignment put
        # others in their place, and lazy ones have no shape until then.
        try:
            self.add(attach(model, module, self._follow, on="forward_pre", observe=True, name="FisherInformationState"))
        except TargetError:  # no part of that model
            self.add(attach(module, self._follow, on="forward_pre", observe=True, name="FisherInformationState"))
        self._follow_all()

    def _follow(self, module: nn.Module, args: Any) -> None:
        self._follow_all()
        if all(leaf.seen is None for leaf in self._leaves):
            self._hook.note_without_parameters(bool(self._leaves))

    def _follow_all(self) -> None:
        for leaf in self._leaves:
            leaf.follow()

    def remove(self, *, quiet: bool = False) -> None:
        """Remove the hook from all parameters."""
        super().remove(quiet=True)  # a module that is never called (nn.ModuleList) may well have gradients
        for leaf in self._leaves:
            leaf.remove()


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield, for every parameter in ``module``, its name without wrappers, its owner, and its key there."""
    seen: set[int] = set()
    for path, owner, *_ in walk(module):
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{path}.{key}" if path else key), owner, key


def _no_parameters(are_frozen: bool) -> str:
    why = "none of its parameters requires a gradient" if are_frozen else "it has no parameters"
    return f"{why}; hook a component that is trained"


def _no_numbers() -> str:
    return "the gradients of its parameters have no real numbers to count; hook a component with floating-point ones"
