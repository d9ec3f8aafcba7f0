"""All hooks of ours on one module, and the torch_hooks that torch needs for them.

Takes entries from ``attach``, keeps them in the order they run, hands each torch_hook the ones it is to run, and
registers or removes torch_hooks so that a module has exactly those that it needs: none, when it has no hooks.
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
from hookline.sites.compiled.table_keys import new_key
from hookline.sites.gradients.gradient_hooks import GradientHooks
from hookline.sites.hook_at_site import HookAtSite, OrderGroup
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_endings import AroundCall, CallGuard
from hookline.sites.modules.forward_counter import ForwardCounter
from hookline.sites.modules.torch_hooks import (
    AnchorHook,
    FirstForwardHook,
    FirstPreHook,
    FullBackwardHook,
    LastForwardHook,
    LastHook,
    LastPreHook,
    StateHook,
    TorchHook,
    drop_stale,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.sites.hook_at_site import Attachment

__all__ = [
    "LOCK",
    "ON_SWEEP",
    "ModuleHooks",
    "counter_of",
    "existing_hooks",
    "hooks_of_module",
    "release_counters",
    "sweep",
]

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

# Weak, so that a hook which refers to its own model does not keep it alive: the hooks of a module belong to the torch
# hooks on it. (A WeakValueDictionary does the same at three times the price.)
_TABLES: dict[int, weakref.ref[ModuleHooks]] = {}
_USE_INPUT_ONCE: Final = frozenset(
    {
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.GroupNorm,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.GELU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Softmax,
    }
)
_LEFT_BEHIND: list[tuple[_ModuleRef, str, int]] = []
# Looking an enum member up by its class costs 0.2 µs, ten times over for every module that is hooked.
_FORWARD_PRE: Final = Kind.FORWARD_PRE
_FORWARD: Final = Kind.FORWARD
_FULL_BACKWARD: Final = Kind.FULL_BACKWARD
_OBSERVE: Final = OrderGroup.OBSERVE
_GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
_CALLED_FROM_ELSEWHERE: Final = frozenset(
    {Kind.PARAM_GRAD, Kind.REGISTER_MODULE, Kind.REGISTER_PARAMETER, Kind.REGISTER_BUFFER}
)
_Slot: TypeAlias = type[TorchHook] | Kind
_Place: TypeAlias = tuple[dict[int, Any], int, bool]
"""One of torch's dictionaries, the id of our torch_hook in it, and whether that has to be first or last."""
_CALLED: Final[dict[str, type[TorchHook]]] = {
    torch_hook.slot: torch_hook for torch_hook in (FirstPreHook, LastPreHook, FirstForwardHook, LastForwardHook)
}
_IN_CALLS: Final = frozenset(_CALLED.values())
_LOADED: Final = ("_load_state_dict_post_hooks", "register_load_state_dict_post_hook")
_SLOTS: Final[dict[_Slot, tuple[type[TorchHook], str, str | None]]] = {
    FirstPreHook: (FirstPreHook, "_forward_pre_hooks", None),
    LastPreHook: (LastPreHook, "_forward_pre_hooks", None),
    FirstForwardHook: (FirstForwardHook, "_forward_hooks", None),
    LastForwardHook: (LastForwardHook, "_forward_hooks", None),
    Kind.FULL_BACKWARD: (FullBackwardHook, "_backward_hooks", "register_full_backward_hook"),
    Kind.STATE_DICT_PRE: (StateHook, "_state_dict_pre_hooks", "register_state_dict_pre_hook"),
    Kind.STATE_DICT_POST: (StateHook, "_state_dict_hooks", "register_state_dict_post_hook"),
    Kind.LOAD_STATE_DICT_PRE: (StateHook, "_load_state_dict_pre_hooks", "register_load_state_dict_pre_hook"),
    Kind.LOAD_STATE_DICT_POST: (StateHook, *_LOADED),
    **dict.fromkeys(_CALLED_FROM_ELSEWHERE, (AnchorHook, *_LOADED)),
}
"""For each slot: its torch_hook, torch's dictionary, and how to register there, if not by ``_torch.add_torch_hook``."""
ON_SWEEP: Final[list[Callable[[], None]]] = []
"""What else is to be cleared away when hooks come or go."""


