"""Attach a hook to functions: of torch, of the dispatcher, of the user's own.

Users and ``debug.precision`` call `attach_function`; ``specs.apply_specs``, which makes its own `Attachment`, calls
`attach_to_functions`. Each function gets one entry in a `Scope` (``function_mode``): of a model, of this thread, or of
the process, for classes. ``function_names`` says which functions a target means.

Whoever changes the entries of a scope holds `LOCK`, and calls `publish` after it: threads read their tables without a
lock, and make them anew only then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.errors import KindError, TargetError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.functions.function_mode import ANYWHERE, Scope, publish, restore_classes, scope_of_thread
from hookline.sites.functions.function_names import Place, find_places
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import ON_NO_MODEL, AttachOptions, OrderGroup
from hookline.sites.kinds import FUNCTION, Kind
from hookline.sites.module_hooks import LOCK, counter_of, hooks_of_module
from hookline.sites.receipt import NOT_CALLED
from hookline.sites.targets import found_by
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import Attachment


def attach_function(
    target: Any,
    hook: Hook,
    *,
    on: str | Kind = Kind.FORWARD,
    within: nn.Module | None = None,
    exclude: Any = None,
    prepend: bool = False,
    observe: bool = False,
    name: str | None = None,
    strict: bool = True,
) -> HookHandle:
    """Put a hook on functions, wherever they are called.

    Recipe::

        def hook(fn, inputs, outputs):
            print(fn.name, fn.module, fn.call, outputs[0].shape)


        with hookline.attach_function("*.softmax", hook, within=model):
            model(x)

    The hook is called as ``(fn, inputs)`` for ``forward_pre``, ``(fn, inputs, outputs)`` for ``forward``,
    ``(fn, grad_outputs)`` for ``backward_pre`` and ``(fn, grad_inputs, grad_outputs)`` for ``backward``, where ``fn``
    is a `FunctionSite` and the rest are tuples of tensors. It may return tensors to go on with.

    Args:
        target: A function of torch (``torch.nn.functional.relu``); a name or glob over all names that such functions
            go by (``"torch.nn.functional.*"``, ``"*.relu"``) or a compiled regular expression; an operator or a glob
            over them (``torch.ops.aten.mm``, ``"aten.mm*"``, ``"mylib.op"``); a subclass of
            ``torch.autograd.Function`` or its full name; or a list of these, each of which has to match.
        hook: As above. Where it declares a keyword-only ``site``, it gets one.
        on: ``forward_pre``, ``forward``, ``backward_pre`` or ``backward``; operators have the first two.
        within: Only calls made in the forwards of this model count, in whichever thread: what ``model(x)`` calls, not
            ``model.forward(x)``, nor a part of it called alone. Without it, functions of torch and operators count in
            this thread, classes in all threads.
        exclude: Functions to leave out, in the same grammar as ``target``.
        prepend: Run before the hooks of ours that are there already.
        observe: Ignore the return value, and run after all edits.
        name: A name for reports; the hook's own by default.
        strict: Raise if nothing matches; with False, warn and return a handle on nothing.

    Functions that are called inside another function of torch are not seen: ``nn.MultiheadAttention`` calls
    ``torch.nn.functional.multi_head_attention_forward``, and the softmax in there shows as ``aten._softmax``.
    Operators are seen below autograd: what a hook returns there is not differentiated, and every other operator takes
    some microseconds more meanwhile. A ``backward`` hook that may return a value does not go with functions that change
    a tensor itself (``add_``, ``+=``), and is left out of those that a glob matches; an observer is not.

    Raises:
        NoMatchError: (a KeyError) naming the nearest functions.
        UnhookableError: for a function whose calls torch shows to no one.
        KindError, OptionError, TargetError, HookSignatureError: before anything is attached.
    """
    attachment = new_attachment(
        hook,
        Kind.parse(on, FUNCTION),
        AttachOptions(prepend=prepend, observe=observe, name=name),
        site_type=FUNCTION,
        everywhere=within is None,
    )
    if within is not None and not isinstance(within, nn.Module):
        raise TargetError(f"within= takes a torch.nn.Module, got {type_name(within)}.")
    places = found_by(lambda: find_places(target, exclude=exclude), strict=strict)
    return attach_to_functions(attachment, places, within)


def attach_to_functions(attachment: Attachment, places: list[Place], within: nn.Module | None) -> HookHandle:
    """Attach to all of the places, or to none."""
    places = _able(attachment, places)
    began = threading.get_ident(), _torch.sequence_number()
    with LOCK:
        handle = HookHandle(attachment)
        # Without a model, hooks on classes count in all threads, hooks on other functions in this thread.
        scope = scope_of_thread() if within is None else _scope_of(unwrap(within), attachment.kind)
        for_classes = ANYWHERE if within is None else scope
        restore_classes()
        scope.counter.serve(attachment)
        attachment.on_remove = lambda attachment: _take_off(attachment, scope, began)
        try:
            for place in places:
                each = for_classes if isinstance(place.func, type) else scope
                attachment.entries[each.add(attachment, place)] = None
            publish()
            if within is None:
                ON_NO_MODEL.add(attachment)
        except BaseException:
            handle.remove(quiet=True)
            raise
        return handle


def _able(attachment: Attachment, places: list[Place]) -> list[Place]:
    """Return the places where the hook can work; of several, the others are left out. Raise if there is none.

    Operators have no gradients. Where a function changes the tensor itself, no gradient of it can be edited.
    """
    kind = attachment.kind
    operator = next((place for place in places if place.is_operator), None)
    if operator is not None and kind.is_gradient:
        raise KindError(
            f"on={kind.value!r} does not go with {operator.name}: operators are seen below autograd, where there are "
            "no gradients. Hook the function of torch that calls it, the module, or a torch.autograd.Function."
        )
    if kind is not Kind.BACKWARD or not attachment.may_edit or attachment.order_group is OrderGroup.OBSERVE:
        return places
    able = [place for place in places if not place.changes_tensor]
    if places and not able:
        raise KindError(
            f"on={kind.value!r} does not go with {places[0].name} for a hook that may return gradients: it changes the "
            "tensor itself, for which no alias can stand in. Pass observe=True to watch its gradients."
        )
    return able


def _take_off(attachment: Attachment, scope: Scope, began: tuple[int, int]) -> None:
    """Take all entries off, and the scope off its model if it has no other hooks on functions.

    `HookHandle.remove` calls this, and holds `LOCK`.
    ``began`` is the thread that attached them, and the number that its next graph node had then.
    """
    for entry in attachment.entries:
        entry.container.discard(entry)
    publish()
    restore_classes(attachment)
    # If this thread has made graph nodes, the hook could have fired, though no forward of a model has begun: the
    # receipt then warns of a hook that never did.
    if began[0] == threading.get_ident() and began[1] < _torch.sequence_number():
        for entry in attachment.entries:
            if entry.counter.step == entry.step_at_attach:
                entry.step_at_attach = NOT_CALLED
    model = scope.counter.model()
    if model is not None and not scope.hooks:
        hooks_of_module(model).set_around(None)


def _scope_of(model: nn.Module, kind: Kind) -> Scope:
    """Return the scope of a model, made if there is none; its hooks count from the next forward on."""
    counter = counter_of(model, kind)
    module_hooks = hooks_of_module(model)
    if not isinstance(module_hooks.around, Scope):
        module_hooks.set_around(Scope(counter))
    assert isinstance(module_hooks.around, Scope)
    return module_hooks.around
