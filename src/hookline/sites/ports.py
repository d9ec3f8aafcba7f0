"""What torch calls: at most one hook of ours per module, kind and end of the queue, with a live table behind it.

Takes torch's hook calls, runs the entries of its `Table`, hands back edits. A port reads its entries anew at
each call, so removal takes effect at once; torch looks hook options up while it iterates, so a port also
bears being called without the keyword arguments it asked for, when it was taken off in the middle of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hookline.errors import HookReturnError
from hookline.sites import _torch
from hookline.sites.always import StaleGuard
from hookline.sites.entry import Phase
from hookline.sites.gradient_inputs import Carrier
from hookline.sites.gradients import GradientCall

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.entry import Entry
    from hookline.sites.table import Table

__all__ = [
    "AnchorPort",
    "BackPort",
    "FullBackwardPort",
    "Port",
    "PostBack",
    "PostFront",
    "PreBack",
    "PreFront",
    "StalePort",
    "StatePort",
    "drop_stale",
]

_ABSENT: Any = object()
_WHERE_STALE = (*_torch.HOOK_DICTS, _torch.CALL_IMPL)
_EDIT = Phase.EDIT  # looking an enum member up by its class costs 0.2 µs


class Port:
    """Base of everything that hookline registers with torch."""

    __slots__ = ("__weakref__", "entries", "hook_id", "table")

    def __init__(self, table: Table) -> None:
        self.table = table
        self.entries: tuple[Entry, ...] = ()
        self.hook_id = -1

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model carries no hooks of ours, only this, which takes itself off.
        return StalePort, (isinstance(self, StatePort),)


class StalePort:
    """What a copy of a hooked model finds in place of a port: does nothing, and goes at the first forward."""

    __slots__ = ("__weakref__", "_from_public_api", "in_walk")

    def __init__(self, in_walk: bool) -> None:
        self.in_walk = in_walk
        """Whether torch calls it while walking the live dictionary, which then must not change."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not self.in_walk:
            drop_stale(module)


def drop_stale(module: nn.Module) -> None:
    """Take what is left of copied hooks off a module, outside of torch's own iterations over them."""
    if not any(map(module.__dict__.get, _WHERE_STALE)):
        return
    for attribute, hook_id, hook in _torch.hooks_of(module):
        if isinstance(hook, StalePort) and not (StatePort.running and "state_dict" in attribute):
            _torch.drop_hook(module, attribute, hook_id)
            if attribute == "_backward_hooks" and not module._backward_hooks:
                setattr(module, _torch.FULL_BACKWARD_FLAG, None)  # torch leaves it set
    if isinstance(module.__dict__.get(_torch.CALL_IMPL), StaleGuard):
        del module.__dict__[_torch.CALL_IMPL]


class PreFront(Port):
    """First of a module's forward pre-hooks: the root's tick, raw observers, edits."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = _ABSENT) -> Any:
        table = self.table
        if table.root is not None and table.around is None:
            table.root.begin()
        if not self.entries:
            return None
        back = table.back_port(PreBack)
        later = () if back is None else back.entries
        if back is not None:
            back.release()
        given = args, kwargs
        named = {} if kwargs is _ABSENT else kwargs
        for entry in self.entries:
            result = _run_pre(entry, module, args, named)
            if result is not None and entry.attachment.phase is _EDIT:
                args, named = _new_arguments(entry, result, named)
                if table.guard is not None:
                    table.guard.note(args, named, None)
        if back is not None:
            back.hold(later)
        if kwargs is _ABSENT:
            return None if args is given[0] else args
        return None if args is given[0] and named is kwargs else (args, named)


class BackPort(Port):
    """Base of the ports at the end of a queue: they run the observers that were on when the queue began."""

    __slots__ = ("_held",)

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._held: tuple[int, tuple[Entry, ...]] | None = None

    def hold(self, entries: tuple[Entry, ...]) -> None:
        """Hooks at the front of the queue have changed the observers: those of this call are still ``entries``."""
        if self.entries is not entries:
            self._held = _torch.queue_id(2), entries

    def release(self) -> None:
        """A queue begins; whatever an earlier one held that never came to its end is no longer due."""
        self._held = None

    def due(self) -> tuple[Entry, ...]:
        """The observers of the call under way."""
        held, self._held = self._held, None
        if held is not None and held[0] == _torch.queue_id(2):
            return held[1]
        return self.entries


class PreBack(BackPort):
    """Last of a module's forward pre-hooks: observers, then the inputs' gradients; keeps our places."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = _ABSENT) -> Any:
        table = self.table
        if len(module._forward_hooks) > 1 or len(module._forward_pre_hooks) > 1:
            table.keep_places()
        if self.entries or self._held is not None:
            for entry in self.due():
                _run_pre(entry, module, args, {} if kwargs is _ABSENT else kwargs)
        if kwargs is _ABSENT or not table.has_gradients or not torch.is_grad_enabled():
            return None
        call = GradientCall(table, module)
        table.entered = call.order
        return call.enter(args, kwargs)


