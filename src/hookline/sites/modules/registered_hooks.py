"""Prepare the torch hooks of one module for gradients and for compiled code, and take single ones off.

`ModuleHooks` derives from `RegisteredHooks`: this is the part of it that most modules never need.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.compiled_gradients import plan_of
from hookline.sites.compiled.op_schemas import new_key
from hookline.sites.gradients.gradient_hooks import USE_INPUT_ONCE
from hookline.sites.hook_at_site import OrderGroup, next_order
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_guard import HookedModule
from hookline.sites.modules.torch_hooks import (
    LEFT_BEHIND,
    OTHERS,
    QUEUES,
    LastForwardHook,
    LastHook,
    LastPreHook,
    StateHook,
    TorchHook,
)

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.modules.call_guard import AroundCall

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
_TAKES_KWARGS: Final = operator.attrgetter("attachment.options.with_kwargs")
_OBSERVE: Final = OrderGroup.OBSERVE  # looking an enum member up by its class costs 0.2 µs
_Entries: TypeAlias = "tuple[HookAtSite, ...]"
Slot: TypeAlias = type[TorchHook] | Kind
"""Of which there is one torch hook at most for a module: one end of a queue around its calls, or another kind."""


class RegisteredHooks(HookedModule):
    """The torch hooks of one module."""

    _full_backward_flag: Any = None
    _has_own_forward = False

    def _sync_pre(self, module: nn.Module) -> None:
        """Register the torch hooks before the forward as the hooks need it."""
        raise NotImplementedError

    def _sync_post(self, module: nn.Module) -> None:
        """Register those after it."""
        raise NotImplementedError

    def give_key(self) -> None:
        """Prepare for compiled code, which there may be from now on."""
        self.key = new_key(self)
        for torch_hook in self._torch_hooks.values():
            torch_hook.key = self.key
            torch_hook.prepare()
        self._sync_plan()

    def set_around(self, around: AroundCall | None) -> None:
        """Enter ``around`` before each call from the next one on, and leave it after."""
        self.around = around
        module = self._module()
        if module is not None:
            self.sync_guard(module)
            self._sync_pre(module)

    def sync_compiled(self) -> None:
        """Show compiled code whether the module has hooks that a compiled call runs."""
        module = self._module()
        if module is not None and LastPreHook in self._torch_hooks:
            self._sync_pre(module)
        if module is not None and (last := self._torch_hooks.get(LastForwardHook)) is not None:
            # Four guards less without. A `LastPreHook` hands on what it has noted by them.
            self._hand_kwargs(module, wanted=LastPreHook in self._torch_hooks or any(map(_TAKES_KWARGS, last.entries)))
        needed = not self._torch_hooks.keys().isdisjoint(QUEUES)
        if module is not None and needed is not self._has_own_forward:
            self._has_own_forward = needed
            (recompile_guard.add_own_forward if needed else recompile_guard.drop_own_forward)(module)
        if needed:  # compiled code keeps no places: the counter does
            for entry in self.entries():
                entry.counter.hooked.add(self)

    def _hand_kwargs(self, module: nn.Module, *, wanted: bool) -> None:
        last = self._torch_hooks.get(LastForwardHook)
        if last is not None:
            _torch.hand_kwargs(module, QUEUES[LastForwardHook][0], last.hook_id, wanted=wanted)

    def _sync_gradients(self, module: nn.Module) -> None:
        self.set_gradient_hooks(*map(self.hooks_of_kind, GRADIENT_KINDS))
        self.uses_input_once = type(module) in USE_INPUT_ONCE and not recompile_guard.is_forward_replaced(module)
        self._sync_post(module)
        if self.key is not None:
            self._sync_plan()

    def _sync_plan(self) -> None:
        """Write the plan of the gradient hooks, as compiled calls read it, into the last hooks."""
        self.plan = plan_of(self)
        for torch_hook in self._torch_hooks.values():
            if isinstance(torch_hook, LastHook):
                torch_hook.plan = self.plan
                torch_hook.write_recipe()

    def _how_calls_begin(self, module: nn.Module, *, has_observers: bool) -> tuple[bool, bool]:
        """Return whether calls begin late for gradient hooks, and whether a `LastPreHook` is needed without observers.

        Without compiled code that keeps the places of observers at the start of each call, whoever makes it, and notes
        where a call with gradient hooks begins. In compiled code each pre-hook is 14 guards more, so there the counter
        keeps places (and `LastForwardHook`). Where a call begins tells its outputs from inputs that it returns, or
        changes in place: modules that do neither begin late. Not with a pre-hook of somebody else, though, which may
        attach a gradient hook to this very call: that begins with the next one.
        """
        if LastForwardHook not in self._torch_hooks:
            return False, False
        begins_late = self.key is not None and self.observes_outputs and self.uses_input_once and not has_observers
        if begins_late:
            own = self._torch_hooks.get(LastPreHook)
            begins_late = all(hook is own for hook in module._forward_pre_hooks.values())
        return begins_late, not begins_late and (self.has_gradients or not recompile_guard.is_compiler_used())

    def _set_begins_late(self, begins_late: bool) -> None:
        if begins_late:
            self.entered = next_order()  # for a call under way when this ends: the hooks of now take part, no later one
        if begins_late is not self.begins_late:
            self.begins_late = begins_late
            self._sync_plan()

    def _take_off(self, module: nn.Module, slot: Slot, torch_hook: TorchHook) -> None:
        """Remove a torch hook from torch's dictionary, unless torch may be iterating over that very dictionary.

        torch takes a snapshot of the forward and backward hooks it is about to run, but walks its state-dict
        hooks live: while one of ours runs, only the last of the queue may go. Any other stays, empty, until the next
        hook comes or goes anywhere.
        """
        attribute = OTHERS[slot][1] if isinstance(slot, Kind) else QUEUES[slot][0]
        is_last = next(reversed(getattr(module, attribute)), None) == torch_hook.hook_id
        if isinstance(torch_hook, StateHook) and StateHook.running and not is_last:
            LEFT_BEHIND.append((self._module, attribute, torch_hook.hook_id))
            return
        _torch.drop_hook(module, attribute, torch_hook.hook_id)
        if slot is Kind.FULL_BACKWARD and not module._backward_hooks:
            setattr(module, _torch.FULL_BACKWARD_FLAG, self._full_backward_flag)


def split_queue(hooks: _Entries) -> tuple[_Entries, _Entries]:
    """Return the hooks for the front of the queue (raw observers and edits) and for its end (observers)."""
    if not hooks or hooks[-1].attachment.order_group is not _OBSERVE:
        return hooks, ()
    if hooks[0].attachment.order_group is _OBSERVE:  # they are sorted by group
        return (), hooks
    at = next(at for at, entry in enumerate(hooks) if entry.attachment.order_group is _OBSERVE)
    return hooks[:at], hooks[at:]
