"""Prepare the torch hooks of one module for gradients and for compiled code, and take single ones off.

`ModuleHooks` derives from `RegisteredHooks`: this is the part of it that most modules never need.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.compiled_gradients import plan_of
from hookline.sites.compiled.op_schemas import new_key
from hookline.sites.gradients.gradient_hooks import USE_INPUT_ONCE
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_guard import HookedModule
from hookline.sites.modules.torch_hooks import LEFT_BEHIND, OTHERS, QUEUES, LastHook, LastPreHook, StateHook, TorchHook

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.modules.call_guard import AroundCall

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
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
        needed = not self._torch_hooks.keys().isdisjoint(QUEUES)
        if module is not None and needed is not self._has_own_forward:
            self._has_own_forward = needed
            (recompile_guard.add_own_forward if needed else recompile_guard.drop_own_forward)(module)
        if needed:  # compiled code keeps no places: the counter does
            for entry in self.entries():
                entry.counter.hooked.add(self)

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