class ModuleHooks(GradientHooks):
    """The hooks of one module."""

    # Defaults of the class, not set one by one for each of ten thousand modules.
    _full_backward_flag: Any = None
    _places: tuple[_Place, ...] | None = None
    guard: CallGuard | None = None
    calls_always = False
    """Whether there are hooks that run however a call ends."""
    around: AroundCall | None = None
    """What is entered before each call of the module and left after it; if it is there, it counts the counter's
    calls."""
    counter: ForwardCounter | None = None
    """Set while hooks are attached through this module, that is with it as the model."""
    entered = -1
    """When the latest call that gradient hooks take part in began."""
    key: torch.Tensor | None = None
    """By which compiled code finds the module_hooks; there is none before anything is compiled."""
    _is_marked = False
    covered = -1
    """Up to which generation of process-wide hooks the module has them all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = _ModuleRef(module, _forget)
        if recompile_guard.is_compiler_used():
            self.key = new_key(self)
        self._by_kind: dict[Kind, tuple[HookAtSite, ...]] = {}
        self._torch_hooks: dict[_Slot, TorchHook] = {}

    def torch_hook(self, slot: type[TorchHook]) -> TorchHook | None:
        """The torch_hook at one end of the queue, if the module has one."""
        return self._torch_hooks.get(slot)

    def last_hook(self, slot: type[LastHook]) -> LastHook | None:
        """The same for the end of a queue."""
        torch_hook = self._torch_hooks.get(slot)
        return torch_hook if isinstance(torch_hook, LastHook) else None

    def torch_hook_named(self, name: str) -> TorchHook | None:
        """The torch_hook that compiled code knows by that name."""
        return self._torch_hooks.get(_CALLED[name])

    def give_key(self) -> None:
        """From now on there may be compiled code."""
        self.key = new_key(self)
        for torch_hook in self._torch_hooks.values():
            torch_hook.key = self.key
            torch_hook.prepare()
        self._sync_plan()

    def sync_mark(self) -> None:
        """Mark the module while it has hooks that a compiled call runs."""
        module = self._module()
        if module is not None and LastPreHook in self._torch_hooks:
            self._sync_pre(module)
        needed = not self._torch_hooks.keys().isdisjoint(_IN_CALLS)
        if module is not None and needed is not self._is_marked:
            self._is_marked = needed
            (recompile_guard.add_own_forward if needed else recompile_guard.drop_own_forward)(module)
        if needed:  # compiled code keeps no places: the counter does
            for entry in self.entries():
                entry.counter.tables.add(self)

    def module(self) -> nn.Module | None:
        """The module, unless it is gone."""
        return self._module()

    def alive(self) -> bool:
        """Whether the module is still there."""
        return self._module() is not None

    def hooks_of_kind(self, kind: Kind) -> tuple[HookAtSite, ...]:
        """The live hooks of one kind, in the order they run."""
        return self._by_kind.get(kind, ())

    def entries(self) -> Iterator[HookAtSite]:
        """Every hook on the module."""
        for hooks in self._by_kind.values():
            yield from hooks

    def always_called(self) -> list[HookAtSite]:
        """The forward hooks that run however the call ends."""
        return [entry for entry in self.hooks_of_kind(_FORWARD) if entry.attachment.always_call]

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: HookAtSite) -> None:
        """Put a hook in its place."""
        kind = entry.attachment.kind
        hooks = self._by_kind.get(kind)
        self._by_kind[kind] = (entry,) if hooks is None else _with(hooks, entry)
        self._sync(entry)
        if not self._looks_after_itself():
            entry.counter.tables.add(self)

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; nothing happens if it is off already."""
        kind = entry.attachment.kind
        hooks = self._by_kind.get(kind, ())
        if entry not in hooks:
            return
        if len(hooks) == 1:
            del self._by_kind[kind]
        else:
            self._by_kind[kind] = tuple(other for other in hooks if other is not entry)
        self._sync(entry)
        own = self._looks_after_itself() and not self._is_marked
        if own or not any(other.counter is entry.counter for other in self.entries()):
            entry.counter.tables.discard(self)
        self._drop_if_empty()

    def set_counter(self, counter: ForwardCounter | None) -> None:
        """Begin or end counting this module's forwards."""
        self.counter = counter
        module = self._module()
        if module is not None:
            self._sync_pre(module)
            self._places = None
            if recompile_guard.is_compiler_used():
                self.sync_mark()
        self._drop_if_empty()

    def set_around(self, around: AroundCall | None) -> None:
        """From the next call on, this is entered before it and left after it."""
        self.around = around
        module = self._module()
        if module is not None:
            self._sync_guard(module)
            self._sync_pre(module)

    def keep_places(self) -> None:
        """Put our edits before, and our observers after, hooks that others have registered since."""
        places = self._places
        if places is None:
            places = self._places = self._find_places()
        for hooks, hook_id, first in places:
            if len(hooks) == 1:
                continue
            try:
                in_place = next(iter(hooks) if first else reversed(hooks), None) == hook_id
            except RuntimeError:  # another thread is at it; there is another call
                continue
            if not in_place:
                with LOCK:
                    if hook_id in hooks:
                        (_torch.place_first if first else _torch.place_last)(hooks, hook_id)

    def _find_places(self) -> tuple[_Place, ...]:
        module = self._module()
        if module is None:
            return ()
        queues = (
            (FirstPreHook, module._forward_pre_hooks, True),
            (LastPreHook, module._forward_pre_hooks, False),
            (FirstForwardHook, module._forward_hooks, True),
            (LastForwardHook, module._forward_hooks, False),
        )
        return tuple(
            (hooks, self._torch_hooks[slot].hook_id, first)
            for slot, hooks, first in queues
            if slot in self._torch_hooks
        )

    def _sync(self, changed: HookAtSite) -> None:
        """Bring the torch_hooks in line with the hooks, after one has come or gone."""
        module = self._module()
        if module is None:
            return
        kind = changed.attachment.kind
        if kind in _GRADIENT_KINDS:
            self._sync_gradients(module)
        elif kind is _FORWARD_PRE:
            self._sync_pre(module)
        elif kind is _FORWARD:
            self._sync_post(module)
        else:
            if kind is _FULL_BACKWARD and not changed.attachment.removed and not changed.attachment.everywhere:
                # torch notes at the forward which hooks it will call: a new one keeps new hooks out of old calls.
                self._sync_torch_hook(module, kind, ())
            self._sync_torch_hook(module, kind, self.hooks_of_kind(kind))
        if changed.attachment.always_call:
            self._sync_guard(module)
        self._places = None
        if recompile_guard.is_compiler_used():
            self.sync_mark()

    def _sync_pre(self, module: nn.Module) -> None:
        hooks = self.hooks_of_kind(_FORWARD_PRE)
        ticks = self.counter is not None and self.around is None
        self._sync_torch_hook(module, FirstPreHook, _front(hooks), needed=ticks)
        first = self._torch_hooks.get(FirstPreHook)
        if isinstance(first, FirstPreHook):
            first.ticks = "t" if ticks else ""
            first.write_recipe()
        # A module with observers looks after their place at the start of each call, whoever makes it. Where there is
        # compiled code, that would be one more guard, so there the counter does it (and `LastForwardHook`).
        needed = LastForwardHook in self._torch_hooks and (self.has_gradients or not recompile_guard.is_compiler_used())
        self._sync_torch_hook(module, LastPreHook, _back(hooks), needed=needed)

    def _sync_post(self, module: nn.Module) -> None:
        hooks = self.hooks_of_kind(_FORWARD)
        back = _back(hooks)
        always = bool(back) and any(entry.attachment.always_call for entry in back)
        self._sync_torch_hook(module, FirstForwardHook, _front(hooks), needed=always)
        if back or self.has_gradients or LastForwardHook in self._torch_hooks:
            self._sync_torch_hook(module, LastForwardHook, back, needed=self.has_gradients)
            self._sync_pre(module)

    def _sync_gradients(self, module: nn.Module) -> None:
        self.set_gradient_hooks(*map(self.hooks_of_kind, _GRADIENT_KINDS))
        self.uses_input_once = type(module) in _USE_INPUT_ONCE and not recompile_guard.is_forward_replaced(module)
        self._sync_post(module)
        if self.key is not None:
            self._sync_plan()

    def _sync_plan(self) -> None:
        """Have the torch_hooks know the gradient hooks as compiled calls do."""
        self.plan = plan_of(self)
        for torch_hook in self._torch_hooks.values():
            if isinstance(torch_hook, LastHook):
                torch_hook.plan = self.plan
                torch_hook.write_recipe()

    def _sync_torch_hook(
        self, module: nn.Module, slot: _Slot, entries: tuple[HookAtSite, ...], *, needed: bool = False
    ) -> None:
        """One torch_hook per slot while it has entries or is needed for something else; none otherwise."""
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
        make, attribute, register = _SLOTS[slot]
        torch_hook = make(self)
        if register is None:
            torch_hook.hook_id = _torch.add_torch_hook(
                module, attribute, torch_hook, first=slot in (FirstPreHook, FirstForwardHook)
            )
            return torch_hook
        if slot is _FULL_BACKWARD:
            self._full_backward_flag = getattr(module, _torch.FULL_BACKWARD_FLAG)
        torch_hook.hook_id = getattr(module, register)(torch_hook).id
        return torch_hook

    def _take_off(self, module: nn.Module, slot: _Slot, torch_hook: TorchHook) -> None:
        """Remove a torch_hook from torch's dictionary, unless torch may be iterating over that very dictionary.

        torch takes a snapshot of the forward and backward hooks it is about to run, but walks its state-dict
        hooks live: while one of ours runs, only the last of the queue may go. Any other torch_hook stays, empty,
        until the next hook comes or goes anywhere.
        """
        attribute = _SLOTS[slot][1]
        is_last = next(reversed(getattr(module, attribute)), None) == torch_hook.hook_id
        if isinstance(torch_hook, StateHook) and StateHook.running and not is_last:
            _LEFT_BEHIND.append((self._module, attribute, torch_hook.hook_id))
            return
        _torch.drop_hook(module, attribute, torch_hook.hook_id)
        if slot is _FULL_BACKWARD and not module._backward_hooks:
            setattr(module, _torch.FULL_BACKWARD_FLAG, self._full_backward_flag)

    def _sync_guard(self, module: nn.Module) -> None:
        """The wrapper around the whole call, while there are hooks that run however it ends, or something around it."""
        self.calls_always = bool(self.always_called())
        if self.around is not None or self.calls_always:
            if self.guard is None:
                self.guard = module.__dict__[_torch.CALL_IMPL] = CallGuard(self, module)
        elif self.guard is not None:
            if module.__dict__.get(_torch.CALL_IMPL) is self.guard:
                del module.__dict__[_torch.CALL_IMPL]
            self.guard = None

    def _looks_after_itself(self) -> bool:
        """Whether no torch_hook has a place to keep, or only those at the end, which do so without the counter's
        help."""
        if self._torch_hooks.keys() <= _CALLED_FROM_ELSEWHERE:
            return True
        pre = self._torch_hooks.get(LastPreHook)
        return pre is not None and not pre.entries and set(self._torch_hooks) == {LastPreHook, LastForwardHook}

    def _drop_if_empty(self) -> None:
        module = self._module()
        if module is not None and not self._by_kind and self.counter is None:
            _TABLES.pop(id(module), None)
            if not _TABLES:
                recompile_guard.stop_watching()


