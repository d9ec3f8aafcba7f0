"""Keep all hooks of ours on one module, and register with torch exactly those torch hooks that they need.

``attach`` and the other verbs add entries and remove them. A module without hooks has none of ours in torch's
dictionaries.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import torch
from torch import nn

from hookline.errors import UnhookableError
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.compiled_gradients import plan_of
from hookline.sites.compiled.op_schemas import new_key
from hookline.sites.gradients.gradient_hooks import USE_INPUT_ONCE
from hookline.sites.hook_at_site import ForwardCounter, HookAtSite, OrderGroup
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_guard import AroundCall, HookedModule
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
    back,
    drop_left_behind,
    drop_stale,
    front,
)

if TYPE_CHECKING:
    from hookline.sites.hook_at_site import Attachment

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

# Weak, so that a hook which refers to its own model does not keep it alive: the torch hooks on the module hold these.
# (A WeakValueDictionary does the same at three times the price.)
_HOOKED: dict[int, weakref.ref[ModuleHooks]] = {}
# Looking an enum member up by its class costs 0.2 µs, ten times over for every module that is hooked.
_FORWARD_PRE: Final = Kind.FORWARD_PRE
_FORWARD: Final = Kind.FORWARD
_FULL_BACKWARD: Final = Kind.FULL_BACKWARD
_OBSERVE: Final = OrderGroup.OBSERVE
_GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
_Slot: TypeAlias = type[TorchHook] | Kind
_Position: TypeAlias = tuple[dict[int, Any], int, bool]
"""One of torch's dictionaries, the id of our torch hook in it, and whether that has to be first or last."""
ON_SWEEP: Final[list[Callable[[], None]]] = []
"""Called by `sweep`."""


class ModuleHooks(HookedModule):
    """The hooks of one module."""

    _full_backward_flag: Any = None
    _positions: tuple[_Position, ...] | None = None
    _has_own_forward = False
    covered = -1
    """Up to which generation of process-wide hooks the module has them all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = _ModuleRef(module, _forget)
        if recompile_guard.is_compiler_used():
            self.key = new_key(self)
        self._by_kind = {}
        self._torch_hooks = {}

    def give_key(self) -> None:
        """Prepare for compiled code, which there may be from now on."""
        self.key = new_key(self)
        for torch_hook in self._torch_hooks.values():
            torch_hook.key = self.key
            torch_hook.prepare()
        self._sync_plan()

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

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: HookAtSite) -> None:
        """Put a hook in its place."""
        kind = entry.attachment.kind
        hooks = self._by_kind.get(kind)
        self._by_kind[kind] = (entry,) if hooks is None else _with(hooks, entry)
        self._sync(entry)
        if not self._keeps_own_places():
            entry.counter.hooked.add(self)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; do nothing if it is off already."""
        kind = entry.attachment.kind
        hooks = self._by_kind.get(kind, ())
        if entry not in hooks:
            return
        if len(hooks) == 1:
            del self._by_kind[kind]
        else:
            self._by_kind[kind] = tuple(other for other in hooks if other is not entry)
        self._sync(entry)
        own = self._keeps_own_places() and not self._has_own_forward
        if own or not any(other.counter is entry.counter for other in self.entries()):
            entry.counter.hooked.discard(self)
        self._drop_if_empty()

    def set_counter(self, counter: ForwardCounter | None) -> None:
        """Begin or end counting this module's forwards."""
        self.counter = counter
        module = self._module()
        if module is not None:
            self._sync_pre(module)
            self._positions = None
            if recompile_guard.is_compiler_used():
                self.sync_compiled()
        self._drop_if_empty()

    def set_around(self, around: AroundCall | None) -> None:
        """Enter ``around`` before each call from the next one on, and leave it after."""
        self.around = around
        module = self._module()
        if module is not None:
            self.sync_guard(module)
            self._sync_pre(module)

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
        self._sync_torch_hook(module, FirstPreHook, front(hooks), needed=counts)
        first = self._torch_hooks.get(FirstPreHook)
        if first is not None:
            first.ticks = "t" if counts else ""
            if self.key is not None:
                first.write_recipe()
        # A module with observers keeps their place at the start of each call, whoever makes it. Where there is compiled
        # code, that would be one more guard, so there the counter does it (and `LastForwardHook`).
        needed = LastForwardHook in self._torch_hooks and (self.has_gradients or not recompile_guard.is_compiler_used())
        self._sync_torch_hook(module, LastPreHook, back(hooks), needed=needed)

    def _sync_post(self, module: nn.Module) -> None:
        hooks = self._by_kind.get(_FORWARD, ())
        last = back(hooks)
        always = bool(last) and any(entry.attachment.options.always_call for entry in last)
        self._sync_torch_hook(module, FirstForwardHook, front(hooks), needed=always)
        if last or self.has_gradients or LastForwardHook in self._torch_hooks:
            self._sync_torch_hook(module, LastForwardHook, last, needed=self.has_gradients)
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
        if self._torch_hooks.keys() <= CALLED_FROM_ELSEWHERE:
            return True
        pre = self._torch_hooks.get(LastPreHook)
        return pre is not None and not pre.entries and set(self._torch_hooks) == {LastPreHook, LastForwardHook}

    def _drop_if_empty(self) -> None:
        module = self._module()
        if module is not None and not self._by_kind and self.counter is None:
            _HOOKED.pop(id(module), None)
            if not _HOOKED:
                recompile_guard.stop_watching()


