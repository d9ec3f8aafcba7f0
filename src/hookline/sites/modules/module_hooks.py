"""Keep all hooks of ours on one module.

``attach`` and the other verbs add entries and remove them; `RegisteredHooks` tells torch. A module
without hooks has none of ours in torch's dictionaries.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from hookline.errors import UnhookableError
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.op_schemas import new_key
from hookline.sites.hook_at_site import ForwardCounter, HookAtSite
from hookline.sites.kinds import Kind
from hookline.sites.modules.registered_hooks import LOCK as LOCK
from hookline.sites.modules.registered_hooks import RegisteredHooks
from hookline.sites.modules.torch_hooks import LEFT_BEHIND, FirstPreHook, StateHook, drop_left_behind, drop_stale

if TYPE_CHECKING:
    from hookline.sites.hook_at_site import Attachment
    from hookline.sites.modules.call_guard import AroundCall

# Weak, so that a hook which refers to its own model does not keep it alive: the torch hooks on the module hold these.
# (A WeakValueDictionary does the same at three times the price.)
_HOOKED: dict[int, weakref.ref[ModuleHooks]] = {}
_FORWARD: Final = Kind.FORWARD  # looking an enum member up by its class costs 0.2 µs
_FORWARD_KINDS: Final = (Kind.FORWARD, Kind.FORWARD_PRE)
ON_SWEEP: Final[list[Callable[[], None]]] = []
"""Called by `sweep`."""


class ModuleHooks(RegisteredHooks):
    """The hooks of one module."""

    covered = -1
    """Up to which generation of process-wide hooks the module has them all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref = _ModuleRef(module, _forget)
        ref.key = id(module)
        self._by_kind = {}
        self._torch_hooks = {}

    def give_key(self) -> None:
        """Prepare for compiled code, which there may be from now on."""
        self.key = new_key(self)
        for torch_hook in self._torch_hooks.values():
            torch_hook.key = self.key
            torch_hook.prepare()
        self._sync_plan()

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: HookAtSite) -> None:
        """Put a hook in its place."""
        attachment = entry.attachment
        kind = attachment.kind
        if kind is _FORWARD and not self._torch_hooks and self.key is None and not attachment.options.always_call:
            module = self._module()
            if module is not None:
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
        self._drop(module)

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

    def set_around(self, around: AroundCall | None) -> None:
        """Enter ``around`` before each call from the next one on, and leave it after."""
        self.around = around
        module = self._module()
        if module is not None:
            self.sync_guard(module)
            self._sync_pre(module)

    def _drop_if_empty(self) -> None:
        module = self._module()
        if module is not None and not self._by_kind and self.counter is None:
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
        if isinstance(module, torch.jit.ScriptModule):
            raise UnhookableError(
                f"{type(module).__name__} is a ScriptModule: TorchScript does not run Python hooks. "
                "Attach to the module before it is scripted or traced."
            )
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
            counter.stand_in = None
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
