"""Putting a hook on modules: the one verb of this package.

Takes a model, a target and a hook from the user, hands entries to tables and a `HookHandle` back.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from hookline.errors import HooklineWarning, HookSignatureError, NoMatchError, OptionError
from hookline.sites.compiled import op_runtime  # noqa: F401  # runs behind the operators
from hookline.sites.compiled.trace_hooks import call_by_name
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import Attachment, HookAtSite, OrderGroup
from hookline.sites.kinds import MODULE, Kind, SiteType
from hookline.sites.modules.call_context import close_context, open_context
from hookline.sites.modules.module_hooks import LOCK, counter_of, hooks_of_module, sweep
from hookline.sites.modules.registration_hooks import hold_registrations
from hookline.sites.receipt import parameter_versions
from hookline.sites.select import Named, check_model, describe, select, without_scripted
from hookline.sites.signature import changes_in_place, check_hook, hook_name, may_return_value, what_it_reads
from hookline.sites.tensors.parameter_hooks import attach_to_parameters, select_parameters
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.hook_types import Hook, Scope, Sees, Target

__all__ = ["TARGETS", "add_entries", "attach", "attach_to_modules", "is_function", "new_attachment"]

_MISSING: Any = object()
TARGETS: Final = str | list | tuple | set | frozenset | re.Pattern | type
"""What is a target, and cannot be meant for a hook."""


def attach(
    model: nn.Module,
    target: Target | Hook = _MISSING,
    hook: Hook = _MISSING,
    *,
    on: str | Kind = Kind.FORWARD,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    observe: bool = False,
    sees: Sees = "edited",
    name: str | None = None,
    exclude: Target = None,
    strict: bool = True,
    profile: bool = False,
    scope: Scope = "process",
) -> HookHandle:
    """Put a hook on modules of a model.

    Recipe::

        def hook(module, args, output, *, site):
            print(site.name, output.shape)


        with hookline.attach(model, "layers.#.mlp", hook):
            model(x)

    Args:
        model: The model; names are relative to it. ``attach(module, hook)`` hooks the module itself.
        target: A name or glob (``*`` crosses dots, ``#`` is one numeric part), a compiled regular expression
            (matched whole), a module type or a tuple of types to choose from, a module of the model, a predicate
            ``(name, module)``, or a list of these, each of which has to match.
        hook: Called as its kind says (see `Kind`). Where it declares a keyword-only ``site``, it gets one.
        on: The kind of hook: ``forward_pre``, ``forward``, ``backward_pre``, ``backward``,
            ``full_backward``, ``state_dict_pre`` …; with ``param_grad`` the target may also name parameters
            (``"*.bias"``) or be one, and a module stands for all parameters below it.
        prepend: Run before the hooks of ours that are there already.
        with_kwargs: Hand over the keyword arguments of the call as well (forward kinds).
        always_call: Run the forward hook however the call ends, with ``output=None`` if it was cut short.
        observe: Ignore the return value, and run after all edits of the site.
        sees: What an observer is shown: the value ``"edited"`` by other hooks, as downstream will see it, or
            ``"raw"``.
        name: A name for reports; the function's own by default.
        exclude: Modules to leave out, in the same grammar as ``target``.
        strict: Raise if nothing matches; with False, warn and return a handle on nothing.
        profile: Measure what the hook costs, for ``handle.report().cost_us``.
        scope: ``"context"``: fire for calls made in this thread, or asyncio task, alone, whoever else runs the model.

    Raises:
        NoMatchError: (a KeyError) naming the nearest modules.
        KindError, OptionError, TargetError, HookSignatureError, UnhookableError: before anything is attached.
    """
    check_model(model, target)
    place, wanted = _sort_out(target, hook)
    attachment = new_attachment(
        wanted,
        Kind.parse(on),
        prepend=prepend,
        with_kwargs=with_kwargs,
        always_call=always_call,
        observe=observe,
        sees=sees,
        name=name,
        profile=profile,
        scope=scope,
    )
    try:
        if attachment.kind is Kind.PARAM_GRAD:
            return attach_to_parameters(attachment, model, select_parameters(model, place, exclude=exclude))
        return attach_to_modules(attachment, model, without_scripted(select(model, place, exclude=exclude), place))
    except BaseException as error:
        if attachment.context is not None:
            close_context(attachment.context)
        if strict or not isinstance(error, NoMatchError):
            raise
        warnings.warn(str(error), HooklineWarning, stacklevel=2)
        return attach_to_modules(attachment, model, [])


def _sort_out(target: Any, hook: Any) -> tuple[Any, Any]:
    """Target and hook as meant: ``attach(model, hook)`` and ``attach(model, hook=hook)`` have no target."""
    if hook is _MISSING:
        target, hook = None, target
        if hook is _MISSING or isinstance(hook, TARGETS | nn.Module):
            given = "attach(model)" if hook is _MISSING else f"attach(model, {describe(hook)})"
            raise HookSignatureError(f"{given} has no hook; write attach(model, target, hook) or attach(model, hook).")
    elif isinstance(hook, TARGETS) and is_function(target):
        raise HookSignatureError(f"The arguments are swapped: write attach(model, {describe(hook)}, hook).")
    return (None if target is _MISSING else target), hook


def is_function(value: Any) -> bool:
    """Whether it can be called, and is no module or class, so that it may be a hook."""
    return callable(value) and not isinstance(value, type | nn.Module)


def new_attachment(
    hook: Any,
    kind: Kind,
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    observe: bool = False,
    sees: str = "edited",
    name: str | None = None,
    profile: bool = False,
    scope: str = "process",
    site_type: SiteType = MODULE,
    everywhere: bool = False,
) -> Attachment:
    """The attachment that is asked for, on nothing yet, or the error that says what is wrong with it."""
    kind.check_options(with_kwargs=with_kwargs, always_call=always_call, observe=observe)
    if sees not in ("edited", "raw"):
        raise OptionError(f"sees= is 'edited' or 'raw', got {sees!r}.")
    if sees == "raw" and not observe:
        raise OptionError("sees='raw' is for observers: add observe=True, or leave sees= out.")
    if scope not in ("process", "context"):
        raise OptionError(f"scope= is 'process' or 'context', got {scope!r}.")
    if scope == "context" and not kind.is_call:
        raise OptionError(f"scope='context' is about calls: it goes with {_CALLS}, not with {kind.value}.")
    return Attachment(
        hook=hook,
        kind=kind,
        site_type=site_type,
        wants_site=check_hook(hook, kind, site_type=site_type, with_kwargs=with_kwargs),
        name=name or hook_name(hook),
        order_group=OrderGroup.EDIT if not observe else OrderGroup.RAW if sees == "raw" else OrderGroup.OBSERVE,
        prepend=prepend,
        with_kwargs=with_kwargs,
        always_call=always_call,
        profile=profile,
        everywhere=everywhere,
        may_edit=may_return_value(hook),
        reads=what_it_reads(hook, with_kwargs=with_kwargs),
        context=open_context() if scope == "context" else None,
    )


_CALLS = "forward_pre, forward, backward_pre and backward"


def attach_to_modules(attachment: Attachment, model: nn.Module, chosen: list[Named]) -> HookHandle:
    """Attach to all of the chosen modules, or, if one of them refuses, to none."""
    with LOCK:
        sweep()
        handle = HookHandle(attachment)
        try:
            add_entries(attachment, model, chosen)
        except BaseException:
            handle.remove()
            raise
        if attachment.kind.is_registration:
            hold_registrations(attachment)
        return handle


def _prepare_for_compiling(attachment: Attachment, chosen: list[Named]) -> None:
    """A hook that edits a forward becomes part of compiled code, under a name that says where it sits."""
    if (
        not chosen
        or attachment.kind not in (Kind.FORWARD_PRE, Kind.FORWARD)
        or attachment.order_group is not OrderGroup.EDIT
    ):
        return
    if attachment.may_edit or changes_in_place(attachment.hook):
        first = repr(chosen[0][0])
        where = first if len(chosen) == 1 else f"{first} and {len(chosen) - 1} more"
        attachment.by_name = call_by_name(f"{attachment.kind.value} hook {attachment.name!r} on {where}")


def add_entries(attachment: Attachment, model: nn.Module, chosen: list[Named]) -> None:
    """Put an attachment on modules of a model."""
    counter = counter_of(unwrap(model))
    _prepare_for_compiling(attachment, chosen)
    if counter in attachment.counters:
        counter.users -= 1  # it is one user, however often it comes back
    attachment.counters[counter] = None
    if len(chosen) == 1 and not chosen[0][0] and not attachment.everywhere:
        attachment.versions_before = parameter_versions(chosen[0][1])
    for name, module in chosen:
        module_hooks = hooks_of_module(module)
        entry = HookAtSite(attachment, name, module_hooks, counter)
        attachment.entries[entry] = None
        module_hooks.add(entry)
