"""Check a hook when it is attached, so that a misfit does not surface in the middle of a run.

``attach.new_attachment`` calls `examine_hook` for every verb, and `check_observe`; ``specs``, ``engines.live_hooks``
and ``runs.build`` call single checks. Many call `hook_name`, ``find`` and ``debug.diagnose`` among others. ``capture``
and ``patch`` write the `HookTraits` of their own hooks, and ``patch`` checks functions as edits by `check_call`. The
names of the arguments of each kind come from `SiteType.args` in ``kinds``. (`hookline.testing.check_hook` is another
function.)

Signature and bytecode are read, and nothing is called. Bytecode differs from one version of Python to the next:
tests/sites/test_signature.py has the cases. Where there is no code to read, the answer is the safe one: the hook may
return a value, changes tensors in place, and reads all. Two answers are guesses by name: `changes_in_place` sees
methods like ``mul_``, but no ``x += 1`` and no helper (compiled code raises where such a change would be lost);
`_GIVE_NONE` takes any ``append`` for one that returns nothing.

The letters of `HookTraits.reads` are written by `what_it_reads`, by ``capture``, by ``patch`` and as the default of
`Attachment.reads` in ``hook_at_site``. ``module_hooks._compiled_steps`` puts them into the recipe of a slot, and
``compiled.trace_hooks`` reads them there: change all together.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Sequence
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hookline.errors import HookSignatureError, OptionError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.kinds import MODULE, Kind, SiteType

if TYPE_CHECKING:
    from hookline.hook_types import Hook


class HookTraits(NamedTuple):
    """What the signature and the bytecode of a hook tell."""

    wants_site: bool
    """Whether it declares a keyword-only ``site``."""
    may_edit: bool
    """Whether a call may return anything but None."""
    reads: str
    """Which of its arguments it reads, in the letters of `what_it_reads`."""
    in_place: bool = False
    """Whether it calls a method that changes a tensor in place."""


def examine_hook(hook: Any, kind: Kind, *, site_type: SiteType = MODULE, with_kwargs: bool = False) -> HookTraits:
    """Check a hook as `check_hook` does, and return whether it declares ``site``, may edit, and what it reads."""
    wants_site = check_hook(hook, kind, site_type=site_type, with_kwargs=with_kwargs)
    reads = what_it_reads(hook, with_kwargs=with_kwargs)
    return HookTraits(wants_site, may_return_value(hook), reads, changes_in_place(hook))


def check_hook(hook: Any, kind: Kind, *, site_type: SiteType = MODULE, with_kwargs: bool = False) -> bool:
    """Raise unless ``hook`` can be called as its kind calls it; tell whether it declares ``site``."""
    if not callable(hook):
        shown = type_name(hook) if isinstance(hook, Tensor) else repr(hook)  # without its numbers
        raise HookSignatureError(f"A hook has to be callable, got {shown}.")
    if _runs_later(_code_of(hook)):
        raise HookSignatureError(
            f"{hook_name(hook)} is async or a generator: a call of it runs nothing, as no code would "
            "await or iterate it. Make it a plain function."
        )
    names = site_type.args[kind]
    if with_kwargs:
        names = (*names[:2], "kwargs", *names[2:])
    return check_call(hook, names, f"cannot be a {kind.value} hook: it is called as hook({', '.join(names)})")


def check_call(function: Any, names: Sequence[str], misfit: str, remedy: str = "") -> bool:
    """Raise unless a function can be called with arguments of these names; tell whether it declares ``site``.

    The error says that the function ``misfit``, why, and what to do about it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False  # some built-ins have none; they are taken at their word
    site = signature.parameters.get("site")
    wants_site = site is not None and site.kind is inspect.Parameter.KEYWORD_ONLY
    try:
        signature.bind(*names, **({"site": None} if wants_site else {}))
    except TypeError as error:
        raise HookSignatureError(f"{hook_name(function)}{signature} {misfit} ({error}). {remedy}".rstrip()) from None
    return wants_site


def check_observe(hook: Any, observe: bool) -> None:
    """Raise for ``observe`` with a hook that has ``is_edit`` (those of ``factories``): it would then do nothing."""
    if observe and getattr(hook, "is_edit", False):
        raise OptionError(
            f"{getattr(hook, '__name__', None) or hook_name(hook)} edits values, and observe=True ignores what a hook "
            "returns, so that it would do nothing. Leave observe out."
        )


