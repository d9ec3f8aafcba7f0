"""Run one call of a function with its hooks around it.

The modes and classes of ``function_mode`` call this. It hands tensors to the hooks and puts back what they return.
Gradients go the way of a module's (`GradientCall`), with this in the place of its `ModuleHooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline import tree
from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.functions.function_site import FunctionSite
from hookline.sites.gradients.backward_call import GradientHooks
from hookline.sites.gradients.call_gradients import GradientCall
from hookline.sites.hook_at_site import NO_MODEL, OrderGroup, next_order
from hookline.sites.kinds import Kind
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from hookline.sites.gradients.call_gradients import CallState
    from hookline.sites.hook_at_site import Attachment, HookAtSite

_EDIT: Final = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs
_Tensors: TypeAlias = tuple[Tensor, ...]
_Args: TypeAlias = tuple[Any, ...]
_Run: TypeAlias = Callable[..., Any]
_Live: TypeAlias = "Callable[[Any], FunctionHooks | None]"


class FunctionHooks(GradientHooks):
    """The live hooks of one function, in the order they run."""

    def __init__(self, name: str, func: Callable[..., Any], entries: Iterable[HookAtSite]) -> None:
        self.name = name
        self.func = func
        ordered = sorted(entries, key=lambda entry: entry.rank)
        by_kind = {kind: tuple(entry for entry in ordered if entry.attachment.kind is kind) for kind in _KINDS}
        self.forward_pre = by_kind[Kind.FORWARD_PRE]
        self.forward = by_kind[Kind.FORWARD]
        self.set_gradient_hooks(by_kind[Kind.BACKWARD_PRE], by_kind[Kind.BACKWARD])
        self.tells_sites = False  # the call itself says what they ask
        # Of several scopes a model's counts the calls.
        self.counter = next((entry.counter for entry in ordered if entry.counter is not NO_MODEL), NO_MODEL)
        parts = name.split(".")
        self._wants_the_tensor = not _ABOUT_THE_TENSOR.isdisjoint(parts)
        """Whether it is about the tensor object, for which no alias can stand in: hooks that edit leave it alone."""
        self._in_place = any(part.endswith("_") and not part.endswith("__") for part in parts)
        self._other_counters = {entry.counter for entry in ordered} - {self.counter}

    def call(self, run: _Run, args: _Args, kwargs: dict[str, Any], live: _Live, *, gradients: bool = True) -> Any:
        """Return the function's result, with its hooks around it; ``run`` is the function itself.

        ``live`` gives the hooks that are on now, if a hook of this call has changed them. Without ``gradients`` those
        are not wired: below autograd there is no graph to be had.
        """
        inputs = tensors_in(args, kwargs)
        fn = self._site(args, kwargs)
        forward = self.forward
        if self.forward_pre:
            edited = _fire(self.forward_pre, fn, inputs, ())
            now = live(self.func)
            forward = () if now is None else now.forward
            if edited is not inputs:
                args, kwargs, inputs = *_rebuilt(args, kwargs, edited), edited
        if gradients and self.edits_gradients and (self._wants_the_tensor or (self._in_place and _overlap(inputs))):
            gradients = False
            _LEFT_ALONE.update(entry.attachment for entry in (*self.backward_pre, *self.backward))
        if not (self.has_gradients and gradients and torch.is_grad_enabled()):
            output = run(*args, **kwargs)
            if forward:
                output = _after(forward, fn, inputs, output)
            fn.let_go()
            if getrefcount(fn) > _OWN_REFERENCES:
                fn.locate()  # somebody keeps it, and may ask when the model no longer runs
            return output
        fn.locate()
        self.calls_seen += 1
        wiring = GradientCall(self, fn, next_order())
        passed, state = wiring.enter(inputs, {})
        if passed is not inputs:
            args, kwargs = _rebuilt(args, kwargs, passed)
        output = run(*args, **kwargs)
        if passed is not inputs:
            output = tree.replace(output, _changed_back(passed, inputs))
        if forward:
            output = _after(forward, fn, inputs, output)
        fn.let_go()  # the graph is going to hold fn, which must not hold the graph
        if self.func is Tensor.__setitem__:
            wiring.leave(inputs[0], state)  # it changes its first argument and returns nothing
            return output
        return _watched(wiring, state, output)

    def _site(self, args: _Args, kwargs: dict[str, Any]) -> FunctionSite:
        fn = FunctionSite(self.name, self.func, _torch.running_module(), self.counter)
        fn.args, fn.kwargs = args, kwargs
        if _torch.graph_task_id() != -1:
            fn.in_backward = True
            fn.recompute = _torch.in_recomputation()
        if self._other_counters:
            fn.also_seen_from(self._other_counters)
        return fn


def _after(entries: tuple[HookAtSite, ...], fn: FunctionSite, inputs: _Tensors, output: Any) -> Any:
    """Run the forward hooks; return the output to go on with."""
    outputs = (output,) if isinstance(output, Tensor) else tensors_in((output,), {})
    due = tuple(entry for entry in entries if not entry.attachment.removed)  # while the function ran, say
    edited = _fire(due, fn, outputs, (inputs,))
    if edited is outputs:
        return output
    if isinstance(output, Tensor):
        return edited[0]
    fresh = iter(edited)
    return tree.replace(output, lambda tensor: next(fresh))


def _own_references() -> int:
    """Return how many references to a local variable this interpreter counts when there is no other."""
    local = object()
    return getrefcount(local)


_OWN_REFERENCES: Final = _own_references()
_KINDS: Final = (Kind.FORWARD_PRE, Kind.FORWARD, Kind.BACKWARD_PRE, Kind.BACKWARD)


_ABOUT_THE_TENSOR: Final = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_"}
    | {"set_", "detach_", "requires_grad_", "register_hook", "retain_grad", "rename_", "data", "__set__", "backward"}
    | {"register_post_accumulate_grad_hook", "share_memory_", "as_subclass", "__deepcopy__"}
)


_LEFT_ALONE: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
"""Gradient hooks that were left out of a call, because one that may edit cannot take part in it."""


def why_left_alone(entry: HookAtSite) -> str | None:
    """Return why a gradient hook was left out of calls; None if it was not."""
    if entry.attachment not in _LEFT_ALONE:
        return None
    return (
        "it is about the tensor itself, or was called in place on tensors that share memory (v += v), where no alias "
        "can stand in for an input; gradients can be watched there, with observe=True, but not edited"
    )


def _overlap(inputs: _Tensors) -> bool:
    """Return whether two of the tensors are one, or views of one: an alias of each would change behind the other's
    back.
    """
    memory = {id(tensor if tensor._base is None else tensor._base) for tensor in inputs}
    return len(memory) < len(inputs)


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> _Tensors:
    """Return every tensor among the arguments, in lists and tuples too, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tree.tensors_of(value)
    return tuple(found)


