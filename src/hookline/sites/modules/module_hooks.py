"""All hooks of ours on one module, and the ports that torch needs for them.

Takes entries from ``attach``, keeps them in the order they run, hands each port the ones it is to run, and
registers or removes ports so that a module has exactly those that it needs: none, when it has no hooks.
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
from hookline.sites.compiled import recompile_guard as marks
from hookline.sites.compiled.compiled_gradients import plan_of
from hookline.sites.compiled.table_keys import new_key
from hookline.sites.gradients.gradient_hooks import GradientLanes
from hookline.sites.hook_at_site import Entry, Phase
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_endings import Around, CallGuard
from hookline.sites.modules.forward_counter import Root
from hookline.sites.modules.torch_hooks import (
    AnchorPort,
    BackPort,
    FullBackwardPort,
    Port,
    PostBack,
    PostFront,
    PreBack,
    PreFront,
    StatePort,
    drop_stale,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.sites.hook_at_site import Attachment

__all__ = ["LOCK", "ON_SWEEP", "Table", "existing_table", "release_roots", "root_of", "sweep", "table_of"]

LOCK: Final = threading.RLock()
"""Held while hooks come or go; firing takes no lock, it reads tuples that are replaced whole."""

# Weak, so that a hook which refers to its own model does not keep it alive: a table belongs to the ports on
# its module. (A WeakValueDictionary does the same at three times the price.)
_TABLES: dict[int, weakref.ref[Table]] = {}
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
_OBSERVE: Final = Phase.OBSERVE
_GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
_CALLED_FROM_ELSEWHERE: Final = frozenset(
    {Kind.PARAM_GRAD, Kind.REGISTER_MODULE, Kind.REGISTER_PARAMETER, Kind.REGISTER_BUFFER}
)
_Slot: TypeAlias = type[Port] | Kind
_Place: TypeAlias = tuple[dict[int, Any], int, bool]
"""One of torch's dictionaries, the id of our port in it, and whether that has to be first or last."""
_CALLED: Final[dict[str, type[Port]]] = {port.slot: port for port in (PreFront, PreBack, PostFront, PostBack)}
_IN_CALLS: Final = frozenset(_CALLED.values())
_LOADED: Final = ("_load_state_dict_post_hooks", "register_load_state_dict_post_hook")
_SLOTS: Final[dict[_Slot, tuple[type[Port], str, str | None]]] = {
    PreFront: (PreFront, "_forward_pre_hooks", None),
    PreBack: (PreBack, "_forward_pre_hooks", None),
    PostFront: (PostFront, "_forward_hooks", None),
    PostBack: (PostBack, "_forward_hooks", None),
    Kind.FULL_BACKWARD: (FullBackwardPort, "_backward_hooks", "register_full_backward_hook"),
    Kind.STATE_DICT_PRE: (StatePort, "_state_dict_pre_hooks", "register_state_dict_pre_hook"),
    Kind.STATE_DICT_POST: (StatePort, "_state_dict_hooks", "register_state_dict_post_hook"),
    Kind.LOAD_STATE_DICT_PRE: (StatePort, "_load_state_dict_pre_hooks", "register_load_state_dict_pre_hook"),
    Kind.LOAD_STATE_DICT_POST: (StatePort, *_LOADED),
    **dict.fromkeys(_CALLED_FROM_ELSEWHERE, (AnchorPort, *_LOADED)),
}
"""For each slot: its port, torch's dictionary, and how to register there, if not by ``_torch.add_port``."""
ON_SWEEP: Final[list[Callable[[], None]]] = []
"""What else is to be cleared away when hooks come or go."""


