"""While the compiler traces, put an operator into the graph for each group of observers; trace editing hooks as code.

The *slots* of a module are the objects of ``module_hooks`` that torch calls as its hooks. Those around a call use
`run_pre` and `run_post` while the compiler traces; `new_arguments` is used by eager calls too. Everything in here is
traced, so it reads as little as possible: each attribute it reads becomes a guard of the compiled code. So a slot has
all it is to do in one text, its *recipe*. That has five fields with "/" between them. ``module_hooks._compiled_steps``
writes them, ``ModuleHooks.slot_for`` finds a slot by the first: change all together.

1. a letter for each step, in order: "w" for hooks that only watch, which one operator runs all together, "e" for a hook
   that edits, whose own code becomes part of the graph, "s" for one that receives a summary, which the graph makes;
2. what the observers read: "a" arguments, "k" keyword arguments, "o" output (``signature`` finds that out);
3. the plan for gradients (`plan_of`); its letters "a" and "l" are read here;
4. "t" if a forward of a model begins here;
5. the number of the summary of each step, with commas; empty for the other steps.

``op_runtime._Shown`` reads the six fields of the texts that `_fire`, `_summarize` and `_edit` make; `_enter` and
`_leave` of ``compiled_gradients`` read the three of the texts of `ops.ENTER` and `ops.LEAVE`. Change both ends
together, too. The operators are in ``op_schemas``. Tests of all of it are in tests/sites/compiled.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hookline import tree
from hookline.errors import HookReturnError, OptionError
from hookline.sites import _torch
from hookline.sites.compiled import op_schemas as ops
from hookline.sites.compiled.value_layout import Parts, describe
from hookline.sites.gradients import as_arguments, gradient_places
from hookline.sites.hook_at_site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.module_hooks import Slot


@_torch.constant_while_tracing
def _serial() -> int:
    """Return a number, another for each call of one graph, and the same when the same thing is compiled again.

    Without it the compiler would take two equal calls of an operator for one. It counts from 0 in each compilation, so
    that a graph that is compiled again has the same text, and the compiler's caches match.
    """
    current = _torch.compilation()
    _Serial.at = _Serial.at + 1 if current == _Serial.compilation else 0
    _Serial.compilation = current
    return _Serial.at


class _Serial(threading.local):
    """The last number that `_serial` gave in this thread, and in which compilation."""

    compilation: object = None
    at = 0


def run_pre(hook: Slot, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Trace the pre-hooks; return the arguments to go on with; None where none of them edits."""
    steps, _, plan, ticks, _ = hook.recipe.split("/")
    if ticks and not _torch.exporting():
        ops.BEGIN(hook.key, _serial(), torch.is_grad_enabled())
    args, kwargs = _run_steps(hook, module, (args, kwargs))
    if plan and torch.is_grad_enabled() and not _torch.exporting():
        return _enter_gradients(hook, plan, args, kwargs)
    return (args, kwargs) if "e" in steps else None