def hook_name(hook: Any) -> str:
    """Return a short name for a hook: its function's, or its class's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", None) or type(hook).__name__


def may_return_value(hook: Hook) -> bool:
    """Return whether calling ``hook`` can give anything but None, as far as its bytecode shows.

    A gradient hook that cannot is watched without a single extra node in the graph, so that the sums
    autograd forms keep their order and the run stays the same to the last bit.
    """
    code = _code_of(hook)
    if code is None or _runs_later(code):
        return True
    steps = _instructions(code)
    for index, (before, step) in enumerate(pairwise(steps), 1):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return True
        gives_none = before.opname == "LOAD_CONST" and before.argval is None and not step.is_jump_target
        if step.opname == "RETURN_VALUE" and not gives_none:
            return not (code.co_name == "<lambda>" and _called_last(steps[:index]) in _GIVE_NONE)
    return False


def changes_in_place(hook: Any) -> bool:
    """Return whether the hook's own code calls a method that changes a tensor in place (``mul_``); True if there is no
    code to read.
    """
    code = _code_of(hook)
    return code is None or any(name.endswith("_") and not name.endswith("__") for name in code.co_names)


def what_it_reads(hook: Any, *, with_kwargs: bool) -> str:
    """Return which of arguments ("a"), keyword arguments ("k") and output ("o") a forward hook may look at.

    A compiled call keeps nothing else for it.
    """
    letters = "ako" if with_kwargs else "ao"
    code = _code_of(hook)
    if code is None or isinstance(hook, functools.partial) or code.co_flags & inspect.CO_VARARGS:
        return letters
    if not _SEES_ALL.isdisjoint(code.co_names):
        return letters
    first = 0 if isinstance(hook, FunctionType) else 1  # of a method, self
    names = code.co_varnames[first + 1 : code.co_argcount]  # after the module
    loaded = {step.argval for step in _instructions(code) if "LOAD_FAST" in step.opname}
    # One instruction may load two names.
    loaded = {name for names in loaded for name in (names if isinstance(names, tuple) else (names,))}
    used = loaded | set(code.co_cellvars)  # which functions inside it use
    return "".join(letter for letter, name in zip(letters, names, strict=False) if name in used)


# Names by which a hook can look at all of its arguments.
_SEES_ALL = frozenset({"locals", "vars", "eval", "exec", "_getframe", "currentframe"})


def _runs_later(code: CodeType | None) -> bool:
    """Return whether a call gives a coroutine or a generator, and nothing more."""
    flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return code is not None and bool(code.co_flags & flags)


def _code_of(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    while getattr(hook, "__code__", None) is _torch.IN_MODE:  # in @torch.no_grad(): look at what that wraps
        hook = hook.__wrapped__
    if not isinstance(hook, FunctionType | MethodType):
        hook = inspect.getattr_static(type(hook), "__call__", None)
    if isinstance(hook, MethodType):
        hook = hook.__func__
    return hook.__code__ if isinstance(hook, FunctionType) else None


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return the instructions of a function. Kept, since it takes 50 µs, and each attaching of a hook asks twice."""
    return tuple(dis.get_instructions(code))


_GIVE_NONE = {"append", "appendleft", "discard", "extend", "insert", "print", "put_nowait", "setattr", "update"} | {
    *("debug", "info", "warning")
}
"""What people call in a lambda for its effect: ``lambda module, args, output: seen.append(output)``. No method of a
tensor has one of these names."""


def _called_last(steps: tuple[dis.Instruction, ...]) -> str | None:
    """Return the name of the function whose value a lambda returns; None if it is no plain call.

    A function is pushed together with a second value (its ``self``, or nothing), and its arguments above these. So the
    name of the function is the last one that was pushed when the stack became two high.
    """
    name, depth = None, 0
    for step in steps:
        if "JUMP" in step.opname:
            return None
        effect = dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)
        depth += effect
        if depth == 2 and effect > 0 and isinstance(step.argval, str):
            name = step.argval
    return name if steps and steps[-1].opname.startswith("CALL") and depth == 1 else None
