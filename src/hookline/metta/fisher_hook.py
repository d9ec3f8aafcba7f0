"""The hook that feeds `FisherInformationState`: it sits on the parameters of a component, not on its call.

A backward hook can only read ``.grad``. Where a component is called twice in a pass, that is not there yet when the
first of the calls is through; where micro-batches are accumulated, it is the sum of all so far. A hook on the leaf is
shown the gradient of each pass, whole and by itself, just before it is added to ``.grad``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hookline.errors import TargetError
from hookline.metta.fisher import FisherInformationState
from hookline.metta.pass_turns import is_first_in_backward
from hookline.metta.tracker_hooks import TrackerHook
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.site_info import Site
from hookline.sites.tensors.tensor_hooks import attach_tensor
from hookline.sites.wrappers import walk

__all__ = ["FisherHook"]


class FisherHook(TrackerHook):
    """Shows a tracker the gradients of a component's parameters, those of modules below it included."""

    tracker: FisherInformationState

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any, *, site: Site | None = None) -> None:
        """A backward hook, for whoever attaches it as one: takes the gradients as they have been accumulated."""
        if not self.during.count_forward(module.training if site is None else site.training, True, object()):
            return
        for name, owner, key in _parameters(module):
            parameter = owner._parameters[key]
            if parameter is not None and isinstance(parameter.grad, Tensor):
                self._take(name, id(parameter), parameter.grad)

    def attach_to(self, model: nn.Module, module: nn.Module) -> RemovableHandle:
        """Put it on every parameter of a module, and on those that come to take their place."""
        return _OnLeaves(self, model, module)

    def take(self, leaf: _Leaf, gradient: Tensor) -> None:
        """One parameter's gradient in one backward pass is there."""
        if leaf.accumulates() and self.during.count_forward(leaf.is_training(), True, _torch.graph_task_id()):
            self._take(leaf.name, leaf.seen, gradient)

    def note_without_parameters(self, are_frozen: bool) -> None:
        """Note that a component was called that has no parameter a gradient could come to."""
        self._note(_no_parameters, are_frozen)

    def _take(self, name: str, leaf: int | None, gradient: Tensor) -> None:
        # With the leaf: policies that share a tracker may have components of the same name.
        if is_first_in_backward(self.tracker, (self.component, name, leaf), self):
            self.tracker.update(self.component, f"{self.component}.{name}", gradient)
            self._note(_no_numbers)


class _Leaf:
    """One parameter by its name: where it is found, and the handle of the hook on what was found there last."""

    __slots__ = ("_handle", "_hook", "_model", "_owner", "key", "name", "seen")

    def __init__(self, hook: FisherHook, model: nn.Module, name: str, owner: nn.Module, key: str) -> None:
        self._hook, self.name, self.key = hook, name, key
        self._model = weakref.ref(model)
        self._owner = weakref.ref(owner)  # a hook on a leaf is invisible to the garbage collector
        self._handle: HookHandle | None = None
        self.seen: int | None = None
        """The id of the parameter that it sits on."""

    def now(self) -> Tensor | None:
        """What is there by now."""
        owner = self._owner()
        return None if owner is None else owner._parameters.get(self.key)

    def is_training(self) -> bool:
        """Return whether the model is in training mode."""
        model = self._model()
        return model is None or model.training

    def follow(self) -> None:
        """Sit on what is there by now."""
        parameter = self.now()
        if parameter is None or not parameter.requires_grad or not parameter.is_leaf or is_lazy(parameter):
            return
        # By id: a weak reference would forbid torch.utils.swap_tensors. One that came to the same id after the death of
        # the other has no hook yet: it has died with that one.
        if self.seen == id(parameter) and self._is_on():
            return
        self.remove()
        self._handle = attach_tensor(parameter, functools.partial(self._hook.take, self), observe=True, name=self.name)
        self.seen = id(parameter)

    def _is_on(self) -> bool:
        # What report().attached says, for 0.3 µs instead of 5: it is asked for every parameter at every forward.
        return self._handle is not None and self._handle.alive

    def accumulates(self) -> bool:
        """Whether the gradient goes into ``.grad``: one that ``torch.autograd.grad`` asks for does not."""
        parameter = self.now()
        try:
            return parameter is None or _torch.will_execute(get_gradient_edge(parameter).node)
        except RuntimeError:  # torch's way of saying that it is in autograd.grad()
            return False

    def remove(self) -> None:
        """Off the parameter."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class _OnLeaves(HandleSet):
    """A Fisher hook on the parameters of one module."""

    def __init__(self, hook: FisherHook, model: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self._hook = hook
        self._leaves = [_Leaf(hook, model, name, owner, key) for name, owner, key in _parameters(module)]
        # Parameters are looked at before each forward: FSDP, load_state_dict(assign=True) and a plain assignment put
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
        """Take it off all parameters."""
        super().remove(quiet=True)  # a module that is never called (nn.ModuleList) may well have gradients
        for leaf in self._leaves:
            leaf.remove()


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every parameter of a module and of those below it: its name without wrappers, its owner, its key there."""
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
