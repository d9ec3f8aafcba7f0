"""What is left of a hook in a compiled graph: operators that look the hook up when the graph runs.

The compiler cannot look into them, so the Python behind them may do anything, and it may not drop them, because they
are declared to have side effects. Each is given the key of a `ModuleHooks`, a tensor and no number, so that twelve
blocks of one model share one graph; what is in the table counts at that moment, so removal takes effect at once.

``begin``  a model's forward begins; whether with gradients on, which the graph itself cannot see when it runs
``fire``   observers of a forward: the structure as a text (`layout`), the tensors beside it (each further argument
           costs half a microsecond a call, so numbers, which are rare, have an operator of their own)
``count``  a hook that edits, and is therefore part of the graph itself, has run
``sink``   a summary that the graph has made for a hook, in the forward or the backward
``sinks``  many of them in one call: on an H200 each ``sink`` takes 95 µs of the host, next to a launch of 9 µs
``enter``, ``leave``  the gradients of one call are to be watched (`wiring`); gone from the graph once it is traced
``note``   notes, in the forward, whose call this is; what it gives back goes with the gradients
``grads``, ``edit``  gradient hooks that watch, or may return gradients; each takes in what the one before gave out,
           because without a reason the compiler keeps no order

Two calls with the same arguments would be taken for one, so each has a serial number in its graph.

An operator is shown memory that the compiled program uses again, so hooks are handed copies. A gradient may be edited
behind an operator because nothing differentiates a compiled backward; ``edit`` refuses where something would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.sites import _torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BEGIN",
    "COUNT",
    "EDIT",
    "ENTER",
    "FIRE",
    "FIRE_WITH",
    "GRADS",
    "LEAVE",
    "NOTE",
    "SINK",
    "SINKS",
    "behind",
    "while_tracing",
]

_LIBRARY: Final[Any] = torch.library.Library("hookline", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS: Final = {
    "begin": "(Tensor key, int serial, bool gradients) -> Tensor",
    "fire": "(Tensor key, str what, Tensor[] tensors) -> ()",
    "fire_with": "(Tensor key, str what, Tensor[] tensors, SymInt[] numbers, Tensor[] reals) -> ()",
    "count": "(Tensor key, str what) -> ()",
    "sink": "(Tensor key, str what, Tensor[] found, int each) -> ()",
    "sinks": "(Tensor[] keys, str what, Tensor[] found, int[] numbers, int[] each) -> ()",
    "enter": "(Tensor key, str plan, Tensor[] tensors) -> Tensor[]",
    "leave": "(Tensor key, str plan, Tensor[] tensors) -> Tensor[]",
    "note": "(Tensor key, int serial) -> Tensor",
    "grads": "(Tensor key, Tensor note, str what, Tensor? after, Tensor[] tensors) -> Tensor",
    "edit": "(Tensor key, Tensor note, str what, Tensor? after, Tensor[] tensors) -> Tensor[]",
}


def _define(name: str) -> Any:
    # A CUDA graph would record the call once and never make it again.
    _LIBRARY.define(name + _SCHEMAS[name], tags=(torch.Tag.cudagraph_unsafe,))
    op: Any = getattr(torch.ops.hookline, name).default
    torch.fx.node.has_side_effect(op)
    return op


BEGIN: Final = _define("begin")
FIRE: Final = _define("fire")
FIRE_WITH: Final = _define("fire_with")
COUNT: Final = _define("count")
SINK: Final = _define("sink")
SINKS: Final = _define("sinks")
ENTER: Final = _define("enter")
LEAVE: Final = _define("leave")
NOTE: Final = _define("note")
GRADS: Final = _define("grads")
EDIT: Final = _define("edit")


def behind(op: Any, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what runs behind an operator; ``fake`` says what comes back in a dry run."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = op.name().partition("::")[2]

        def run(*args: Any) -> Any:
            # Here, and not below autograd like other operators, so that a hook may differentiate what it likes.
            return _torch.below_autograd(op, args) if _torch.is_tracing() else function(*args)

        _LIBRARY.impl(name, run, "Autograd")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hookline::{name}", fake, lib=_LIBRARY)
        return function

    return register


def while_tracing(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what an operator does where autograd records: in the dry runs behind the compiler's front."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = op.name().partition("::")[2]
        _LIBRARY.impl(name, function, "Autograd")
        _LIBRARY.impl(name, _hand_back, "CompositeExplicitAutograd")
        return function

    return register


def _hand_back(key: Tensor, plan: str, tensors: list[Tensor]) -> list[Tensor]:
    return list(tensors)
