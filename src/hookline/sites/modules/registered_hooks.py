"""Register with torch exactly those torch hooks that the hooks of one module need.

`ModuleHooks`, which holds these hooks, derives from `RegisteredHooks` and calls it whenever one has come or gone.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.compiled_gradients import plan_of
from hookline.sites.gradients.gradient_hooks import USE_INPUT_ONCE
from hookline.sites.hook_at_site import OrderGroup
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_guard import HookedModule
from hookline.sites.modules.torch_hooks import (
    CALLED_FROM_ELSEWHERE,
    LEFT_BEHIND,
    OTHERS,
    QUEUES,
    FirstForwardHook,
    FirstPreHook,
    LastForwardHook,
    LastHook,
    LastPreHook,
    StateHook,
    TorchHook,
    split_queue,
)

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

# Looking an enum member up by its class costs 0.2 µs, ten times over for every module that is hooked.
_FORWARD_PRE: Final = Kind.FORWARD_PRE
_FORWARD: Final = Kind.FORWARD
_FULL_BACKWARD: Final = Kind.FULL_BACKWARD
_OBSERVE: Final = OrderGroup.OBSERVE
_GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
_IS_ALWAYS_CALLED: Final = operator.attrgetter("attachment.options.always_call")
_LAST_ONLY: Final = frozenset({LastPreHook, LastForwardHook})
_Slot: TypeAlias = type[TorchHook] | Kind
_Position: TypeAlias = tuple[dict[int, Any], int, bool]
"""One of torch's dictionaries, the id of our torch hook in it, and whether that has to be first or last."""


