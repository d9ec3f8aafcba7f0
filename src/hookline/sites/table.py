"""All hooks of ours on one module, and the ports that torch needs for them.

Takes entries from ``attach``, keeps them in the order they run, hands each port the ones it is to run, and
registers or removes ports so that a module has exactly those that it needs: none, when it has no hooks.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from hookline.errors import UnhookableError
from hookline.sites import _torch
from hookline.sites.always import CallGuard
from hookline.sites.entry import Entry, Phase
from hookline.sites.kinds import Kind
from hookline.sites.ports import (
    FullBackwardPort,
    Port,
    PostBack,
    PostFront,
    PreBack,
    PreFront,
    StatePort,
    drop_stale,
)
from hookline.sites.root import Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from hookline.sites.entry import Attachment
    from hookline.sites.gradients import Carrier

__all__ = ["LOCK", "Table", "existing_table", "release_roots", "root_of", "sweep", "table_of", "tables_in"]

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

_TABLES: dict[int, Table] = {}
_LEFT_BEHIND: list[RemovableHandle] = []
_GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
_Slot: TypeAlias = type[Port] | Kind
_REGISTRARS: Final[dict[_Slot, tuple[type[Port], str, dict[str, bool]]]] = {
    PreFront: (PreFront, "register_forward_pre_hook", {"with_kwargs": True, "prepend": True}),
    PreBack: (PreBack, "register_forward_pre_hook", {"with_kwargs": True}),
    PostFront: (PostFront, "register_forward_hook", {"with_kwargs": True, "prepend": True}),
    PostBack: (PostBack, "register_forward_hook", {"with_kwargs": True}),
    Kind.FULL_BACKWARD: (FullBackwardPort, "register_full_backward_hook", {}),
    Kind.STATE_DICT_PRE: (StatePort, "register_state_dict_pre_hook", {}),
    Kind.STATE_DICT_POST: (StatePort, "register_state_dict_post_hook", {}),
    Kind.LOAD_STATE_DICT_PRE: (StatePort, "register_load_state_dict_pre_hook", {}),
    Kind.LOAD_STATE_DICT_POST: (StatePort, "register_load_state_dict_post_hook", {}),
}


class Table:
    """The hooks of one module."""

    __slots__ = (
        "__weakref__",
        "_full_backward_flag",
        "_lanes",
        "_module",
        "_ports",
        "_watched_by",
        "calls_seen",
        "covered",
        "early",
        "edits_gradients",
        "guard",
        "has_gradients",
        "root",
    )

    def __init__(self, module: nn.Module) -> None:
        key = id(module)
        self._module = weakref.ref(module, lambda _: _TABLES.pop(key, None))
        self._lanes: dict[Kind, tuple[Entry, ...]] = {}
        self._ports: dict[_Slot, tuple[Port, RemovableHandle]] = {}
        self._watched_by: set[Root] = set()
        self._full_backward_flag: Any = None
        self.guard: CallGuard | None = None
        self.root: Root | None = None
        """Set while hooks are attached through this module, that is with it as the model."""
        self.calls_seen = 0
        """How often the module was called while it had gradient hooks."""
        self.covered = -1
        """Up to which generation of process-wide hooks the module has them all."""
        self.early: Carrier | None = None
        """What was prepared for the call under way when the module had no ports yet."""
        self.has_gradients = False
        self.edits_gradients = False
        """Whether a gradient hook may return a value, so that inputs have to go in as aliases."""

    def port(self, slot: type[Port]) -> Port | None:
        """The port at one end of the queue, if the module has one."""
        registered = self._ports.get(slot)
        return registered[0] if registered is not None else None

    def module(self) -> nn.Module | None:
        """The module, unless it is gone."""
        return self._module()

    def lane(self, kind: Kind) -> tuple[Entry, ...]:
        """The live hooks of one kind, in the order they run."""
        return self._lanes.get(kind, ())

    def entries(self) -> Iterator[Entry]:
        """Every hook on the module."""
        for lane in self._lanes.values():
            yield from lane

    def always_called(self) -> list[Entry]:
        """The forward hooks that run however the call ends."""
        return [entry for entry in self.lane(Kind.FORWARD) if entry.attachment.always_call]

    def gradient_moments(self) -> dict[Root, tuple[int, int]]:
        """Step and call number of the call that begins now, for gradient hooks that want to know."""
        entries = [entry for kind in _GRADIENT_KINDS for entry in self.lane(kind) if entry.attachment.wants_site]
        return {root: root.moment(self) for root in {entry.root for entry in entries}}

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Put a hook in its place."""
        kind = entry.attachment.kind
        lane = list(self.lane(kind))
        bisect.insort(lane, entry, key=lambda other: other.rank)
        self._lanes[kind] = tuple(lane)
        self._sync(kind)

    def discard(self, entry: Entry) -> None:
        """Take a hook off; nothing happens if it is off already."""
        kind = entry.attachment.kind
        lane = tuple(other for other in self.lane(kind) if other is not entry)
        if len(lane) == len(self.lane(kind)):
            return
        if lane:
            self._lanes[kind] = lane
        else:
            del self._lanes[kind]
        self._sync(kind)
        self._drop_if_empty()

    def set_root(self, root: Root | None) -> None:
        """Begin or end counting this module's forwards."""
        self.root = root
        self._sync(Kind.FORWARD_PRE)
        self._drop_if_empty()

    def keep_last(self) -> None:
        """Make our observers run after hooks that others have registered since."""
        module = self._module()
        if module is None:
            return
        for port, hooks in ((PreBack, module._forward_pre_hooks), (PostBack, module._forward_hooks)):
            registered = self._ports.get(port)
            if registered is not None:
                _torch.place_last(hooks, registered[1].id)

    def _sync(self, kind: Kind) -> None:
        """Bring the ports in line with the hooks of one kind."""
        module = self._module()
        if module is None:
            return
        lane = self.lane(kind)
        if kind in _GRADIENT_KINDS:
            self._sync_gradients(module)
        elif kind is Kind.FORWARD_PRE:
            self._sync_port(module, PreFront, _front(lane), needed=self.root is not None)
            self._sync_port(module, PreBack, _back(lane), needed=self.has_gradients)
        elif kind is Kind.FORWARD:
            self._sync_port(module, PostFront, _front(lane))
            self._sync_port(module, PostBack, _back(lane), needed=self.has_gradients)
            self._sync_guard(module)
        else:
            self._sync_port(module, kind, lane)
        self._sync_observed()

    def _sync_gradients(self, module: nn.Module) -> None:
        pre, post = (self.lane(kind) for kind in _GRADIENT_KINDS)
        self.has_gradients = bool(pre or post)
        self.edits_gradients = any(entry.attachment.may_edit and entry.attachment.phase is Phase.EDIT for entry in post)
        self._sync_port(module, PreBack, _back(self.lane(Kind.FORWARD_PRE)), needed=self.has_gradients)
        self._sync_port(module, PostBack, _back(self.lane(Kind.FORWARD)), needed=self.has_gradients)

    def _sync_port(self, module: nn.Module, slot: _Slot, entries: tuple[Entry, ...], *, needed: bool = False) -> None:
        """One port per slot while it has entries or is needed for something else; none otherwise."""
        registered = self._ports.get(slot)
        if entries or needed:
            if registered is None:
                registered = self._ports[slot] = self._register(module, slot)
            registered[0].entries = entries
        elif registered is not None:
            port, handle = self._ports.pop(slot)
            port.entries = ()
            _take_off(slot, handle)
            if slot is Kind.FULL_BACKWARD and not module._backward_hooks:
                setattr(module, _torch.FULL_BACKWARD_FLAG, self._full_backward_flag)

    def _register(self, module: nn.Module, slot: _Slot) -> tuple[Port, RemovableHandle]:
        drop_stale(module)
        if slot is Kind.FULL_BACKWARD:
            self._full_backward_flag = getattr(module, _torch.FULL_BACKWARD_FLAG)
        make, register, options = _REGISTRARS[slot]
        port = make(self)
        handle: RemovableHandle = getattr(module, register)(port, **options)
        if slot is PreFront:
            _torch.place_first(module._forward_pre_hooks, handle.id)
        elif slot is PreBack or slot is PostBack:
            self._ports[slot] = port, handle
            self.keep_last()
        return port, handle

    def _sync_guard(self, module: nn.Module) -> None:
        """The wrapper around the whole call, while there are hooks that run however it ends."""
        if self.always_called():
            if self.guard is None:
                self.guard = module.__dict__[_torch.CALL_IMPL] = CallGuard(self)
        elif self.guard is not None:
            if module.__dict__.get(_torch.CALL_IMPL) is self.guard:
                del module.__dict__[_torch.CALL_IMPL]
            self.guard = None

    def _sync_observed(self) -> None:
        """Have the roots of our observers look after their place at the end of the queue."""
        kinds = (Kind.FORWARD_PRE, Kind.FORWARD, *_GRADIENT_KINDS)
        entries = [entry for kind in kinds for entry in self.lane(kind)]
        for root in {entry.root for entry in self.entries()} | self._watched_by:
            wanted = any(
                entry.root is root and (entry.attachment.phase is Phase.OBSERVE or entry.attachment.kind.is_gradient)
                for entry in entries
            )
            if wanted:
                root.observed.add(self)
                self._watched_by.add(root)
            else:
                root.observed.discard(self)
                self._watched_by.discard(root)

    def _drop_if_empty(self) -> None:
        module = self._module()
        if module is not None and not self._lanes and self.root is None:
            _TABLES.pop(id(module), None)