def existing_hooks(module: nn.Module) -> ModuleHooks | None:
    """Return the hooks of a module, if it has any."""
    ref = _HOOKED.get(id(module))
    hooks = ref() if ref is not None else None
    return hooks if hooks is not None and hooks.module() is module else None


def hooks_of_module(module: nn.Module) -> ModuleHooks:
    """Return the hooks of a module, made if it has none."""
    hooks = existing_hooks(module)
    if hooks is None:
        if isinstance(module, torch.jit.ScriptModule):
            raise UnhookableError(
                f"{type(module).__name__} is a ScriptModule: TorchScript does not run Python hooks. "
                "Attach to the module before it is scripted or traced."
            )
        drop_stale(module)
        if not _HOOKED:
            recompile_guard.watch_compiler(_prepare_all)
        recompile_guard.check_compiler()
        hooks = ModuleHooks(module)
        _HOOKED[id(module)] = weakref.ref(hooks)
    return hooks


def _prepare_all() -> None:
    """Prepare all modules for compiled code: the compiler is about to work for the first time."""
    with LOCK:
        for hooks in filter(None, (ref() for ref in _HOOKED.values())):
            if hooks.key is None:
                hooks.give_key()
            hooks.sync_compiled()


def counter_of(model: nn.Module) -> ForwardCounter:
    """Return the counter of a model's forwards, for one more attachment; `release_counters` gives it back."""
    hooks = hooks_of_module(model)
    if hooks.counter is None:
        hooks.set_counter(ForwardCounter(model))
    assert hooks.counter is not None
    hooks.counter.users += 1
    return hooks.counter


def release_counters(attachment: Attachment) -> None:
    """Give back the counters of an attachment that is off; the last one through a model ends the counting."""
    for counter in list(attachment.counters):  # which shrink when a model is collected
        counter.users -= 1
        model = counter.model()
        if counter.users == 0 and counter.stand_in is not None:
            counter.stand_in.remove()
            counter.stand_in = None
        if counter.users == 0 and model is not None:
            hooks_of_module(model).set_counter(None)


def _with(hooks: tuple[HookAtSite, ...], entry: HookAtSite) -> tuple[HookAtSite, ...]:
    """Return the hooks with one more, nearly always at the end: a thousand hooks are not sorted a thousand times."""
    place = bisect_right(hooks, entry.attachment.rank, key=lambda other: other.attachment.rank)
    return (*hooks[:place], entry, *hooks[place:])


def sweep() -> None:
    """Remove the torch hooks that could not go when they should have, and the entries of modules that are gone."""
    if len(_HOOKED) > _Prune.at:
        for key in [key for key, ref in _HOOKED.items() if ref() is None]:
            del _HOOKED[key]
        _Prune.at = 2 * len(_HOOKED) + 64
    if LEFT_BEHIND and not StateHook.running:
        drop_left_behind()
    for clear in tuple(ON_SWEEP):
        clear()


class _Prune:
    at = 64  # so many hooked modules, and `sweep` looks through them: twice as many, twice as late


class _ModuleRef(weakref.ref[nn.Module]):
    """A weak reference that remembers the key of its module."""

    __slots__ = ("key",)

    key: int

    def __new__(cls, module: nn.Module, callback: Callable[[_ModuleRef], None]) -> Self:
        ref = super().__new__(cls, module, callback)
        ref.key = id(module)
        return ref


def _forget(
    ref: _ModuleRef,
    hooked: dict[int, weakref.ref[ModuleHooks]] = _HOOKED,
    is_ending: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Drop the hooks of a module that is gone; do nothing while the interpreter ends, which takes modules apart."""
    # Both come as defaults because at the end of the process the names may be gone already.
    if is_ending():
        return
    hooks_ref = hooked.pop(ref.key, None)
    hooks = hooks_ref() if hooks_ref is not None else None
    for entry in hooks.entries() if hooks is not None else ():
        entry.attachment.drop_entry(entry)
    if not hooked:
        recompile_guard.stop_watching()
