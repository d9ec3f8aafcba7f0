"""Keep all hooks of ours on one module.

``attach`` and the other verbs add entries and remove them; `RegisteredHooks` tells torch. A module
without hooks has none of ours in torch's dictionaries.
"""

from __future__ import annotations

import operator
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from hookline.errors import UnhookableError
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.op_schemas import HookChanges, new_key
from hookline.sites.hook_at_site import ForwardCounter, HookAtSite, OrderGroup
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_guard import COPIES
from hookline.sites.modules.registered_hooks import GRADIENT_KINDS, RegisteredHooks, Slot, split_queue
from hookline.sites.modules.registered_hooks import LOCK as LOCK
from hookline.sites.modules.torch_hooks import (
    CALLED_FROM_ELSEWHERE,
    LEFT_BEHIND,
    OTHERS,
    QUEUES,
    FirstForwardHook,
    FirstPreHook,
    LastForwardHook,
    LastPreHook,
    StateHook,
    TorchHook,
    drop_left_behind,
    drop_stale,
)

if TYPE_CHECKING:
    from hookline.sites.hook_at_site import Attachment

# Weak, so that a hook which refers to its own model does not keep it alive: the torch hooks on the module hold these.
_HOOKED: dict[int, weakref.ref[ModuleHooks]] = {}
# Looking an enum member up by its class costs 0.2 µs, ten times over for every module that is hooked.
_SCRIPTED: Final = torch.jit.ScriptModule
_FORWARD: Final = Kind.FORWARD
_FORWARD_PRE: Final = Kind.FORWARD_PRE
_FULL_BACKWARD: Final = Kind.FULL_BACKWARD
_IS_ALWAYS_CALLED: Final = operator.attrgetter("attachment.options.always_call")
_LAST_ONLY: Final = frozenset({LastPreHook, LastForwardHook})
_OBSERVE: Final = OrderGroup.OBSERVE
_FORWARD_KINDS: Final = (Kind.FORWARD, Kind.FORWARD_PRE)
_DICTS_OF_SLOT: Final = {slot: (name, _torch.HOOK_DICTS[name][0]) for slot, (name, _) in QUEUES.items()}
"""The two of torch's dictionaries that `_torch.add_torch_hook` writes to."""
_Position: TypeAlias = tuple[dict[int, Any], int, bool]
"""One of torch's dictionaries, the id of our torch hook in it, and whether that has to be first or last."""
ON_SWEEP: Final[list[Callable[[], None]]] = []
"""Called by `sweep`."""


