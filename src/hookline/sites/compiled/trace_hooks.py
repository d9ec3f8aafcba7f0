"""Leave operators in the graph while the compiler traces a hook of ours, and editing hooks as they are.

The slots of a module call `run_pre` and `run_post`. Everything in there is traced, so it reads as little as possible:
each attribute it reads becomes a guard. The ``recipe`` of a slot says what is to happen, in order:
"w" for hooks that only watch, which one operator runs all together, "e" for a hook that edits, whose own code becomes
part of the graph, "s" for one that receives a summary, which the graph makes; then what the observers read, the plan
for gradients (`plan_of`), whether the model counts its forwards here, and the numbers of the summaries.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from hookline.errors import HooklineWarning, OptionError
from hookline.sites import _torch
from hookline.sites.compiled import op_schemas as ops
from hookline.sites.compiled.value_layout import Parts, collect, describe, is_record, substitute
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite


class Slot(Protocol):
    """What of a slot is read while the compiler traces (``modules.module_hooks``)."""

    slot: ClassVar[str]
    key: Tensor
    recipe: str
    steps: tuple[HookAtSite | None, ...]


@_torch.constant_while_tracing
def _serial() -> int:
    """Return a number, another for each call of one graph, and the same when the same thing is compiled again."""
    current = _torch.compilation()
    _Serial.at = _Serial.at + 1 if current == _Serial.compilation else 0
    _Serial.compilation = current
    return _Serial.at


class _Serial(threading.local):
    compilation: object = None
    at = 0


@_torch.constant_while_tracing
def _without_operators() -> bool:
    """Return whether nothing of ours may be left in what is being traced.

    An exported program is to run where there are no hooks, and no hookline; under ``torch.vmap`` it is said once.
    """
    if _torch.exporting() or not _torch.vectorizing():
        return _torch.exporting()
    if not _Said.vectorized:
        _Said.vectorized = True
        warnings.warn(
            "A model with hooks is being compiled under torch.vmap: its observers and gradient hooks do not fire "
            "there. Run it without vmap, or eagerly (torch.compiler.disable).",
            HooklineWarning,
            stacklevel=2,
        )
    return True


class _Said:
    vectorized = False


def run_pre(hook: Slot, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Trace the pre-hooks; return the arguments to go on with, if they are others."""
    changed = False
    steps, reads, plan, ticks, numbers = hook.recipe.split("/")
    if ticks and not _without_operators():
        ops.BEGIN(hook.key, _serial(), torch.is_grad_enabled())
    for place, step in enumerate(steps):
        if step == "w":
            _fire(hook, steps, place, reads, args, kwargs, ())
            continue
        if step == "s":
            _summarize(hook, steps, place, numbers, args)
            continue
        entry = hook.steps[place]
        assert entry is not None
        result = _edit(
            hook, steps, place, entry, module, (args, kwargs) if entry.attachment.options.with_kwargs else (args,)
        )
        if result is not None:
            changed = True
            if entry.attachment.options.with_kwargs:
                args, kwargs = result
            else:
                args = result if isinstance(result, tuple) else (result,)
    if plan and torch.is_grad_enabled() and not _without_operators():
        return _enter_gradients(hook, plan, args, kwargs)
    return (args, kwargs) if changed else None


