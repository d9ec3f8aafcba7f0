"""Attach a hook to modules: the verb ``attach``, and what the other verbs share.

Users call `attach`; ``debug``, ``analyses``, ``metta``, ``factories``, ``sglang`` and ``engines`` call it for hooks of
their own. It selects modules (``targets``), makes an `Attachment`, puts one `HookAtSite` on each module and returns a
`HookHandle`. All verbs of ``sites`` make their attachments by `new_attachment`; ``capture``, ``patch``, ``watch`` and
``register_hooks`` put theirs on modules by `attach_to_modules`.

All is checked before the first hook is on, and if one module refuses, none keeps the hook. A new option is a field of
`AttachOptions` and a keyword of `attach` and `AttachKeywords`; if it goes with some kinds only, `KINDS_OF_OPTION` says
which.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack, overload

from torch import nn

from hookline.errors import HookSignatureError, OptionError
from hookline.sites.compiled import op_runtime  # noqa: F401  # its import puts functions behind the operators
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import Attachment, AttachOptions, OrderGroup, PerSiteHook, open_context
from hookline.sites.kinds import KINDS_OF_OPTION, MODULE, Kind, SiteType
from hookline.sites.module_hooks import LOCK, add_entries
from hookline.sites.parameters import attach_to_parameters, select_parameters
from hookline.sites.roles import Layers, with_role
from hookline.sites.signature import HookTraits, check_observe, examine_hook, hook_name
from hookline.sites.targets import Named, check_model, choose, describe, found_by

if TYPE_CHECKING:
    from hookline.hook_types import Hook, Scope, Target
    from hookline.sites.hook_at_site import Attachment

_MISSING: Any = object()
_PLAIN: Final = AttachOptions()
_TRACED: Final = (Kind.FORWARD, Kind.FORWARD_PRE)
_TARGETS: Final = str | list | tuple | set | frozenset | re.Pattern | type
"""Types of targets, which cannot be meant as a hook."""


class AttachKeywords(TypedDict, total=False):
    """The keyword arguments of `attach`, for its overloads."""

    on: str | Kind
    prepend: bool
    with_kwargs: bool
    always_call: bool
    observe: bool
    name: str | None
    exclude: Target
    strict: bool
    scope: Scope
    role: str | None
    layer: Layers


@overload
def attach(model: nn.Module, hook: Hook, /, **options: Unpack[AttachKeywords]) -> HookHandle: ...
@overload
def attach(model: nn.Module, target: Target, hook: Hook, **options: Unpack[AttachKeywords]) -> HookHandle: ...
@overload
def attach(model: nn.Module, target: Target = ..., *, hook: Hook, **options: Unpack[AttachKeywords]) -> HookHandle: ...
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
    name: str | None = None,
    exclude: Target = None,
    strict: bool = True,
    scope: Scope = "process",
    role: str | None = None,
    layer: Layers = None,
) -> HookHandle:
    """Attach a hook to modules of a model.

    Recipe::

        def hook(module, args, output, *, site):
            print(site.name, output.shape)


        with hookline.attach(model, "layers.#.mlp", hook):
            model(x)

    Args:
        model: The model; names are relative to it. ``attach(module, hook)`` hooks the module itself.
        target: A name or glob (``*`` crosses dots, ``#`` is one numeric part), a compiled regular expression
            (matched whole), a module type or a tuple of types to choose from, a module of the model, a predicate
            ``(name, module)``, a role (``"role:resid"``), or a list of these, each of which has to match.
        hook: Called as its kind says (see `Kind`). Where it declares a keyword-only ``site``, it gets one.
        on: The kind of hook: ``forward_pre``, ``forward``, ``backward_pre``, ``backward``,
            ``full_backward``, ``state_dict_pre`` …; with ``param_grad`` the target may also name parameters
            (``"*.bias"``) or be one, and a module stands for all parameters below it.
        prepend: Run before the hooks of ours that are there already.
        with_kwargs: Hand over the keyword arguments of the call as well (forward kinds).
        always_call: Run the forward hook however the call ends, with ``output=None`` if it was cut short.
        observe: Ignore the return value, and run after all edits of the site.
        name: A name for reports; the function's own by default.
        exclude: Modules to leave out, in the same grammar as ``target``.
        strict: Raise if nothing matches; with False, warn and return a handle on nothing.
        scope: ``"context"``: fire for calls made in this thread, or asyncio task, alone, whoever else runs the model.
        role: In place of a target: ``"resid"``, ``"attn"``, ``"mlp"``, ``"embed"``, ``"final_norm"``, ``"unembed"`` or
            ``"router"`` of a language model, as ``hookline.sites.find_roles`` finds them; inside of attention ``"q"``,
            ``"k"``, ``"v"``, ``"pattern"``, ``"z"`` and ``"attn_out"``, by head.
        layer: With ``role``, the number of a block, several, or a slice; -1 is the last.

    Raises:
        NoMatchError: (a KeyError) naming the nearest modules.
        KindError, OptionError, TargetError, HookSignatureError, UnhookableError: before anything is attached.
    """
    if not isinstance(model, nn.Module):
        check_model(model, target)
    place, wanted = _sort_out(target, hook)
    if role is not None or layer is not None:
        place = with_role(place, role, layer=layer)
    kind = on if on is Kind.FORWARD else Kind.parse(on)
    options = AttachOptions(
        prepend=prepend, with_kwargs=with_kwargs, always_call=always_call, observe=observe, name=name, scope=scope
    )
    attachment = new_attachment(wanted, kind, options)
    if kind is Kind.PARAM_GRAD:
        parameters = found_by(lambda: select_parameters(model, place, exclude=exclude), strict=strict)
        return attach_to_parameters(attachment, model, parameters)
    return attach_to_modules(attachment, model, choose(model, place, exclude, strict=strict))


def _sort_out(target: Any, hook: Any) -> tuple[Any, Any]:
    """Return target and hook as meant: ``attach(model, hook)`` and ``attach(model, hook=hook)`` have no target."""
    if hook is _MISSING:
        target, hook = None, target
        if hook is _MISSING or isinstance(hook, _TARGETS | nn.Module):
            given = "attach(model)" if hook is _MISSING else f"attach(model, {describe(hook)})"
            raise HookSignatureError(f"{given} has no hook; write attach(model, target, hook) or attach(model, hook).")
    return (None if target is _MISSING else target), hook


def new_attachment(
    hook: Any,
    kind: Kind,
    options: AttachOptions = _PLAIN,
    *,
    site_type: SiteType = MODULE,
    everywhere: bool = False,
    traits: HookTraits | None = None,
) -> Attachment:
    """Return the attachment that is asked for, on nothing yet; raise if something is wrong with it.

    With ``traits``, hook and options are known to be right: a product gives those of a hook of its own.
    """
    if traits is None:
        _check_options(options, kind)
        check_observe(hook, options.observe)
        traits = examine_hook(hook, kind, site_type=site_type, with_kwargs=options.with_kwargs)
    attachment = Attachment(
        hook=hook,
        kind=kind,
        name=options.name or hook_name(hook),
        options=options,
        order_group=OrderGroup.OBSERVE if options.observe else OrderGroup.EDIT,
        site_type=site_type,
        wants_site=traits.wants_site,
        everywhere=everywhere,
        may_edit=traits.may_edit,
        in_place=traits.in_place,
        is_traced=not options.observe and kind in _TRACED and (traits.may_edit or traits.in_place),
        reads=traits.reads,
    )
    if isinstance(hook, PerSiteHook) and kind is Kind.FORWARD and site_type is MODULE:
        _call_per_site(attachment, hook)
    return attachment


def _check_options(options: AttachOptions, kind: Kind) -> None:
    """Raise an `OptionError` for an option that is wrong, or does not go with ``kind``."""
    for option in KINDS_OF_OPTION:
        if getattr(options, option):
            kind.check_option(option)
    if options.scope not in ("process", "context"):
        raise OptionError(f"scope= is 'process' or 'context', got {options.scope!r}.")
    if options.scope == "context" and not kind.is_call:
        calls = "forward_pre, forward, backward_pre and backward"
        raise OptionError(f"scope='context' is about calls: it goes with {calls}, not with {kind.value}.")


def _call_per_site(attachment: Attachment, hook: PerSiteHook) -> None:
    """Have each site call a function of its own, if the hook has such and gets nothing but arguments and output."""
    options = attachment.options
    if options.with_kwargs or not hook.is_per_site:
        return
    attachment.for_site, attachment.wants_site = hook.for_site, False
    if not (options.always_call or options.scope == "context" or attachment.everywhere):
        attachment.summary = hook.summary


def attach_to_modules(attachment: Attachment, model: nn.Module, chosen: list[Named]) -> HookHandle:
    """Attach to all of the chosen modules, or, if one of them refuses, to none."""
    if attachment.options.scope == "context":
        attachment.context = open_context()
    handle = HookHandle(attachment)
    with LOCK:
        try:
            add_entries(attachment, model, chosen)
        except BaseException:
            handle.remove()
            raise
        return handle