def existing_hooks(module: nn.Module) -> ModuleHooks | None:
    """The module's module_hooks, if it has one."""
    ref = _TABLES.get(id(module))
    module_hooks = ref() if ref is not None else None
    return module_hooks if module_hooks is not None and module_hooks.module() is module else None


def hooks_of_module(module: nn.Module) -> ModuleHooks:
    """The module's module_hooks, made if it has none."""
    module_hooks = existing_hooks(module)
    if module_hooks is None:
        if isinstance(module, torch.jit.ScriptModule):
            raise UnhookableError(
                f"{type(module).__name__} is a ScriptModule: TorchScript does not run Python hooks. "
                "Attach to the module before it is scripted or traced."
            )
        drop_stale(module)
        if not _TABLES:
            recompile_guard.watch_compiler(_prepare_all)
        recompile_guard.check_compiler()
        module_hooks = ModuleHooks(module)
        _TABLES[id(module)] = weakref.ref(module_hooks)
    return module_hooks


def _prepare_all() -> None:
    """The compiler is about to work for the first time."""
    with LOCK:
        for module_hooks in filter(None, (ref() for ref in _TABLES.values())):
            if module_hooks.key is None:
                module_hooks.give_key()
            module_hooks.sync_mark()


def counter_of(model: nn.Module) -> ForwardCounter:
    """The counter that counts a model's forwards, for one more attachment; give it back with `release_counters`."""
    module_hooks = hooks_of_module(model)
    if module_hooks.counter is None:
        module_hooks.set_counter(ForwardCounter(model))
    assert module_hooks.counter is not None
    module_hooks.counter.users += 1
    return module_hooks.counter