class Table(GradientLanes):
    """The hooks of one module."""

    # Defaults of the class, not set one by one for each of ten thousand modules.
    _full_backward_flag: Any = None
    _places: tuple[_Place, ...] | None = None
    guard: CallGuard | None = None
    calls_always = False
    """Whether there are hooks that run however a call ends."""
    around: Around | None = None
    """What is entered before each call of the module and left after it; if it is there, it counts the root's calls."""
    root: Root | None = None
    """Set while hooks are attached through this module, that is with it as the model."""
    entered = -1
    """When the latest call that gradient hooks take part in began."""
    key: torch.Tensor | None = None
    """By which compiled code finds the table; there is none before anything is compiled."""
    _is_marked = False
    covered = -1
    """Up to which generation of process-wide hooks the module has them all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = _ModuleRef(module, _forget)
        if marks.are_needed():
            self.key = new_key(self)
        self._lanes: dict[Kind, tuple[Entry, ...]] = {}
        self._ports: dict[_Slot, Port] = {}

    def port(self, slot: type[Port]) -> Port | None:
        """The port at one end of the queue, if the module has one."""
        return self._ports.get(slot)

    def back_port(self, slot: type[BackPort]) -> BackPort | None:
        """The same for the end of a queue."""
        port = self._ports.get(slot)
        return port if isinstance(port, BackPort) else None

    def port_called(self, name: str) -> Port | None:
        """The port that compiled code knows by that name."""
        return self._ports.get(_CALLED[name])

    def give_key(self) -> None:
        """From now on there may be compiled code."""
        self.key = new_key(self)
        for port in self._ports.values():
            port.key = self.key
            port.prepare()
        self._sync_plan()

    def sync_mark(self) -> None:
        """Mark the module while it has hooks that a compiled call runs."""
        module = self._module()
        if module is not None and PreBack in self._ports:
            self._sync_pre(module)
        needed = not self._ports.keys().isdisjoint(_IN_CALLS)
        if module is not None and needed is not self._is_marked:
            self._is_marked = needed
            (marks.mark if needed else marks.unmark)(module)
        if needed:  # compiled code keeps no places: the root does
            for entry in self.entries():
                entry.root.tables.add(self)

    def module(self) -> nn.Module | None:
        """The module, unless it is gone."""
        return self._module()

    def alive(self) -> bool:
        """Whether the module is still there."""
        return self._module() is not None

    def lane(self, kind: Kind) -> tuple[Entry, ...]:
        """The live hooks of one kind, in the order they run."""
        return self._lanes.get(kind, ())

    def entries(self) -> Iterator[Entry]:
        """Every hook on the module."""
        for lane in self._lanes.values():
            yield from lane

    def always_called(self) -> list[Entry]:
        """The forward hooks that run however the call ends."""
        return [entry for entry in self.lane(_FORWARD) if entry.attachment.always_call]

    # -- coming and going, under LOCK --------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Put a hook in its place."""
        kind = entry.attachment.kind
        lane = self._lanes.get(kind)
        self._lanes[kind] = (entry,) if lane is None else _with(lane, entry)
        self._sync(entry)
        if not self._looks_after_itself():
            entry.root.tables.add(self)

    def discard(self, entry: Entry) -> None:
        """Take a hook off; nothing happens if it is off already."""
        kind = entry.attachment.kind
        lane = self._lanes.get(kind, ())
        if entry not in lane:
            return
        if len(lane) == 1:
            del self._lanes[kind]
        else:
            self._lanes[kind] = tuple(other for other in lane if other is not entry)
        self._sync(entry)
        own = self._looks_after_itself() and not self._is_marked
        if own or not any(other.root is entry.root for other in self.entries()):
            entry.root.tables.discard(self)
        self._drop_if_empty()

    def set_root(self, root: Root | None) -> None:
        """Begin or end counting this module's forwards."""
        self.root = root
        module = self._module()
        if module is not None:
            self._sync_pre(module)
            self._places = None
            if marks.are_needed():
                self.sync_mark()
        self._drop_if_empty()

    def set_around(self, around: Around | None) -> None:
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
            (PreFront, module._forward_pre_hooks, True),
            (PreBack, module._forward_pre_hooks, False),
            (PostFront, module._forward_hooks, True),
            (PostBack, module._forward_hooks, False),
        )
        return tuple((hooks, self._ports[slot].hook_id, first) for slot, hooks, first in queues if slot in self._ports)

    def _sync(self, changed: Entry) -> None:
        """Bring the ports in line with the hooks, after one has come or gone."""
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
                # torch notes at the forward which hooks it will call: a new port keeps new hooks out of old calls.
                self._sync_port(module, kind, ())
            self._sync_port(module, kind, self.lane(kind))
        if changed.attachment.always_call:
            self._sync_guard(module)
        self._places = None
        if marks.are_needed():
            self.sync_mark()

    def _sync_pre(self, module: nn.Module) -> None:
        lane = self.lane(_FORWARD_PRE)
        ticks = self.root is not None and self.around is None
        self._sync_port(module, PreFront, _front(lane), needed=ticks)
        first = self._ports.get(PreFront)
        if isinstance(first, PreFront):
            first.ticks = "t" if ticks else ""
            first.write_recipe()
        # A module with observers looks after their place at the start of each call, whoever makes it. Where there is
        # compiled code, that would be one more thing for it to check, so there the root does it (and `PostBack`).
        needed = PostBack in self._ports and (self.has_gradients or not marks.are_needed())
        self._sync_port(module, PreBack, _back(lane), needed=needed)

    def _sync_post(self, module: nn.Module) -> None:
        lane = self.lane(_FORWARD)
        back = _back(lane)
        always = bool(back) and any(entry.attachment.always_call for entry in back)
        self._sync_port(module, PostFront, _front(lane), needed=always)
        if back or self.has_gradients or PostBack in self._ports:
            self._sync_port(module, PostBack, back, needed=self.has_gradients)
            self._sync_pre(module)

    def _sync_gradients(self, module: nn.Module) -> None:
        self.set_gradient_hooks(*map(self.lane, _GRADIENT_KINDS))
        self.uses_input_once = type(module) in _USE_INPUT_ONCE and not marks.is_replaced(module)
        self._sync_post(module)
        if self.key is not None:
            self._sync_plan()

    def _sync_plan(self) -> None:
        """Have the ports know the gradient hooks as compiled calls do."""
        self.plan = plan_of(self)
        for port in self._ports.values():
            if isinstance(port, BackPort):
                port.plan = self.plan
                port.write_recipe()

    def _sync_port(self, module: nn.Module, slot: _Slot, entries: tuple[Entry, ...], *, needed: bool = False) -> None:
        """One port per slot while it has entries or is needed for something else; none otherwise."""
        port = self._ports.get(slot)
        if entries or needed:
            if port is None:
                port = self._ports[slot] = self._register(module, slot)
            port.put(entries)
        elif port is not None:
            del self._ports[slot]
            if slot is not _FULL_BACKWARD:
                port.put(())
            self._take_off(module, slot, port)

    def _register(self, module: nn.Module, slot: _Slot) -> Port:
        make, attribute, register = _SLOTS[slot]
        port = make(self)
        if register is None:
            port.hook_id = _torch.add_port(module, attribute, port, first=slot in (PreFront, PostFront))
            return port
        if slot is _FULL_BACKWARD:
            self._full_backward_flag = getattr(module, _torch.FULL_BACKWARD_FLAG)
        port.hook_id = getattr(module, register)(port).id
        return port

    def _take_off(self, module: nn.Module, slot: _Slot, port: Port) -> None:
        """Remove a port from torch's dictionary, unless torch may be iterating over that very dictionary.

        torch takes a snapshot of the forward and backward hooks it is about to run, but walks its state-dict
        hooks live: while one of ours runs, only the last of the queue may go. Any other port stays, empty,
        until the next hook comes or goes anywhere.
        """
        attribute = _SLOTS[slot][1]
        is_last = next(reversed(getattr(module, attribute)), None) == port.hook_id
        if isinstance(port, StatePort) and StatePort.running and not is_last:
            _LEFT_BEHIND.append((self._module, attribute, port.hook_id))
            return
        _torch.drop_hook(module, attribute, port.hook_id)
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
        """Whether no port has a place to keep, or only those at the end, which do so without the root's help."""
        if self._ports.keys() <= _CALLED_FROM_ELSEWHERE:
            return True
        pre = self._ports.get(PreBack)
        return pre is not None and not pre.entries and set(self._ports) == {PreBack, PostBack}

    def _drop_if_empty(self) -> None:
        module = self._module()
        if module is not None and not self._lanes and self.root is None:
            _TABLES.pop(id(module), None)
            if not _TABLES:
                marks.let_go()


