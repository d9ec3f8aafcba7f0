"""Run one call of a function with its hooks around it.

The modes and classes of ``function_mode`` call this. It hands tensors to the hooks and puts back what they return.
Gradients go the way of a module's (`GradientCall`), with this in the place of its `ModuleHooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline import tree
from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites.functions.function_site import FunctionSite
from hookline.sites.gradients.backward_call import GradientHooks
from hookline.sites.gradients.call_gradients import GradientCall
from hookline.sites.hook_at_site import OrderGroup, next_order
from hookline.sites.kinds import Kind
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from hookline.sites.gradients.call_gradients import CallState
    from hookline.sites.hook_at_site import HookAtSite

_EDIT: Final = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs
_KINDS: Final = (Kind.FORWARD_PRE, Kind.FORWARD, Kind.BACKWARD_PRE, Kind.BACKWARD)
_PLAIN: Final = (type(None), bool, int, float, str)
_Tensors: TypeAlias = tuple[Tensor, ...]
_Live: TypeAlias = "Callable[[Any], FunctionHooks | None]"


class FunctionHooks(GradientHooks):
    """The live hooks of one function, in the order they run."""

    def __init__(self, name: str, func: Callable[..., Any], entries: Iterable[HookAtSite]) -> None:
        self._name = name
        self._func = func
        ordered = sorted(entries, key=lambda entry: entry.rank)
        by_kind = [tuple(entry for entry in ordered if entry.attachment.kind is kind) for kind in _KINDS]
        self._forward_pre, self._forward, backward_pre, backward = by_kind
        self.set_gradient_hooks(backward_pre, backward)
        self.told = ()  # the call itself says what they ask
        self._counters = tuple(dict.fromkeys(entry.counter for entry in ordered))

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], live: _Live) -> Any:
        """Return the function's result, with its hooks around it; ``run`` is the function itself.

        ``live`` gives the hooks of a function as they are now: a hook before the call may change those after it.
        """
        fn = FunctionSite(self._name, self._func, args, kwargs, self._counters)
        given = _tensors_in((*args, *kwargs.values()) if kwargs else args)
        inputs = passed = _fire(self._forward_pre, fn, given, ())
        wiring = GradientCall(self, fn, next_order()) if self.has_gradients and torch.is_grad_enabled() else None
        if wiring is not None:
            passed, state = wiring.enter(inputs, {})
        if passed is not given:
            args, kwargs = _with_tensors((args, kwargs), passed)
        output = run(*args, **kwargs)
        if passed is not inputs:  # an in-place function returns what it was given, an alias
            originals = {id(alias): tensor for alias, tensor in zip(passed, inputs, strict=True)}
            output = tree.replace(output, lambda tensor: originals.get(id(tensor), tensor))
        outputs = (output,) if isinstance(output, Tensor) else _tensors_in((output,))
        now = live(self._func)
        edited = outputs if now is None else _fire(now._forward, fn, outputs, (inputs,))
        fn.let_go()
        if wiring is not None:
            edited = _watch_outputs(wiring, state, edited)
        return output if edited is outputs else _with_tensors(output, edited)


def _tensors_in(values: Iterable[Any]) -> _Tensors:
    """Return every tensor among the arguments, in containers too, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, _PLAIN):
            found += tree.tensors_of(value)
    return tuple(found)


def _with_tensors(value: Any, tensors: _Tensors) -> Any:
    """Return ``value`` with other tensors; lists and dicts in it are copied, since they may be the caller's."""
    fresh = iter(tensors)
    return tree.map_tensors(value, lambda _, tensor: next(fresh))


def _watch_outputs(wiring: GradientCall, state: CallState, outputs: _Tensors) -> _Tensors:
    """Watch the gradients of outputs; return the outputs to go on with.

    A leaf (what a factory makes, with ``requires_grad=True``) has none that comes through the function, and has to
    stay a leaf.
    """
    if any(tensor.grad_fn is None and tensor.requires_grad for tensor in outputs):
        return outputs
    if len(outputs) != 1:
        watched: _Tensors = wiring.leave(outputs, state)
        return watched
    only = wiring.leave(outputs[0], state)
    return outputs if only is outputs[0] else (only,)


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
            result = entry.call(shown, (*before, tensors), _site(entry, shown))
        if result is not None and entry.attachment.order_group is _EDIT:
            tensors = _checked(result, tensors, entry)
    return tensors


def _site(entry: HookAtSite, fn: FunctionSite) -> Site | None:
    if not entry.attachment.wants_site:
        return None
    owner: Any = fn.owner
    return Site(fn.name, owner, entry.attachment.kind, fn.call, fn.step, fn.recompute)


def _checked(result: Any, tensors: _Tensors, entry: HookAtSite) -> _Tensors:
    """Return a hook's return value as tensors to go on with."""
    new = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(new) == len(tensors) and all(isinstance(item, Tensor) for item in new):
        return new
    wanted = "a tensor" if len(tensors) == 1 else f"a tuple of {len(tensors)} tensors"
    items = f" of ({', '.join(type(item).__name__ for item in new)})" if isinstance(result, tuple | list) else ""
    raise HookReturnError(
        f"{entry.attachment.kind.value} hook {entry.attachment.name!r} on {entry.name!r} must return None or {wanted}, "
        f"as it was shown, but got {type_name(result)}{items}. With observe=True the return value is ignored."
    )
