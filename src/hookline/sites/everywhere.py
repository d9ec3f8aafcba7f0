"""Attach one hook to every module of the process, or to every optimizer.

Users call `attach_everywhere`; so do `PrecisionChecker`, and `OptimizerSteps` of a watch. It hooks the modules that are
there, like any others (`add_entries` of ``module_hooks``). One global pre-hook of torch, `_first_sight`, shows us each
module that is built later, when that is called for the first time. So such a hook keeps what is promised of hooks on
modules, and a transformer layer that would skip its children in a fused inference path sees their hooks and does not.
Kinds of registration go to torch's own global hooks (`_register_with_torch`), those of steps to ``optimizers``.

The head of ``module_hooks`` explains the words used here: a slot, the pre-slots `FIRST_PRE` and `LAST_PRE`, and
``noted``. `_first_sight` runs the slots of a first call itself, so it repeats the list of pre-slots in their order: if
``module_hooks`` gets another one, put it there too. What a pre-slot returns is unpacked there as well.

Hooks come on and go off under ``module_hooks.LOCK``; `_first_sight` takes it where it hooks a module. It runs in every
module call of the process and is traced where the compiler meets it: its common way out must stay short and without the
lock, and while tracing it may only warn. A new kind of registration needs its type in the dictionary of
`_register_with_torch`; the head of ``kinds`` has the rest of that list.
"""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module

from hookline.errors import HooklineWarning, HookReturnError, OptionError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.attach import new_attachment
from hookline.sites.gradients import CallState
from hookline.sites.handle import HookHandle, attaching
from hookline.sites.hook_at_site import NO_MODEL, AttachOptions, HookAtSite, HookContainer
from hookline.sites.kinds import MODULE, OPTIMIZER, STATE_KINDS, STORED, Kind
from hookline.sites.module_hooks import FIRST_PRE, LAST_PRE, LOCK, Slot, add_entries, existing_hooks, hooks_of_module
from hookline.sites.optimizers import hook_optimizers_everywhere
from hookline.sites.wrappers import clean_modules, is_wrapper_type, unwrap

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook
    from hookline.sites.hook_at_site import Attachment


def attach_everywhere(
    hook: Hook,
    *,
    on: str | Kind = Kind.FORWARD,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    observe: bool = False,
    name: str | None = None,
) -> HookHandle:
    """Put a hook on every module of the process.

    Recipe::

        with hookline.attach_everywhere(hook, on="forward_pre"):
            model(x)

    It runs before the hooks on single modules: an edit before their edits, an observer (``observe=True``) before their
    observers. The options are those of ``attach`` but for ``exclude``, ``strict``, ``scope``, ``role`` and ``layer``;
    for the modules of one model, use ``attach(model, "*", hook)``, which takes the kinds of saving and loading and
    ``param_grad`` too. Names are those in the outermost module. With ``step_pre`` and ``step_post`` it is put on every
    optimizer of the process instead; registration hooks also see modules that are built later.
    """
    site_type = next(
        (each for each in (STORED, OPTIMIZER) if on in tuple(each.args) and on not in tuple(MODULE.args)), MODULE
    )
    attachment = new_attachment(
        hook,
        Kind.parse(on, site_type),
        AttachOptions(prepend=prepend, with_kwargs=with_kwargs, always_call=always_call, observe=observe, name=name),
        site_type=site_type,
        everywhere=True,
    )
    if site_type is OPTIMIZER:
        return hook_optimizers_everywhere(attachment)
    if attachment.kind in STATE_KINDS or attachment.kind is Kind.PARAM_GRAD:
        raise OptionError(f"on={attachment.kind.value!r} goes with the modules of a model: attach(model, '*', hook).")
    if with_kwargs and attachment.kind is Kind.FORWARD_PRE:
        raise OptionError("with_kwargs= does not go with on='forward_pre' here; torch shows no keyword arguments.")
    return _EVERYWHERE.add(attachment) if site_type is MODULE else _register_with_torch(attachment)


