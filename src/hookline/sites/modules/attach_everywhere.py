"""Attach one hook to every module there is: of the process, or of a model.

Users call `attach_everywhere`; within a model it is an ``attach`` on everything, before other hooks. For the
process, torch's own global pre-hook shows us each module the first time it is called, and the hook goes onto
that module and all below it, like any other. So it keeps every promise of a module hook, and a transformer
layer that would skip its children in a fused inference path sees their hooks and does not.
"""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from hookline.errors import HooklineWarning, OptionError, TargetError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.gradients.call_gradients import CallState, CallStateArgs
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import MODULE, OPTIMIZER, Kind
from hookline.sites.modules.module_hooks import (
    FIRST_PRE,
    LAST_PRE,
    LOCK,
    Row,
    Slot,
    add_entries,
    existing_hooks,
    hooks_of_module,
    sweep,
)
from hookline.sites.modules.registration_hooks import register_with_torch
from hookline.sites.optimizers import hook_optimizers_everywhere
from hookline.sites.parameters import attach_to_parameters, select_parameters
from hookline.sites.targets import select, without_scripted
from hookline.sites.wrappers import clean_modules, is_wrapper_type, unwrap

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook, Target
    from hookline.sites.hook_at_site import Attachment


def attach_everywhere(
    hook: Hook,
    *,
    on: str | Kind = Kind.FORWARD,
    within: nn.Module | None = None,
    exclude: Target = None,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    observe: bool = False,
    name: str | None = None,
) -> HookHandle:
    """Put a hook on every module of the process, or of one model.

    Recipe::

        with hookline.attach_everywhere(hook, on="forward_pre"):
            model(x)

    It runs before the hooks on single modules. The options are those of ``attach``. Without ``within`` it
    reaches every module that is called in this process from now on, named as seen from the outermost call it
    was found in; saving and loading, ``param_grad`` and ``exclude`` need ``within``. With ``step_pre`` and
    ``step_post`` it is put on every optimizer of the process instead; registration hooks also see modules that are
    built later.
    """
    site_type = OPTIMIZER if str(on) in (Kind.STEP_PRE, Kind.STEP_POST) else MODULE
    attachment = new_attachment(
        hook,
        Kind.parse(on, site_type),
        AttachOptions(
            prepend=prepend,
            with_kwargs=with_kwargs,
            always_call=always_call,
            observe=observe,
            name=name,
        ),
        site_type=site_type,
        everywhere=True,
    )
    if site_type is OPTIMIZER:
        if within is not None or exclude is not None:
            raise OptionError(f"on={attachment.kind.value!r} is about optimizers: within= and exclude= do not apply.")
        return hook_optimizers_everywhere(attachment)
    if within is not None:
        if not isinstance(within, nn.Module):
            raise TargetError(f"within= takes a torch.nn.Module, got {type_name(within)}.")
        if attachment.kind is Kind.PARAM_GRAD:
            return attach_to_parameters(attachment, within, select_parameters(within, None, exclude=exclude))
        return attach_to_modules(attachment, within, without_scripted(select(within, "*", exclude=exclude), "*"))
    if attachment.kind.is_state or attachment.kind is Kind.PARAM_GRAD:
        raise OptionError(f"on={attachment.kind.value!r} cannot be hooked process-wide; name a model with within=.")
    if exclude is not None:
        raise OptionError("exclude= selects by name, and names need a model: give within= as well.")
    if attachment.kind.is_registration:
        register_with_torch(attachment)
        return HookHandle(attachment)
    return _EVERYWHERE.add(attachment)


