"""Watch the gradients of a compiled call, with the wiring of an eager one, while the compiler traces.

After the Python of a model, the compiler traces the graph of its operators: it runs that with fake tensors, and lets
autograd record it, to learn what the backward is. There `_enter` and `_leave` watch the call as an eager one is watched
(`GradientCall`, head of ``gradients``). Autograd comes by with fake gradients, and what would have been a call of the
hooks becomes an operator in the backward graph. So the hooks get the gradients, and the order, of an eager call.

Who calls what:

- ``module_hooks`` asks `plan_of` for the *plan* of a module: what the wiring has to know of its gradient hooks, as a
  text. It is a text because it becomes part of the graph, and the compiler's caches must not mix two plans up.
- ``trace_hooks`` puts `ops.ENTER` and `ops.LEAVE` (``op_schemas``) into the graph; torch calls `_enter` and `_leave`
  for these. ``trace_hooks`` writes the three fields that both read (plan, places, names).
- ``op_runtime`` runs the operators that `_TracedCall` puts into the backward. It reads their texts by `What`, and that
  of a summary in ``op_runtime._receiving``. Change both ends of a text together, and raise `_VERSION`: graphs on the
  disk hold it.

The head of ``op_schemas`` explains the operators, a *key* (a tensor that stands for the `ModuleHooks` of a module) and
a *summary* (what a graph hands over in place of a tensor).

All here runs on fake tensors, without a module, and must read no values. The wiring sees `_TracedHooks` in the place of
the hooks, which has of `GradientHooks` only what the plan says. All else has the default of the class, without an
error: an attribute that a `GradientCall` reads, and of which the default would be wrong, goes into `plan_of` and
`_TracedHooks`, with a test in tests/sites/compiled. Raise `_VERSION` also if the same plan now means another graph.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.sites import _torch
from hookline.sites.compiled import op_schemas as ops
from hookline.sites.gradients import GradientCall, GradientHooks, end_of
from hookline.sites.hook_at_site import next_order

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.gradients import CallState

GRADIENTS: Final = "gradients "
"""The beginning of the text of a summary of gradients, by which ``op_runtime`` knows one."""

_STANDS_FOR_HOOKS: Final[Any] = (object(),)
"""In place of the hooks of a kind: while tracing, it is only asked whether there are any."""
_CALLS: Final = "hookline_calls"
_SERIAL: Final = "hookline_serial"
_VERSION: Final = "1"
"""Part of the text by which the compiler knows graphs on the disk: raise it when the same plan means another graph.
Digits alone, since each letter in a plan says something about the hooks."""


def plan_of(hooks: GradientHooks) -> str:
    """Return what the wiring has to know of the gradient hooks on a module, as a text; empty if there are none.

    Such as ``"1+3 pa"``: the version, the numbers of summaries, letters. `_TracedHooks` reads all but "a" and "l",
    which ``trace_hooks`` reads. It is a field of the recipe of a `Slot` (``trace_hooks``) and of the texts of
    `ops.ENTER` and `ops.LEAVE`: no "/" and no "|" in it.
    """
    if not hooks.has_gradients:
        return ""
    once = hooks.uses_input_once and bool(hooks.backward)
    summaries = [entry.attachment.summary for entry in hooks.backward_pre if entry.attachment.summary is not None]
    numbers = "".join(f"+{number}" for number in sorted({ops.keep_maker(summary) for summary in summaries}))
    letters = {
        "p": len(summaries) < len(hooks.backward_pre),  # hooks on gradients of outputs that are called
        "b": bool(hooks.backward),
        "o": hooks.edits_outputs,
        "i": hooks.edits_gradients,
        "u": once,  # the inputs are watched, and the module uses its one input once
        "a": once or hooks.edits_gradients,  # inputs go in as aliases
        "l": hooks.begins_late,  # inputs are noted after the call
    }
    return f"{_VERSION}{numbers} {''.join(letter for letter, is_so in letters.items() if is_so)}"


class What:
    """The hooks that an operator in the backward graph runs, and the gradients they get, read from its text.

    `_TracedCall.fire` writes the text, five fields: "pre" or "post", a mask (`_mask`) of the gradients of this kind,
    one of the others, the names of the inputs, the names of the outputs. Change both together, and raise `_VERSION`.
    """

    def __init__(self, text: str) -> None:
        kind, places, more, inputs, outputs = text.split("|")
        self.is_pre = kind == "pre"
        self._places = places
        self._more = more
        self.count = places.count("1")
        """How many gradients of this kind there are."""
        self.names = tuple(inputs.split(",")), tuple(outputs.split(","))
        """Of the inputs and the outputs, for the site."""

    def spread(self, tensors: list[Tensor]) -> tuple[Grads, tuple[Grads, ...]]:
        """Return the gradients as hooks are handed them: those of this kind, and the others."""
        grads = _spread(self._places, tensors[: self.count])
        return grads, () if self.is_pre else (_spread(self._more, tensors[self.count :]),)


class _TracedHooks(GradientHooks):
    """The gradient hooks of a module, as far as a plan describes them."""

    def __init__(self, plan: str) -> None:
        self.summaries = tuple(map(int, plan.partition(" ")[0].split("+")[1:]))
        """The numbers of the summaries that are made of the gradients of outputs."""
        self.fires_pre = "p" in plan
        """Whether there are hooks on these that are called."""
        self.backward_pre = _STANDS_FOR_HOOKS if self.fires_pre or self.summaries else ()
        self.backward = _STANDS_FOR_HOOKS if "b" in plan else ()
        self.has_gradients = True
        self.edits_outputs = "o" in plan
        self.edits_gradients = "i" in plan
        self.uses_input_once = "u" in plan


_traced_hooks: Final = functools.lru_cache(maxsize=None)(_TracedHooks)


class _TracedCall(GradientCall):
    """One call in a graph that is being traced: `GradientCall` wires it, `fire` puts operators into the backward."""

    def __init__(self, hooks: _TracedHooks, key: Tensor, names: str) -> None:
        super().__init__(hooks, None, next_order())
        self._traced_hooks = hooks
        self._key = key
        self._names = names
        self.output_names = ""
        self._note: Any = None
        if hooks.fires_pre or hooks.backward:
            with _torch.never_recomputed():
                self._note = ops.NOTE(key, _serial_on(key))

    def fire(self, entries: tuple[Any, ...], grads: Grads, more: tuple[Grads, ...]) -> Grads:
        if not entries:
            return grads
        if not more:
            self._summarize([grad for grad in grads if grad is not None])
            if not self._traced_hooks.fires_pre:
                return grads
        present = [grad for part in (grads, *more) for grad in part if grad is not None]
        kind = "post" if more else "pre"
        what = f"{kind}|{_mask(grads)}|{_mask(more[0]) if more else ''}|{self._names}|{self.output_names}"
        # Each operator takes in what the one before gave: the compiler would keep no order otherwise.
        end = end_of(_torch.graph_task_id())
        if not (self._hooks.edits_gradients if more else self._hooks.edits_outputs):
            end.latest = ops.GRADS(self._key, self._note, what, end.latest, present)
            return grads
        *edited, end.latest = ops.EDIT(self._key, self._note, what, end.latest, present)
        stream = iter(edited)
        return tuple(None if grad is None else next(stream) for grad in grads)

    def _summarize(self, grads: list[Tensor]) -> None:
        for number in self._traced_hooks.summaries:
            found = ops.MAKERS[number](grads) if number in ops.MAKERS else None
            if found is not None:
                ops.SINK(self._key, f"{GRADIENTS}{number}|{_serial_on(self._key)}", *found)


def _serial_on(key: Tensor) -> int:
    """Return how many operators of this trace have asked: of two equal ones the compiler would keep one."""
    serial: int = getattr(key, _SERIAL, 0)
    setattr(key, _SERIAL, serial + 1)
    return serial


def _mask(grads: Grads) -> str:
    """Return which places have a gradient, in ones and zeros; `_spread` reads it."""
    return "".join("0" if grad is None else "1" for grad in grads)


@ops.while_tracing(ops.ENTER)
def _enter(key: Tensor, text: str, tensors: list[Tensor]) -> list[Tensor]:
    flags, places, names = text.split("|")
    call = _TracedCall(_traced_hooks(flags), key, names)
    args, state = call.enter(_spread(places, tensors), {})
    _calls_on(key).append(state)
    return [tensor for tensor in args if tensor is not None]


@ops.while_tracing(ops.LEAVE)
def _leave(key: Tensor, text: str, tensors: list[Tensor]) -> list[Tensor]:
    flags, places, names = text.split("|")
    calls = _calls_on(key)
    state = calls.pop() if calls else _TracedCall(_traced_hooks(flags), key, "").enter((), {})[1]
    call: Any = state.call
    call.output_names = names
    outputs = _spread(places, tensors)
    passed = call.leave(outputs[0] if len(outputs) == 1 else outputs, state)
    return [passed] if isinstance(passed, Tensor) else [tensor for tensor in passed if tensor is not None]


def _spread(places: str, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return the tensors at the places of a mask, None at the others."""
    stream = iter(tensors)
    return tuple(next(stream) if place == "1" else None for place in places)


def _calls_on(key: Tensor) -> list[CallState]:
    """Return the calls of this key that are under way in this thread, the innermost last.

    The tensor that is the key in a trace keeps them, so they are gone with the trace.
    """
    by_thread: dict[int, list[CallState]] = vars(key).setdefault(_CALLS, {})
    return by_thread.setdefault(threading.get_ident(), [])