def existing_table(module: nn.Module) -> Table | None:
    """The module's table, if it has one."""
    table = _TABLES.get(id(module))
    return table if table is not None and table.module() is module else None


def table_of(module: nn.Module) -> Table:
    """The module's table, made if it has none."""
    table = existing_table(module)
    if table is None:
        if isinstance(module, torch.jit.ScriptModule):
            raise UnhookableError(
                f"{type(module).__name__} is a ScriptModule: TorchScript does not run Python hooks. "
                "Attach to the module before it is scripted or traced."
            )
        table = _TABLES[id(module)] = Table(module)
    return table


def root_of(model: nn.Module) -> Root:
    """The root that counts a model's forwards, for one more attachment; give it back with `release_roots`."""
    table = table_of(model)
    if table.root is None:
        table.set_root(Root(model))
    assert table.root is not None
    table.root.users += 1
    return table.root


def release_roots(attachment: Attachment) -> None:
    """The attachment is off; the last one through a model takes the counting with it."""
    for root in attachment.roots:
        root.users -= 1
        model = root.model()
        if root.users == 0 and model is not None:
            table_of(model).set_root(None)


def tables_in(model: nn.Module) -> Iterator[tuple[str, Table]]:
    """The tables of a model's modules, under the first name of each."""
    for name, module in model.named_modules():
        table = existing_table(module)
        if table is not None:
            yield name, table


def _front(lane: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return tuple(entry for entry in lane if entry.attachment.phase is not Phase.OBSERVE)


def _back(lane: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return tuple(entry for entry in lane if entry.attachment.phase is Phase.OBSERVE)


def _take_off(slot: _Slot, handle: RemovableHandle) -> None:
    """Remove a port from torch's dictionary, unless torch may be iterating over that very dictionary.

    torch takes a snapshot of the forward and backward hooks it is about to run, but walks its state-dict
    hooks live: while one of ours runs, only the last of the queue may go. Any other port stays, empty, until
    the next hook comes or goes anywhere.
    """
    hooks = handle.hooks_dict_ref()
    is_last = hooks is not None and next(reversed(hooks), None) == handle.id
    if isinstance(slot, Kind) and slot.is_state and StatePort.running and not is_last:
        _LEFT_BEHIND.append(handle)
    else:
        handle.remove()


def sweep() -> None:
    """Remove the ports that could not go when they should have."""
    if _LEFT_BEHIND and not StatePort.running:
        for handle in _LEFT_BEHIND:
            handle.remove()
        _LEFT_BEHIND.clear()