def release_counters(attachment: Attachment) -> None:
    """The attachment is off; the last one through a model takes the counting with it."""
    for counter in list(attachment.counters):  # which shrink when a model is collected
        counter.users -= 1
        model = counter.model()
        if counter.users == 0 and counter.stand_in is not None:
            counter.stand_in.remove()
            counter.stand_in = None
        if counter.users == 0 and model is not None:
            hooks_of_module(model).set_counter(None)


def _rank(entry: HookAtSite) -> tuple[int, bool, int]:
    return entry.attachment.rank


def _with(hooks: tuple[HookAtSite, ...], entry: HookAtSite) -> tuple[HookAtSite, ...]:
    """One more, in its place: nearly always the end, so that a thousand hooks are not sorted a thousand times."""
    place = bisect_right(hooks, _rank(entry), key=_rank)
    return (*hooks[:place], entry, *hooks[place:])


def _front(hooks: tuple[HookAtSite, ...]) -> tuple[HookAtSite, ...]:
    if not hooks or hooks[-1].attachment.order_group is not _OBSERVE:
        return hooks
    return tuple(entry for entry in hooks if entry.attachment.order_group is not _OBSERVE)


def _back(hooks: tuple[HookAtSite, ...]) -> tuple[HookAtSite, ...]:
    if not hooks or hooks[-1].attachment.order_group is not _OBSERVE:
        return ()
    return tuple(entry for entry in hooks if entry.attachment.order_group is _OBSERVE)