def run_post(hook: Slot, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Trace the forward hooks; return the output to go on with."""
    steps, reads, plan, _, numbers = hook.recipe.split("/")
    for place, step in enumerate(steps):
        if step == "w":
            _fire(hook, steps, place, reads, args, kwargs, (output,))
            continue
        if step == "s":
            _summarize(hook, steps, place, numbers, output)
            continue
        entry = hook.steps[place]
        assert entry is not None
        more = (args, kwargs, output) if entry.attachment.options.with_kwargs else (args, output)
        result = _edit(hook, steps, place, entry, module, more)
        if result is not None:
            output = result
    if plan and torch.is_grad_enabled() and not _without_operators():
        if "l" in plan:
            _enter_gradients(hook, plan, args, kwargs)
        return _leave_gradients(hook, plan, output)
    return output


def _fire(hook: Slot, steps: str, place: int, reads: str, args: Any, kwargs: Any, output: tuple[Any, ...]) -> None:
    if _without_operators():
        return
    parts = Parts()
    if output and "o" not in reads:
        output = (None,)
    layout = describe((args if "a" in reads else (), kwargs if "k" in reads else {}, *output), parts)
    what = f"{_serial()}|{hook.slot}|{steps}|{place}|{'g' if torch.is_grad_enabled() else ''}|{layout}"
    ops.FIRE(hook.key, what, parts.tensors, parts.numbers, parts.reals)


def _summarize(hook: Slot, steps: str, place: int, numbers: str, value: Any) -> None:
    if _without_operators():
        return
    tensors: list[Tensor] = []
    collect(value, tensors)
    found = ops.MAKERS[int(numbers.split(",")[place])](tensors)
    if found is not None:
        ops.SINK(hook.key, f"{_serial()}|{hook.slot}|{steps}|{place}||", *found)


def _edit(hook: Slot, steps: str, place: int, entry: HookAtSite, module: nn.Module, args: tuple[Any, ...]) -> Any:
    if not _without_operators():
        ops.COUNT(hook.key, f"{_serial()}|{hook.slot}|{steps}|{place}||")
    attachment = entry.attachment
    assert attachment.by_name is not None
    if attachment.context is not None:
        _refuse_scoped(attachment.name)
    if attachment.wants_site:
        return attachment.by_name(entry.hook, module, *args, site=Site(entry.name, module, attachment.kind))
    return attachment.by_name(entry.hook, module, *args)


@_torch.constant_while_tracing
def _refuse_scoped(name: str) -> None:
    raise OptionError(
        f"Hook {name!r} edits, and has scope='context': whose call it is, is known only when compiled code runs, and "
        "then the edit is part of it. Use observe=True, leave scope= out, or run that module eagerly "
        "(torch.compiler.disable)."
    )


def _enter_gradients(hook: Slot, plan: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Watch the gradients of the inputs; return the arguments to go on with, if they are others."""
    places, tensors, names = _places(plan, args, kwargs)
    passed = ops.ENTER(hook.key, f"{plan}|{places}|{names}", tensors)
    if "a" not in plan:
        return None
    used: list[None] = []
    return substitute(args, passed, used), substitute(kwargs, passed, used)


def _leave_gradients(hook: Slot, plan: str, output: Any) -> Any:
    """Watch the gradients of the outputs; return the output to go on with."""
    if isinstance(output, tuple | list):
        places, tensors, names = _places(plan, output, {})
    else:
        places, tensors, names = _places(plan, (), {"": output})
    if not tensors:
        return output
    passed = ops.LEAVE(hook.key, f"{plan}|{places}|{names}", tensors)
    return substitute(output, passed, [])


def _places(plan: str, args: Any, kwargs: dict[str, Any]) -> tuple[str, list[Tensor], str]:
    """Return which places gradients will be handed over in, and their names."""
    tensors: list[Tensor] = []
    places = ""
    names: list[str] = []
    for index, value in enumerate(args):
        before = len(tensors)
        collect(value, tensors)
        count = len(tensors) - before
        places += "1" * count if count else "0"
        if "s" in plan:
            names += _names(value, str(index)) or [str(index)]
    for key, value in kwargs.items():
        before = len(tensors)
        collect(value, tensors)
        places += "1" * (len(tensors) - before)
        if "s" in plan:
            names += _names(value, key)
    return places, tensors, ",".join(names)


def _names(value: Any, path: str) -> list[str]:
    if isinstance(value, Tensor):
        return [path]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, tuple | list):
        items = list(enumerate(value))
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif is_record(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [name for key, item in items for name in _names(item, f"{path}.{key}" if path else str(key))]


@functools.lru_cache(maxsize=1024)
def call_by_name(name: str) -> Callable[..., Any]:
    """Return what calls an editing hook, under a name that says which hook it is: the compiler's errors show the stack.

    The same for the same name, so that code compiled with a hook fits when the hook comes back.
    """

    def call(hook: Any, *args: Any, **options: Any) -> Any:
        return hook(*args, **options)

    code: CodeType = call.__code__
    return FunctionType(code.replace(co_name=name, co_qualname=name), globals(), name)
