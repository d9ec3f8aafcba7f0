"""Attach a hook to modules: the verb ``attach``, and what the other verbs share; `clip_gradients` and `freeze` by it.

Users call `attach`; ``debug``, ``analyses``, ``metta``, ``factories``, ``sglang`` and ``engines`` call it for hooks of
their own. It selects modules (``targets``), makes an `Attachment` (what one call asked for), puts one `HookAtSite` on
each module (`add_entries` of ``module_hooks``) and returns a `HookHandle`; for ``param_grad``, ``parameters`` does so.
The other verbs of ``sites`` that put on hooks make their attachments by `new_attachment` too; so do ``capture``,
``patch``, ``watch`` and ``specs``, which put theirs on modules by `attach_to_modules`.

All is checked before the first hook is on, and if one module refuses, none keeps the hook: what you add to a verb has
to raise before `add_entries`. A new option is:

- a field of `AttachOptions`, handed over by `attach`, a keyword of `attach` and of `AttachKeywords`; likewise of each
  other verb that takes it (``attach_function``, ``attach_everywhere``, ``attach_optimizer``, ``attach_tensor``,
  ``attach_node``), and a field of `HookSpec`, handed over in ``specs.apply_specs``, if specs may have it;
- if it goes with some kinds only, a row of `KINDS_OF_OPTION` (on or off) or a check in `_check_options` (other values);
- if it changes how a hook is called, what the head of ``hook_at_site`` says;
- a line in ``Args`` of those verbs, in "Options" of docs/tour.md, TAKES of tests/sites/test_kinds.py if it is in
  `KINDS_OF_OPTION`, and a variant in ``_VARIANTS`` of tests/helpers_sites.py if it has a path of its own.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack, overload

import torch
from torch import Tensor, linalg, nn

from hookline.errors import HookSignatureError, OptionError
from hookline.sites.compiled import op_runtime  # noqa: F401  # its import puts functions behind the operators
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.hook_at_site import Attachment, AttachOptions, PerSiteHook, open_context
from hookline.sites.kinds import CALL_KINDS, KINDS_OF_OPTION, MODULE, Kind, SiteType
from hookline.sites.module_hooks import LOCK, add_entries
from hookline.sites.parameters import (
    NamedParameter,
    attach_to_parameters,
    is_below,
    named_parameters,
    select_parameters,
)
from hookline.sites.roles import Layers, with_role
from hookline.sites.signature import HookTraits, check_observe, examine_hook, hook_name
from hookline.sites.targets import Named, check_model, choose, describe, found_by, select

if TYPE_CHECKING:
    from hookline.hook_types import Grads, Hook, Scope, Target

_MISSING: Any = object()
_PLAIN: Final = AttachOptions()
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
        site_type=site_type,
        wants_site=traits.wants_site,
        everywhere=everywhere,
        may_edit=traits.may_edit,
        in_place=traits.in_place,
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
    if options.scope == "context" and kind not in CALL_KINDS:
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
            handle.remove(quiet=True)
            raise
    return handle


# -- gradients that are bounded or dropped: by hooks on parameters and on what modules send to their inputs ------------
# Nothing here reads a number on the host: that would wait for the device at every gradient.


def clip_gradients(
    model: nn.Module, target: Target = None, *, value: float | None = None, norm: float | None = None
) -> HandleSet:
    """Bound the gradients of the named modules, tensor by tensor.

    Recipe::

        with hookline.clip_gradients(model, "layers.#", value=1.0):
            loss.backward()

    Bounded are the ``.grad`` of every parameter of those modules (children included), each time a backward
    has accumulated into it, and the gradient each of those modules sends to its inputs. ``value`` clamps every
    element to ±value; ``norm`` scales a tensor down to that 2-norm if it is above.
    """
    if (value is None) == (norm is None):
        raise OptionError("clip_gradients takes either value= or norm=.")
    bound = value if value is not None else norm
    if not isinstance(bound, int | float) or not bound > 0:
        raise OptionError(f"clip_gradients needs a bound above 0, got {bound!r}.")
    clip = partial(_shrink, bound) if value is None else lambda grad: grad.clamp(-bound, bound)

    def clip_inputs(module: nn.Module, grad_input: Grads, grad_output: Grads) -> Grads:
        return tuple(None if grad is None else clip(grad) for grad in grad_input)

    def clip_parameter(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = grad.coalesce()
            parameter.grad.values().copy_(clip(parameter.grad.values()))
        elif grad is not None:
            grad.copy_(clip(grad))

    on_parameters = _hook_parameters(model, target, clip_parameter, "clip_gradients")
    try:
        on_modules = attach(model, target, clip_inputs, on=Kind.BACKWARD, name="clip_gradients")
    except BaseException:
        on_parameters.remove()
        raise
    return HandleSet([on_parameters, on_modules])


def freeze(model: nn.Module, target: Target = None) -> HookHandle:
    """Keep the parameters of the named modules as they are, without touching gradients anywhere else.

    Recipe::

        with hookline.freeze(model, "backbone"):
            train(model)

    Their ``.grad`` is dropped now, and whenever a backward has filled it, and does not come back; so no optimizer
    moves them, by momentum or weight decay neither. What flows through the modules to those below is unchanged. A
    weight that another module shares is frozen there too; buffers, such as BatchNorm's statistics, still move.
    """
    handle = _hook_parameters(model, target, _drop_gradient, "freeze")
    for _, module in select(model, target):
        for parameter in module.parameters():
            _drop_gradient(parameter)
    return handle


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _hook_parameters(model: nn.Module, target: Target, hook: Hook, name: str) -> HookHandle:
    """Hook the trained parameters of the named modules, each once; a module without any is no error here."""
    modules = {name for name, _ in select(model, target)}
    chosen: dict[int, NamedParameter] = {}
    for each in named_parameters(model):
        if each.parameter.requires_grad and is_below(each.name, modules):
            chosen.setdefault(id(each.parameter), each)
    attachment = new_attachment(hook, Kind.PARAM_GRAD, AttachOptions(name=name))
    return attach_to_parameters(attachment, model, list(chosen.values()))


def _shrink(bound: float, grad: Tensor) -> Tensor:
    """Return a gradient, scaled down to the 2-norm ``bound`` if it is above."""
    # In float32, as the norm of half-precision gradients may not fit into theirs; no host sync. A tensor
    # within the bound is multiplied by exactly 1. 1e-38 stands in for a norm of 0.
    norm = linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    scale = (bound / norm.clamp_min(1e-38)).clamp_max(1.0)
    shrunk: Tensor = (grad.to(norm.dtype) * scale).to(grad.dtype)
    return shrunk