def sweep() -> None:
    """Remove the torch_hooks that could not go when they should have, and what is left of modules that died in a
    ring."""
    if len(_TABLES) > _Prune.at:
        for key in [key for key, ref in _TABLES.items() if ref() is None]:
            del _TABLES[key]
        _Prune.at = 2 * len(_TABLES) + 64
    if _LEFT_BEHIND and not StateHook.running:
        for module_ref, attribute, hook_id in _LEFT_BEHIND:
            module = module_ref()
            if module is not None:
                _torch.drop_hook(module, attribute, hook_id)
        _LEFT_BEHIND.clear()
    for clear in ON_SWEEP:
        clear()


class _Prune:
    """When to look through the tables next: twice as many, twice as late."""

    at = 64


class _ModuleRef(weakref.ref[nn.Module]):
    """A weak reference that remembers where its module_hooks is kept."""

    __slots__ = ("key",)

    key: int

    def __new__(cls, module: nn.Module, callback: Callable[[_ModuleRef], None]) -> Self:
        ref = super().__new__(cls, module, callback)
        ref.key = id(module)
        return ref


def _forget(
    ref: _ModuleRef,
    tables: dict[int, weakref.ref[ModuleHooks]] = _TABLES,
    is_ending: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Drop the module_hooks of a module that is gone; nothing while the interpreter ends, which takes modules apart."""
    # Both come as defaults because at the end of the process the names may be gone already.
    if is_ending():
        return
    table_ref = tables.pop(ref.key, None)
    module_hooks = table_ref() if table_ref is not None else None
    for entry in module_hooks.entries() if module_hooks is not None else ():
        entry.attachment.let_go(entry)
    if not tables:
        recompile_guard.stop_watching()