def _register_with_torch(attachment: Attachment) -> HookHandle:
    """Have torch run a hook on all that is stored in any module; torch has no such hooks but for the whole process."""
    entry = HookAtSite(attachment, "(every module)", HookContainer(), NO_MODEL)

    def run(module: nn.Module, name: str, value: Any) -> Any:
        entry.count()
        result = entry.call(module, (name, value))
        if result is None or attachment.options.observe:
            return None
        if not isinstance(result, wanted):
            raise HookReturnError(
                f"{attachment.kind.value} hook {attachment.name!r}, shown {name!r}, must return a "
                f"{wanted.__name__} or None, but got {type_name(result)}."
            )
        return result

    what = attachment.kind.removeprefix("register_")
    wanted: type = {"module": nn.Module, "parameter": nn.Parameter, "buffer": torch.Tensor}[what]
    with attaching(attachment) as handle:
        registered = getattr(torch_module, f"register_module_{what}_registration_hook")(run)
        attachment.on_remove = lambda attachment: registered.remove()
    return handle


class _ModulesEverywhere:
    """The process-wide attachments, and the one global hook of torch that feeds them."""

    def __init__(self) -> None:
        self.attachments: tuple[Attachment, ...] = ()
        self._global: RemovableHandle | None = None
        self.generation = 0
        """How often a hook was added. `ModuleHooks.covered` has the generation up to which a module has all hooks."""
        self.said = 0
        """For which generation it was said that compiled code is not reached."""

    def add(self, attachment: Attachment) -> HookHandle:
        with attaching(attachment) as handle:
            attachment.on_remove = self.drop
            self.attachments = (*self.attachments, attachment)
            self.generation += 1
            if self._global is None:
                self._global = torch_module.register_module_forward_pre_hook(self._first_sight)
            for model in _existing_models():
                self._cover(model)
        return handle

    def drop(self, attachment: Attachment) -> None:
        self.attachments = tuple(other for other in self.attachments if other is not attachment)
        if not self.attachments and self._global is not None:
            self._global.remove()
            self._global = None

    def _first_sight(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Hook a module that has not been seen, and all below it, as its call begins.

        Its pre-slots (head of ``module_hooks``) have to be run here: torch has made the list of pre-hooks of this call
        already, without them. Those that the module has had before are in that list, and not run twice.
        """
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
        unhooked = [row for row in (FIRST_PRE, LAST_PRE) if row.slot_on(module) is None]
        with LOCK:
            self._cover(module)
        new = args
        for row in unhooked:
            slot = row.slot_on(module)  # none on a wrapper: the call of what it wraps is still to come
            result = None if slot is None else slot(module, new, {})
            if slot is not None and result is not None:
                new, noted = result
                slot.module_hooks.noted = noted if isinstance(noted, CallState) else None
        return None if new is args else new

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


@_torch.constant_while_tracing
def _warn_compiled(cls: type) -> None:
    """Warn, once for each set of process-wide hooks, that compiled code is not reached."""
    if _EVERYWHERE.said != _EVERYWHERE.generation and not is_wrapper_type(cls):  # a wrapper carries none
        _EVERYWHERE.said = _EVERYWHERE.generation
        warnings.warn(
            f"A {cls.__name__} is being compiled that attach_everywhere has not met before: its hooks will not fire "
            "there. Use attach(model, '*', hook), or call the model once uncompiled.",
            HooklineWarning,
            stacklevel=2,
        )


def _existing_models() -> list[nn.Module]:
    """Return the outermost modules that are alive in this process."""
    modules = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), nn.Module)
        and "_modules" in vars(item)
        and not isinstance(item, torch.fx.GraphModule)  # of which the compiler keeps many
    ]
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def _carries(module: nn.Module, attachment: Attachment) -> bool:
    module_hooks = existing_hooks(module)
    return module_hooks is not None and any(
        entry.attachment is attachment for entry in module_hooks.hooks_of_kind(attachment.kind)
    )


_EVERYWHERE = _ModulesEverywhere()


# Never compiled by itself; inlined into a compiled call it is traced all the same.
_torch.leave_to_python(_ModulesEverywhere._first_sight)