class PostFront(Port):
    """First of a module's forward hooks: raw observers, edits."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _ABSENT) -> Any:
        if output is _ABSENT:
            kwargs, output = {}, kwargs
        given = output
        guard = self.table.guard
        if guard is not None:
            guard.note(args, kwargs, output)
        back = self.table.back_port(PostBack)
        later = () if back is None else back.entries
        if back is not None:
            back.release()
        for entry in self.entries:
            result = _run_post(entry, module, args, kwargs, output)
            if result is not None and entry.attachment.phase is _EDIT:
                output = result
                if guard is not None:
                    guard.note(args, kwargs, output)
        if back is not None:
            back.hold(later)
        return None if output is given else output


class PostBack(BackPort):
    """Last of a module's forward hooks: observers, then the outputs' gradients."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _ABSENT) -> Any:
        if output is _ABSENT:
            kwargs, output = {}, kwargs
        if self.entries or self._held is not None:
            for entry in self.due():
                _run_post(entry, module, args, kwargs, output)
        table = self.table
        if not table.has_gradients:
            return None
        table.calls_seen += 1
        if not torch.is_grad_enabled():
            return None
        carrier = kwargs if isinstance(kwargs, Carrier) else getattr(args, "carrier", None)
        if carrier is None:  # a pre-hook behind ours has made new keyword arguments: the inputs are lost
            carrier = GradientCall(table, module).enter((), {})[1]
            carrier.call.order = table.entered
        watched = carrier.call.leave(output, carrier)
        return None if watched is output else watched


class FullBackwardPort(Port):
    """torch's own full backward hook."""

    __slots__ = ()

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        given = grad_input
        for entry in [entry for entry in self.entries if not entry.attachment.removed]:
            entry.count()
            result = entry.call(module, (grad_input, grad_output))
            if result is not None and entry.attachment.phase is _EDIT:
                grad_input = result
        return None if grad_input is given else grad_input


class StatePort(Port):
    """Saving and loading. Return values mean nothing, and torch allows none."""

    # torch marks its state_dict post-hooks by an attribute, which a bound method would not take.
    __slots__ = ("_from_public_api",)

    running: ClassVar[int] = 0
    """How many calls are under way, in all threads: torch may be walking a dictionary of state hooks."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        StatePort.running += 1
        try:
            for entry in self.entries:
                entry.count()
                entry.call(module, args)
        finally:
            StatePort.running -= 1


class AnchorPort(StatePort):
    """Keeps the table of a module alive whose hooks torch calls from elsewhere; does nothing."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *args: Any) -> None:
        return None


def _run_pre(entry: Entry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One forward pre-hook."""
    entry.count()
    if entry.simple:
        return entry.hook(module, args)
    return entry.call(module, (args, kwargs) if entry.attachment.with_kwargs else (args,))


def _run_post(entry: Entry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """One forward hook."""
    entry.fired += 1  # entry.count(), without the call: this is the hot path
    entry.last_step = entry.root.step
    if entry.simple:
        return entry.hook(module, args, output)
    attachment = entry.attachment
    if attachment.always_call and entry.table.guard is not None:
        entry.table.guard.mark(entry)
    return entry.call(module, (args, kwargs, output) if attachment.with_kwargs else (args, output))


def _new_arguments(entry: Entry, result: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a pre-hook's return value makes of the arguments."""
    if not entry.attachment.with_kwargs:
        return result if isinstance(result, tuple) else (result,), kwargs
    if isinstance(result, tuple) and len(result) == 2:
        args, named = result
        if isinstance(args, tuple) and isinstance(named, dict):
            return args, named
    raise HookReturnError(
        f"forward_pre hook {entry.attachment.name!r} on {entry.name!r} takes kwargs, so it must return None or "
        f"(new_args, new_kwargs), a tuple and a dict, but got {result!r}."
    )
