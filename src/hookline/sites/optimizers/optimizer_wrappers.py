"""Find the optimizer inside wrappers, whose steps are the steps; refuse one that torch can call no hooks on.

Called wherever a user hands an optimizer over (``attach_optimizer``, ``watch``, ``attached``, the loops). Accelerate,
Lightning, DeepSpeed and others keep torch's optimizer in an attribute of theirs. Some of these wrappers are subclasses
of ``torch.optim.Optimizer`` that were never set up as one, so torch has nowhere to keep their hooks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from hookline.errors import UnhookableError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.kinds import OPTIMIZER

_NAMES: Final = ("optimizer", "_optimizer", "optim", "_optim", "base_optimizer", "inner_optimizer", "wrapped_optimizer")
"""Attributes that wrappers keep the inner optimizer in; the first that holds one is taken."""
_DEEPEST: Final = 8
"""More wrappers than that around one optimizer are a ring."""


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers of `optimizer`; `optimizer` itself if there is none inside."""
    found = optimizer
    for _ in range(_DEEPEST):
        inner = _inside(found)
        if inner is None:
            return found
        found = inner
    return optimizer


def takes_hooks(optimizer: Any) -> bool:
    """Return whether torch keeps hooks of every kind for `optimizer`."""
    return isinstance(optimizer, Optimizer) and all(
        map(partial(_torch.takes_optimizer_hooks, optimizer), OPTIMIZER.args)
    )


def _inside(wrapper: Any) -> Any:
    """Return what `wrapper` keeps and hands its steps to; None of an optimizer that makes its steps itself."""
    own = getattr(wrapper, "__dict__", None)
    # A learning-rate scheduler keeps an optimizer too, and an engine of DeepSpeed is a module: both are no optimizer.
    is_optimizer = all(callable(getattr(wrapper, name, None)) for name in ("step", "zero_grad"))
    if own is None or not is_optimizer or isinstance(wrapper, type | nn.Module):
        return None
    is_hooked_itself = takes_hooks(wrapper)
    for name in _NAMES:
        inner = own.get(name)
        if inner is None or inner is wrapper or not (isinstance(inner, Optimizer) or takes_hooks(_inside(inner))):
            continue
        if not is_hooked_itself or (takes_hooks(inner) and _share_hooks(wrapper, inner)):
            return inner
    return None


def _share_hooks(wrapper: Any, inner: Any) -> bool:
    """Return whether both have the same dictionary of hooks: Lightning's wrapper copies its optimizer's attributes."""
    return _torch.optimizer_hooks(wrapper, "step_pre") is _torch.optimizer_hooks(inner, "step_pre")


def checked_optimizer(given: Any) -> Optimizer:
    """Return the optimizer that `given` is or wraps; raise unless torch can call hooks on it."""
    optimizer = unwrap_optimizer(given)
    if not isinstance(optimizer, Optimizer):
        raise UnhookableError(
            f"attach_optimizer takes a torch.optim.Optimizer, got {type_name(given)}.{_optimizer_inside(given)}"
        )
    if not takes_hooks(optimizer):
        raise UnhookableError(
            f"{type(optimizer).__name__} has no place for hooks: it wraps an optimizer without being set up as one "
            f"itself.{_optimizer_inside(given) or ' Pass the optimizer inside it.'}"
        )
    return optimizer


def _optimizer_inside(wrapper: Any) -> str:
    """Return the sentence that names the attribute of `wrapper` with an optimizer in it; nothing if there is none."""
    own = {} if isinstance(wrapper, type) else getattr(wrapper, "__dict__", {})
    names = [name for name, value in own.items() if isinstance(value, Optimizer)]
    return f" Pass the optimizer inside it: its .{names[0]}." if names else ""