class ModuleHooks(RegisteredHooks):
    """The hooks of one module."""

    _positions: tuple[_Position, ...] | None = None
    covered = -1
    """Up to which generation of process-wide hooks the module has them all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref = _ModuleRef(module, _forget)
        ref.key = id(module)
        self._by_kind = {}
        self._torch_hooks = {}

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: HookAtSite) -> None:
        """Put a hook in its place."""
        attachment = entry.attachment
        kind = attachment.kind
        is_only = not self._torch_hooks and self.key is None and not attachment.options.always_call
        if kind is _FORWARD and is_only and (module := self._module()) is not None:
            self._by_kind[kind] = (entry,)
            self._put_only(module, entry)
            return
        hooks = self._by_kind.get(kind)
        self._by_kind[kind] = (entry,) if hooks is None else _with(hooks, entry)
        self._sync(entry)
        if not self._keeps_own_places():
            entry.counter.hooked.add(self)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; do nothing if it is off already."""
        attachment = entry.attachment
        kind = attachment.kind
        hooks = self._by_kind.get(kind, ())
        if entry not in hooks:
            return
        if len(hooks) == 1:
            del self._by_kind[kind]
        else:
            self._by_kind[kind] = tuple(other for other in hooks if other is not entry)
        module = self._module()
        if self._by_kind or self.counter is not None or self.key is not None or module is None:
            self._sync(entry)
            own = self._keeps_own_places() and not self._has_own_forward
            if own or not any(other.counter is entry.counter for other in self.entries()):
                entry.counter.hooked.discard(self)
            self._drop_if_empty()
            return
        if kind not in _FORWARD_KINDS or attachment.options.always_call:
            self._sync(entry)
        else:
            self._take_all_off(module)
        entry.counter.hooked.discard(self)
        _HOOKED.pop(id(module), None)
        if not _HOOKED:
            recompile_guard.stop_watching()

    def set_counter(self, counter: ForwardCounter | None) -> None:
        """Begin or end counting this module's forwards."""
        self.counter = counter
        module = self._module()
        if module is None:
            return
        if self.key is None and not self._by_kind and self.around is None:  # no hooks beside it: see `_put_only`
            if counter is None:
                self._take_all_off(module)
                self._drop(module)
            elif not self._torch_hooks:
                self._put_one(module, FirstPreHook, ())
                self._torch_hooks[FirstPreHook].ticks = "t"
            return
        self._sync_pre(module)
        self._positions = None
        if recompile_guard.is_compiler_used():
            self.sync_compiled()
        self._drop_if_empty()

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

        It comes to what `_sync` would do, in 3 calls of Python instead of 9: of 10,000 modules each takes 1 ms.
        """
        if entry.attachment.order_group is not _OBSERVE:
            hook_id = self._put_one(module, FirstForwardHook, (entry,))
            self._positions = ((module._forward_hooks, hook_id, True),)
            entry.counter.hooked.add(self)
            return
        self._put_one(module, LastForwardHook, (entry,))
        self._put_one(module, LastPreHook, ())

    def _put_one(self, module: nn.Module, slot: type[TorchHook], entries: tuple[HookAtSite, ...]) -> int:
        torch_hook = self._torch_hooks[slot] = slot(self)
        torch_hook.entries = entries
        attribute, first = QUEUES[slot]
        hook_id = torch_hook.hook_id = _torch.add_torch_hook(module, attribute, torch_hook, first=first)
        return hook_id

    def _take_all_off(self, module: nn.Module) -> None:
        """Remove the torch hooks around the calls of a module without hooks, where there is no compiled code."""
        own, state = self._torch_hooks, module.__dict__
        for slot, torch_hook in own.items():
            torch_hook.entries = ()
            hooks, options = _DICTS_OF_SLOT[slot]
            state[hooks].pop(torch_hook.hook_id, None)
            state[options].pop(torch_hook.hook_id, None)
        self._torch_hooks = {}
        if self._positions is not None:
            self._positions = None

    def _sync(self, changed: HookAtSite) -> None:
        """Register and remove torch hooks as the hooks need it, after one has come or gone."""
        HookChanges.count += 1
        module = self._module()
        if module is None:
            return
        attachment = changed.attachment
        kind = attachment.kind
        if attachment.options.with_kwargs:  # before another thread's call comes to it
            self._hand_kwargs(module, wanted=True)
        if kind in GRADIENT_KINDS:
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
        if (first := own.get(FirstPreHook)) is not None:
            first.ticks = "t" if counts else ""
            if self.key is not None:
                first.write_recipe()
        begins_late, needed = self._how_calls_begin(module, has_observers=bool(late))
        if late or needed or LastPreHook in own:
            self._sync_torch_hook(module, LastPreHook, late, needed=needed)
        self._set_begins_late(begins_late)

    def _sync_post(self, module: nn.Module) -> None:
        early, late = split_queue(self._by_kind.get(_FORWARD, ()))
        always = any(map(_IS_ALWAYS_CALLED, late))
        if early or always or FirstForwardHook in self._torch_hooks:
            self._sync_torch_hook(module, FirstForwardHook, early, needed=always)
        if late or self.has_gradients or LastForwardHook in self._torch_hooks:
            self._sync_torch_hook(module, LastForwardHook, late, needed=self.has_gradients)
            self._sync_pre(module)

    def _sync_torch_hook(
        self, module: nn.Module, slot: Slot, entries: tuple[HookAtSite, ...], *, needed: bool = False
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

    def _register(self, module: nn.Module, slot: Slot) -> TorchHook:
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

    def _keeps_own_places(self) -> bool:
        """Return whether no torch hook has a place to keep, or only the last ones, which do so themselves."""
        own = self._torch_hooks
        pre = own.get(LastPreHook)
        if pre is None:
            return own.keys() <= CALLED_FROM_ELSEWHERE
        return not pre.entries and own.keys() == _LAST_ONLY

    def _drop_if_empty(self) -> None:
        if (module := self._module()) is not None and not self._by_kind and self.counter is None:
            self._drop(module)

    def _drop(self, module: nn.Module) -> None:
        _HOOKED.pop(id(module), None)
        if not _HOOKED:
            recompile_guard.stop_watching()


def existing_hooks(module: nn.Module) -> ModuleHooks | None:
    """Return the hooks of a module, if it has any."""
    ref = _HOOKED.get(id(module))
    hooks = ref() if ref is not None else None
    return hooks if hooks is not None and hooks._module() is module else None


def hooks_of_module(module: nn.Module) -> ModuleHooks:
    """Return the hooks of a module, made if it has none."""
    hooks = existing_hooks(module)
    if hooks is None:
        if isinstance(module, _SCRIPTED):
            raise UnhookableError(
                f"{type(module).__name__} is a ScriptModule: TorchScript does not run Python hooks. "
                "Attach to the module before it is scripted or traced."
            )
        if COPIES:
            drop_stale(module)
        if not _HOOKED:
            recompile_guard.watch_compiler(_prepare_all)
        hooks = ModuleHooks(module)
        if recompile_guard.is_compiler_used():
            hooks.key = new_key(hooks)
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
    if _HOOKED:  # the first hook begins to watch for compilations, and so checks
        recompile_guard.check_compiler()
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
        hooks = existing_hooks(model) if counter.users == 0 and model is not None else None
        if hooks is not None:
            hooks.set_counter(None)


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