class _ModulesEverywhere:
    """The process-wide attachments, and the one global hook of torch that feeds them."""

    def __init__(self) -> None:
        self.attachments: tuple[Attachment, ...] = ()
        self._global: RemovableHandle | None = None
        self.generation = 0
        self.said = 0
        """For which generation it was said that compiled code is not reached."""

    def add(self, attachment: Attachment) -> HookHandle:
        with LOCK:
            sweep()
            attachment.on_remove = self.drop
            self.attachments = (*self.attachments, attachment)
            self.generation += 1
            if self._global is None:
                self._global = register_module_forward_pre_hook(self._first_sight)
            if attachment.options.always_call or attachment.kind is Kind.FULL_BACKWARD:
                # torch decides on these before it calls a pre-hook, so first sight comes too late for one call.
                for model in _existing_models():
                    self._cover(model)
            return HookHandle(attachment)

    def drop(self, attachment: Attachment) -> None:
        self.attachments = tuple(other for other in self.attachments if other is not attachment)
        if not self.attachments and self._global is not None:
            self._global.remove()
            self._global = None

    def _first_sight(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Hook a module, and all below it, before its call gets to its forward."""
        if is_dynamo_compiling():
            if not _has_slot(module):
                _warn_compiled(type(module))
            return None
        inner = unwrap(module)
        module_hooks = existing_hooks(inner)
        if module_hooks is not None and module_hooks.covered == self.generation:
            return None
        if isinstance(module, torch.jit.ScriptModule):
            return None  # which runs no Python hooks
        if isinstance(module, torch.fx.GraphModule) and _torch.in_compiled_code():
            return None  # a graph that compiled code runs: a module, though of no model
        before = {row: row.slot_on(module) for row in (FIRST_PRE, LAST_PRE)}
        with LOCK:
            self._cover(module)
        if inner is not module:
            return None  # a wrapper: the call of what it wraps is still to come
        return _run_now(_take_part(module, before), module, args)

    def _cover(self, model: nn.Module) -> None:
        reachable = [named for named in clean_modules(model) if not isinstance(named[1], torch.jit.ScriptModule)]
        for attachment in self.attachments:
            fresh = [(name, module) for name, module in reachable if not _carries(module, attachment)]
            if fresh:
                add_entries(attachment, model, fresh)
        for _, module in reachable:
            hooks_of_module(module).covered = self.generation


def _has_slot(module: nn.Module) -> bool:
    """Return whether a module carries hooks of ours; to be traced."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(isinstance(hook, Slot) for hook in hooks)


def _take_part(module: nn.Module, before: dict[Row, Slot | None]) -> list[Slot]:
    """Let new pre-hooks take part in the call that torch is about to make; return the slots it does not know of.

    It goes through a list of the slots that were there ``before``.
    """
    fresh: list[Slot] = []
    for row, known in before.items():
        slot = row.slot_on(module)
        if slot is not None and known is None:
            fresh.append(slot)
        elif slot is not None and known is not None and known is not slot:
            known.become(slot)
            getattr(module, row.hooks)[row.hook_id] = known
    return fresh


@_torch.constant_while_tracing
def _warn_compiled(cls: type) -> None:
    """Warn, once for each set of process-wide hooks, that compiled code is not reached."""
    if _EVERYWHERE.said != _EVERYWHERE.generation and not is_wrapper_type(cls):  # a wrapper carries none
        _EVERYWHERE.said = _EVERYWHERE.generation
        warnings.warn(
            f"A {cls.__name__} is being compiled that attach_everywhere has not met before: its hooks will not fire "
            "there. Give it the model, attach_everywhere(hook, within=model), or call the model once uncompiled.",
            HooklineWarning,
            stacklevel=2,
        )


def _existing_models() -> list[nn.Module]:
    """Return the outermost modules that are alive in this process."""
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and "_modules" in vars(item)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def _carries(module: nn.Module, attachment: Attachment) -> bool:
    module_hooks = existing_hooks(module)
    return module_hooks is not None and any(
        entry.attachment is attachment for entry in module_hooks.hooks_of_kind(attachment.kind)
    )


def _run_now(slots: list[Slot], module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Run pre-hooks that came too late for the list torch is going through."""
    if not slots:
        return None
    given = args
    kwargs = _torch.kwargs_of_call()
    for slot in slots:
        result = slot(module, args, kwargs)
        if result is None:
            continue
        args, named = result
        if isinstance(named, CallState):
            args = CallStateArgs(*args)
            args.state = named
        if named is not kwargs:
            new = dict(named)
            kwargs.clear()
            kwargs.update(new)
    return None if args is given else args


_EVERYWHERE = _ModulesEverywhere()


def attachments_everywhere() -> tuple[Attachment, ...]:
    """Return the hooks on every module of the process."""
    return _EVERYWHERE.attachments


_torch.leave_to_python(_ModulesEverywhere._first_sight)