def _rebuilt(args: _Args, kwargs: dict[str, Any], tensors: _Tensors) -> tuple[_Args, dict[str, Any]]:
    """Return the arguments with other tensors; lists and dicts in them are copied, since they are the caller's."""
    fresh = iter(tensors)
    return tuple(_with(value, fresh) for value in args), {key: _with(value, fresh) for key, value in kwargs.items()}


def _with(value: Any, fresh: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(fresh)
    if isinstance(value, list):
        return [_with(item, fresh) for item in value]
    if isinstance(value, dict):
        return {key: _with(item, fresh) for key, item in value.items()}
    if isinstance(value, tuple):
        return tree.replace(value, lambda tensor: next(fresh))
    return value


def _changed_back(passed: _Tensors, given: _Tensors) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces an alias, which an in-place function returned, by the tensor it was made of."""
    originals = {id(alias): tensor for alias, tensor in zip(passed, given, strict=True) if alias is not tensor}
    return lambda tensor: originals.get(id(tensor), tensor)


def _watched(wiring: GradientCall, state: CallState, output: Any) -> Any:
    """Return the output to go on with, once its gradients are watched.

    A leaf (what a factory makes, with ``requires_grad=True``) has none that comes through the function, and has to
    stay a leaf.
    """
    if isinstance(output, Tensor):
        return output if output.grad_fn is None else wiring.leave(output, state)
    outputs = tensors_in((output,), {})
    if any(tensor.grad_fn is None and tensor.requires_grad for tensor in outputs):
        return output
    passed = wiring.leave(outputs, state)
    if passed is outputs:
        return output
    fresh = iter(passed)
    return tree.replace(output, lambda tensor: next(fresh))


def _fire(
    entries: tuple[HookAtSite, ...], fn: FunctionSite, tensors: _Tensors, before: tuple[_Tensors, ...]
) -> _Tensors:
    """Call hooks with ``before`` and the tensors; return the tensors as edited."""
    for entry in entries:
        entry.fired += 1
        shown = fn.seen_from(entry.counter)
        entry.last_step = shown.step
        if entry.simple:
            result = entry.hook(shown, *before, tensors)
        else:
            result = entry.call(shown, (*before, tensors), _listed(entry, shown))
        if result is not None and entry.attachment.order_group is _EDIT:
            tensors = _checked(result, tensors, entry)
    return tensors


def _listed(entry: HookAtSite, fn: FunctionSite) -> Site | None:
    if not entry.attachment.wants_site:
        return None
    owner: Any = fn.owner
    return Site(fn.name, owner, entry.attachment.kind, fn.call, fn.step, fn.recompute)


def _checked(result: Any, tensors: _Tensors, entry: HookAtSite) -> _Tensors:
    """Return a hook's return value as tensors to go on with."""
    if isinstance(result, Tensor) and len(tensors) == 1:
        return (result,)
    if (
        isinstance(result, tuple | list)
        and len(result) == len(tensors)
        and all(isinstance(item, Tensor) for item in result)
    ):
        return tuple(result)
    wanted = "a tensor" if len(tensors) == 1 else f"a tuple of {len(tensors)} tensors"
    raise HookReturnError(
        f"{entry.attachment.kind.value} hook {entry.attachment.name!r} on {entry.name!r} must return None or {wanted}, "
        f"as it was shown, but got {_received(result, len(tensors))}. With observe=True the return value is ignored."
    )


def _received(result: Any, wanted: int) -> str:
    if not isinstance(result, tuple | list):
        return type_name(result)
    if len(result) != wanted:
        return f"{len(result)} values"
    index, strange = next((index, item) for index, item in enumerate(result) if not isinstance(item, Tensor))
    return f"{type_name(result)} with {'None' if strange is None else type_name(strange)} at {index}"