def new_arguments(entry: HookAtSite, result: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a pre-hook's return value asks for; eager calls ask too."""
    if not entry.attachment.options.with_kwargs:
        return result if isinstance(result, tuple) else (result,), kwargs
    if isinstance(result, tuple) and len(result) == 2:
        args, named = result
        if isinstance(args, tuple) and isinstance(named, dict):
            return args, named
    found = type(result).__name__
    if isinstance(result, tuple):
        found = f"({', '.join([type(part).__name__ for part in result])})"
    _refuse_arguments(entry.attachment.name, entry.name, found)


@_torch.constant_while_tracing
def _refuse_arguments(hook: str, site: str, found: str) -> NoReturn:
    raise HookReturnError(
        f"forward_pre hook {hook!r} on {site!r} takes kwargs, so it must return None or (new_args, new_kwargs), "
        f"a tuple and a dict, but got {found}."
    )


def run_post(hook: Slot, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Trace the forward hooks; return the output to go on with."""
    plan = hook.recipe.split("/")[2]
    *_, output = _run_steps(hook, module, (args, kwargs, output))
    if plan and torch.is_grad_enabled() and not _torch.exporting():
        if "l" in plan:  # no slot before the call has noted the inputs
            _enter_gradients(hook, plan, args, kwargs)
        return _leave_gradients(hook, plan, output)
    return output


def _run_steps(hook: Slot, module: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Trace the steps of a slot; return the values to go on with.

    ``values`` are arguments and keyword arguments; of forward hooks the output, too.
    """
    steps, reads, _, _, numbers = hook.recipe.split("/")
    for place, step in enumerate(steps):
        if step == "e":
            values = _edit(hook, steps, place, module, values)
        elif _torch.exporting():  # an exported program is to run where there is no hookline
            continue
        elif step == "w":
            _fire(hook, steps, place, reads, *values)
        else:
            _summarize(hook, steps, place, numbers, values[0] if len(values) == 2 else values[2])
    return values


def _fire(hook: Slot, steps: str, place: int, reads: str, args: Any, kwargs: Any, *output: Any) -> None:
    """Put the operator into the graph that runs the observers of a step; hand over only what they read.

    ``place`` is the number of the step in the slot, here and below.
    """
    parts = Parts()
    if output and "o" not in reads:
        output = (None,)
    layout = describe((args if "a" in reads else (), kwargs if "k" in reads else {}, *output), parts)
    what = f"{_serial()}|{hook.slot}|{steps}|{place}|{'g' if torch.is_grad_enabled() else ''}|{layout}"
    ops.FIRE(hook.key, what, parts.tensors, parts.numbers, parts.reals)


def _summarize(hook: Slot, steps: str, place: int, numbers: str, value: Any) -> None:
    """Trace what the summary of a step makes of the tensors in ``value``, and hand that over."""
    tensors = [leaf for _, leaf in tree.leaves(value) if _is_carried(leaf)]
    found = ops.MAKERS[int(numbers.split(",")[place])](tensors)
    if found is not None:
        ops.SINK(hook.key, f"{_serial()}|{hook.slot}|{steps}|{place}||", *found)


def _edit(hook: Slot, steps: str, place: int, module: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Trace the call of a hook that edits; return the values to go on with. An operator counts it as the graph runs."""
    entry = hook.steps[place]
    assert entry is not None
    if not _torch.exporting():
        ops.COUNT(hook.key, f"{_serial()}|{hook.slot}|{steps}|{place}||")
    attachment = entry.attachment
    if attachment.context is not None:
        _refuse_scoped(attachment.name)
    args, kwargs, *output = values
    given = values if attachment.options.with_kwargs else (args, *output)
    if attachment.wants_site:
        result = entry.hook(module, *given, site=Site(entry.name, module, attachment.kind))
    else:
        result = entry.hook(module, *given)
    if result is None:
        return values
    if output:
        return args, kwargs, result
    return new_arguments(entry, result, kwargs)


@_torch.constant_while_tracing
def _refuse_scoped(name: str) -> None:
    raise OptionError(
        f"Hook {name!r} edits, and has scope='context': whose call it is, is known only when compiled code runs, and "
        "then the edit is part of it. Use observe=True, leave scope= out, or run that module eagerly "
        "(torch.compiler.disable)."
    )


def _enter_gradients(hook: Slot, plan: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Watch the gradients of the inputs; return the arguments to go on with, if they are others."""
    places, tensors, names = _places(args, kwargs)
    passed = ops.ENTER(hook.key, f"{plan}|{places}|{names}", tensors)
    return _with_tensors((args, kwargs), iter(passed)) if "a" in plan else None


def _leave_gradients(hook: Slot, plan: str, output: Any) -> Any:
    """Watch the gradients of the outputs; return the output to go on with."""
    places, tensors, names = _places(*as_arguments(output))
    if not tensors:
        return output
    return _with_tensors(output, iter(ops.LEAVE(hook.key, f"{plan}|{places}|{names}", tensors)))


def _places(args: Any, kwargs: Mapping[str, Any]) -> tuple[str, list[Tensor], str]:
    """Return which values are tensors, as ones and zeros; the tensors; and the names of all the values."""
    found = gradient_places(args, kwargs, _is_carried)
    places = "".join(["0" if tensor is None else "1" for _, tensor in found])
    return places, [tensor for _, tensor in found if tensor is not None], ",".join([name for name, _ in found])


def _with_tensors(value: Any, fresh: Iterator[Tensor]) -> Any:
    """Return ``value``, in containers of its own, with ``fresh`` in the place of tensors that an operator was given."""
    if isinstance(value, Tensor):
        return next(fresh) if _is_carried(value) else value
    pairs = tree.children(value)
    if pairs is None:
        return value
    return tree.twin_of(value, {key: _with_tensors(item, fresh) for key, item in pairs})


def _is_carried(leaf: Any) -> bool:
    """Return whether it is a tensor that can be given to an operator of ours as it is."""
    return isinstance(leaf, Tensor) and _torch.local_tensor(leaf) is leaf
