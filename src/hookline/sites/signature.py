"""What a hook can take, checked when it is attached, so that a misfit never surfaces in the middle of a run.

Takes the hook and its kind from ``attach``, hands back whether it wants its site and whether it can edit.
"""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from hookline.errors import HookSignatureError
from hookline.sites.kinds import MODULE, Kind, Subject

if TYPE_CHECKING:
    from hookline.types import Hook

__all__ = ["check_hook", "hook_name", "may_return_value"]


def check_hook(hook: Any, kind: Kind, *, subject: Subject = MODULE, with_kwargs: bool = False) -> bool:
    """Raise unless ``hook`` can be called as its kind calls it; tell whether it declares ``site``."""
    if not callable(hook):
        raise HookSignatureError(f"A hook has to be callable, got {hook!r}.")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return False  # some built-ins have none; they are taken at their word
    wants_site = _declares_site(signature)
    names = _arguments(subject.args[kind], with_kwargs)
    try:
        signature.bind(*names, **({"site": None} if wants_site else {}))
    except TypeError as error:
        raise HookSignatureError(
            f"{hook_name(hook)}{signature} cannot be a {kind.value} hook: it is called as "
            f"hook({', '.join(names)}) ({error})."
        ) from None
    return wants_site


def hook_name(hook: Any) -> str:
    """A short name for a hook: its function's, or its class's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", None) or type(hook).__name__


def may_return_value(hook: Hook) -> bool:
    """Whether calling ``hook`` can give anything but None, as far as its bytecode tells.

    A gradient hook that cannot is watched without a single extra node in the graph, so that the sums
    autograd forms keep their order and the run stays the same to the last bit.
    """
    code = _code_of(hook)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return True
    previous = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE" and not _pushes_none(previous, instruction):
            return True
        previous = instruction
    return False


def _arguments(names: tuple[str, ...], with_kwargs: bool) -> tuple[str, ...]:
    if not with_kwargs:
        return names
    return (*names[:2], "kwargs", *names[2:])


def _declares_site(signature: inspect.Signature) -> bool:
    parameter = signature.parameters.get("site")
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _code_of(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    if not isinstance(hook, FunctionType | MethodType):
        hook = inspect.getattr_static(type(hook), "__call__", None)
    if isinstance(hook, MethodType):
        hook = hook.__func__
    return hook.__code__ if isinstance(hook, FunctionType) else None


def _pushes_none(previous: dis.Instruction | None, instruction: dis.Instruction) -> bool:
    return (
        previous is not None
        and previous.opname == "LOAD_CONST"
        and previous.argval is None
        and not instruction.is_jump_target
    )