class RegisteredHooks(HookedModule):
    """The torch hooks of one module."""

    _full_backward_flag: Any = None
    _positions: tuple[_Position, ...] | None = None
    _has_own_forward = False

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

    def keep_places(self) -> None:
        """Put our edits before, and our observers after, hooks that others have registered since."""
        positions = self._positions
        if positions is None:
            module, own = self._module(), self._torch_hooks
            positions = self._positions = tuple(
                (getattr(module, name), hook.hook_id, first)
                for cls, (name, first) in (QUEUES.items() if module is not None else ())
                if (hook := own.get(cls)) is not None  # one lookup: another thread may remove it meanwhile
            )
        for hooks, hook_id, first in positions:
            if len(hooks) == 1:
                continue
            try:
                in_place = next(iter(hooks) if first else reversed(hooks), None) == hook_id
            except RuntimeError:  # another thread changes it; there is another call
                continue
            if not in_place:
                with LOCK:
                    if hook_id in hooks:
                        (_torch.place_first if first else _torch.place_last)(hooks, hook_id)

    def _put_only(self, module: nn.Module, entry: HookAtSite) -> None:
        """Register what a forward hook needs that is the only hook of its module, where there is no compiled code.

        It comes to what `_sync` would do, in 3 calls of Python instead of 9: most modules have one hook, and of
        10,000 modules each call takes 1 ms.
        """
        if entry.attachment.order_group is not _OBSERVE:
            self._put_one(module, FirstForwardHook, (entry,))
            entry.counter.hooked.add(self)
            return
        self._put_one(module, LastForwardHook, (entry,))
        self._put_one(module, LastPreHook, ())

    def _put_one(self, module: nn.Module, slot: type[TorchHook], entries: tuple[HookAtSite, ...]) -> None:
        torch_hook = self._torch_hooks[slot] = slot(self)
        attribute, first = QUEUES[slot]
        torch_hook.entries = entries
        torch_hook.hook_id = _torch.add_torch_hook(module, attribute, torch_hook, first=first)

    def _take_all_off(self, module: nn.Module) -> None:
        """Remove the torch hooks around the calls of a module without hooks, where there is no compiled code."""
        own = self._torch_hooks
        for slot, torch_hook in own.items():
            torch_hook.entries = ()
            _torch.drop_torch_hook(module, QUEUES[slot][0], torch_hook.hook_id)
        own.clear()
        self._positions = None

    def _sync(self, changed: HookAtSite) -> None:
        """Register and remove torch hooks as the hooks need it, after one has come or gone."""
        module = self._module()
        if module is None:
            return
        attachment = changed.attachment
        kind = attachment.kind
        if kind in _GRADIENT_KINDS:
            self._sync_gradients(module)
        elif kind is _FORWARD_PRE:
            self._sync_pre(module)
        elif kind is _FORWARD:
            self._sync_post(module)
        else:
            if kind is _FULL_BACKWARD and not attachment.removed and not attachment.everywhere:
                # torch notes at the forward which hooks it will call: a new one keeps new hooks out of old calls.
                self._sync_torch_hook(module, kind, ())
            self._sync_torch_hook(module, kind, self._by_kind.get(kind, ()))
        if attachment.options.always_call:
            self.sync_guard(module)
        self._positions = None
        if recompile_guard.is_compiler_used():
            self.sync_compiled()

    def _sync_pre(self, module: nn.Module) -> None:
        hooks = self._by_kind.get(_FORWARD_PRE, ())
        counts = self.counter is not None and self.around is None
        own = self._torch_hooks
        early, late = split_queue(hooks)
        if early or counts or FirstPreHook in own:
            self._sync_torch_hook(module, FirstPreHook, early, needed=counts)
        first = own.get(FirstPreHook)
        if first is not None:
            first.ticks = "t" if counts else ""
            if self.key is not None:
                first.write_recipe()
        # A module with observers keeps their place at the start of each call, whoever makes it. Where there is compiled
        # code, that would be one more guard, so there the counter does it (and `LastForwardHook`).
        needed = LastForwardHook in own and (self.has_gradients or not recompile_guard.is_compiler_used())
        if late or needed or LastPreHook in own:
            self._sync_torch_hook(module, LastPreHook, late, needed=needed)

    def _sync_post(self, module: nn.Module) -> None:
        early, late = split_queue(self._by_kind.get(_FORWARD, ()))
        always = any(map(_IS_ALWAYS_CALLED, late))
        if early or always or FirstForwardHook in self._torch_hooks:
            self._sync_torch_hook(module, FirstForwardHook, early, needed=always)
        if late or self.has_gradients or LastForwardHook in self._torch_hooks:
            self._sync_torch_hook(module, LastForwardHook, late, needed=self.has_gradients)
            self._sync_pre(module)

    def _sync_gradients(self, module: nn.Module) -> None:
        self.set_gradient_hooks(*map(self.hooks_of_kind, _GRADIENT_KINDS))
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

    def _sync_torch_hook(
        self, module: nn.Module, slot: _Slot, entries: tuple[HookAtSite, ...], *, needed: bool = False
    ) -> None:
        """Register one torch hook in ``slot`` while it has entries or is needed for something else; none otherwise."""
        torch_hook = self._torch_hooks.get(slot)
        if entries or needed:
            if torch_hook is None:
                torch_hook = self._torch_hooks[slot] = self._register(module, slot)
            torch_hook.put(entries)
        elif torch_hook is not None:
            del self._torch_hooks[slot]
            if slot is not _FULL_BACKWARD:
                torch_hook.put(())
            self._take_off(module, slot, torch_hook)

    def _register(self, module: nn.Module, slot: _Slot) -> TorchHook:
        if not isinstance(slot, Kind):
            torch_hook = slot(self)
            attribute, first = QUEUES[slot]
            torch_hook.hook_id = _torch.add_torch_hook(module, attribute, torch_hook, first=first)
            return torch_hook
        make, _, register = OTHERS[slot]
        torch_hook = make(self)
        if slot is _FULL_BACKWARD:
            self._full_backward_flag = getattr(module, _torch.FULL_BACKWARD_FLAG)
        torch_hook.hook_id = getattr(module, register)(torch_hook).id
        return torch_hook

    def _take_off(self, module: nn.Module, slot: _Slot, torch_hook: TorchHook) -> None:
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
        if slot is _FULL_BACKWARD and not module._backward_hooks:
            setattr(module, _torch.FULL_BACKWARD_FLAG, self._full_backward_flag)

    def _keeps_own_places(self) -> bool:
        """Return whether no torch hook has a place to keep, or only the last ones, which do so themselves."""
        own = self._torch_hooks
        pre = own.get(LastPreHook)
        if pre is None:
            return own.keys() <= CALLED_FROM_ELSEWHERE
        return not pre.entries and own.keys() == _LAST_ONLY