def existing_table(module: nn.Module) -> Table | None:
    """The module's table, if it has one."""
    ref = _TABLES.get(id(module))
    table = ref() if ref is not None else None
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
        drop_stale(module)
        if not _TABLES:
            marks.hold(_prepare_all)
        marks.tend()
        table = Table(module)
        _TABLES[id(module)] = weakref.ref(table)
    return table


def _prepare_all() -> None:
    """The compiler is about to work for the first time."""
    with LOCK:
        for table in filter(None, (ref() for ref in _TABLES.values())):
            if table.key is None:
                table.give_key()
            table.sync_mark()


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
    for root in list(attachment.roots):  # which shrink when a model is collected
        root.users -= 1
        model = root.model()
        if root.users == 0 and root.stand_in is not None:
            root.stand_in.remove()
            root.stand_in = None
        if root.users == 0 and model is not None:
            table_of(model).set_root(None)


def _rank(entry: Entry) -> tuple[int, bool, int]:
    return entry.attachment.rank


def _with(lane: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    """One more, in its place: nearly always the end, so that a thousand hooks are not sorted a thousand times."""
    place = bisect_right(lane, _rank(entry), key=_rank)
    return (*lane[:place], entry, *lane[place:])


def _front(lane: tuple[Entry, ...]) -> tuple[Entry, ...]:
    if not lane or lane[-1].attachment.phase is not _OBSERVE:
        return lane
    return tuple(entry for entry in lane if entry.attachment.phase is not _OBSERVE)


def _back(lane: tuple[Entry, ...]) -> tuple[Entry, ...]:
    if not lane or lane[-1].attachment.phase is not _OBSERVE:
        return ()
    return tuple(entry for entry in lane if entry.attachment.phase is _OBSERVE)


def sweep() -> None:
    """Remove the ports that could not go when they should have, and what is left of modules that died in a ring."""
    if len(_TABLES) > _Prune.at:
        for key in [key for key, ref in _TABLES.items() if ref() is None]:
            del _TABLES[key]
        _Prune.at = 2 * len(_TABLES) + 64
    if _LEFT_BEHIND and not StatePort.running:
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
    """A weak reference that remembers where its table is kept."""

    __slots__ = ("key",)

    key: int

    def __new__(cls, module: nn.Module, callback: Callable[[_ModuleRef], None]) -> Self:
        ref = super().__new__(cls, module, callback)
        ref.key = id(module)
        return ref


def _forget(
    ref: _ModuleRef,
    tables: dict[int, weakref.ref[Table]] = _TABLES,
    is_ending: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """Drop the table of a module that is gone; nothing while the interpreter ends, which takes modules apart."""
    # Both come as defaults because at the end of the process the names may be gone already.
    if is_ending():
        return
    table_ref = tables.pop(ref.key, None)
    table = table_ref() if table_ref is not None else None
    for entry in table.entries() if table is not None else ():
        entry.attachment.let_go(entry)
    if not tables:
        marks.let_go()
