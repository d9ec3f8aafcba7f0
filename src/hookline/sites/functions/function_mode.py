"""See the functions of torch through one function mode per thread.

Takes entries from ``attach_function``, and calls from torch while the mode is on its stack: from the attachment on, or,
with ``within=``, from the beginning to the end of the model's forwards. The mode holds one dictionary from function to
hooks, made when hooks come or go, so that a function without hooks costs one look-up.

Function modes are a stack per thread, and whoever leaves a ``with`` block takes off what is on top. So a hook that is
put on without ``with`` goes *under* the modes that are there, and comes off by being lifted out from among them;
what is not ours is never taken off. Only what ``torch.set_default_device`` puts there insists on the lowest place.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel
from hookline.sites import _torch
from hookline.sites.functions.function_hooks import FunctionHooks, why_left_alone
from hookline.sites.functions.function_names import spellings
from hookline.sites.hook_at_site import NO_MODEL, HookAtSite, HookContainer
from hookline.sites.modules.module_hooks import LOCK
from hookline.sites.receipt import NOT_CALLED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.sites.functions.function_names import Place
    from hookline.sites.hook_at_site import Attachment, ForwardCounter

_HooksByFunction: TypeAlias = dict[Any, FunctionHooks]
_Entries: TypeAlias = dict[Any, dict["HookAtSite", None]]
_Running: TypeAlias = "tuple[weakref.ref[FunctionsOfModel], ...]"


class _Mode(TorchFunctionMode):
    """The function mode of one thread: torch calls it for every function while it is on the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.table: _HooksByFunction
        """The hooks on functions that modes are shown."""
        self.below: _HooksByFunction
        """The hooks of the same scopes on operators and classes."""
        self.running: tuple[FunctionsOfModel, ...] = (ANYWHERE,)
        """The scopes in which this thread is, each once; the first is that of the process."""
        self.saw_calls = False
        """Whether a function was called since a hook was put on in this thread."""
        self.in_this_thread = FunctionsOfThread(self)
        """The hooks that were put on in this thread without a model."""
        self._entered: list[FunctionsOfModel] = []
        """The scopes as often as each was entered."""
        self._is_on = False
        self.refresh()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = self.table.get(func)
        if is_dynamo_compiling():
            if hooks is not None:
                _warn_compiled()
            return func(*args, **kwargs) if kwargs else func(*args)
        self.saw_calls = True
        if hooks is None or is_compiling() or _torch.called_by_us(2):
            return func(*args, **kwargs) if kwargs else func(*args)
        return hooks.call(func, args, kwargs or {}, self._hooks_on)

    def _hooks_on(self, func: Any) -> FunctionHooks | None:
        """Return the hooks on a function of torch, as they are now."""
        return self.table.get(func)

    # -- in its own thread ---------------------------------------------------------------------------

    def enter(self, scope: FunctionsOfModel) -> None:
        """Fire the hooks of ``scope`` for calls from now on."""
        self._entered.append(scope)
        running = self.running
        if scope not in running:
            self.running = running = (*running, scope)
            self.table, self.below = scope.tables(running)
        if not self._is_on and self.table:
            self._is_on = True
            if scope is self.in_this_thread:
                _torch.slip_mode_under(self)
            else:
                _torch.push_mode(self)

    def leave(self, scope: FunctionsOfModel) -> None:
        """Fire the hooks of ``scope`` no more."""
        if len(self._entered) == 1 and self._entered[0] is scope:  # as nearly always
            self._entered.clear()
            self.running = running = (ANYWHERE,)
            self.table, self.below = ANYWHERE.tables(running)
        else:
            self.forget(scope)
        self.settle()

    def settle(self) -> None:
        """Come off the stack if there is nothing to be on it for."""
        if self._is_on and not self._entered:
            # Inside one of our own hooks torch keeps the mode aside, and puts it back: then it goes the next time.
            self._is_on = not (_torch.pop_mode(self) or _torch.lift_mode(self))

    # -- from any thread, under LOCK -----------------------------------------------------------------

    def refresh(self) -> None:
        """Read the tables anew, since hooks or scopes have changed."""
        self.table, self.below = self.running[-1].tables(self.running)

    def forget(self, scope: FunctionsOfModel) -> None:
        """Do as `leave`, but keep the mode on the stack, which only its own thread may change."""
        entered = self._entered
        if entered and entered[-1] is scope:
            entered.pop()
        elif scope in entered:
            entered.remove(scope)
        if scope not in entered:
            self.running = tuple(other for other in self.running if other is not scope)
            self.refresh()


class FunctionsOfModel(HookContainer):
    """The hooks on functions that are called in the forwards of one model, whose table calls `enter` and `leave`.

    They are kept here, and this with the model, so that a hook which refers to its own model does not keep it alive.
    """

    def __init__(self, counter: ForwardCounter) -> None:
        self.counter = counter
        self.attachments: dict[Attachment, tuple[int, int]] = {}
        """Every attachment that is bound to this scope, to operators and classes too; by whom it was made, and when."""
        self.shown: _Entries = {}
        """The hooks on functions that modes are shown."""
        self.below: _Entries = {}
        """The hooks on operators and classes, whose calls are seen elsewhere."""
        self.places: dict[HookAtSite, Place] = {}
        # Weak, since other scopes may be of models that are gone.
        self._tables: dict[_Running, tuple[_HooksByFunction, _HooksByFunction]] = {}
        self._published = -1

    def enter(self) -> None:
        """Begin a forward in this thread."""
        self.counter.begin()
        _LOCAL.mode.enter(self)

    def leave(self) -> None:
        """End it, however it ended."""
        _LOCAL.mode.leave(self)

    def entries(self) -> Iterator[HookAtSite]:
        """Return one entry of each attachment."""
        for attachment in self.attachments:
            yield from list(attachment.entries)[:1]

    def add(self, attachment: Attachment, place: Place) -> HookAtSite:
        """Put a hook on a function that modes are shown; `publish` makes it count."""
        entry = HookAtSite(attachment, place.name, self, self.counter)
        self.shown.setdefault(place.func, {})[entry] = None
        self.places[entry] = place
        return entry

    def keep(self, entry: HookAtSite, place: Place) -> None:
        """Keep a hook on an operator or class, where its override finds it; `publish` makes it count."""
        self.below.setdefault(place.func, {})[entry] = None
        self.places[entry] = place

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; `publish` makes that count."""
        place = self.places.pop(entry, None)
        if place is None:
            return
        for by_function in (self.shown, self.below):
            entries = by_function.get(place.func, {})
            entries.pop(entry, None)
            if not entries:
                by_function.pop(place.func, None)

    def tables(self, scopes: tuple[FunctionsOfModel, ...]) -> tuple[_HooksByFunction, _HooksByFunction]:
        """Return the hooks that count while a thread is in these scopes, this one the last of them."""
        running = tuple(map(weakref.ref, scopes))
        if self._published == _State.published:
            found = self._tables.get(running)
            if found is not None:
                return found
        with LOCK:
            if self._published != _State.published:
                self._published = _State.published
                self._tables = {}
            shown = _make_table(scopes, [scope.shown for scope in scopes])
            found = self._tables[running] = shown, _make_table(scopes, [scope.below for scope in scopes])
            return found

    def why_silent(self, entry: HookAtSite) -> str:
        """Return what is known of functions that are never seen."""
        last = entry.name.rpartition(".")[2]
        has_all = spellings(last) <= {other.name for other in entry.attachment.entries}
        otherwise = "" if has_all else f"spelt otherwise (target '*.{last}' takes all spellings), or "
        return why_not_seen(
            entry,
            "it was not called as such",
            f"; it may be {otherwise}called inside another function of torch, which hides it (hook that one, or the "
            "aten operator); compiled code shows no functions",
        )


class FunctionsOfThread(FunctionsOfModel):
    """The hooks that are bound to no model; they count in the thread that has put them on."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__(NO_MODEL)
        self._mode = weakref.ref(mode)
        self._on: set[Attachment] = set()

    def switch_on(self, attachment: Attachment) -> None:
        """Put the mode of this thread on its stack for the hook."""
        self._on.add(attachment)
        mode = _LOCAL.mode
        mode.saw_calls = False
        mode.enter(self)

    def switch_off(self, attachment: Attachment) -> None:
        """Let the mode go, from whichever thread; do nothing if the hook was not switched on."""
        mode = self._mode()
        if attachment not in self._on or mode is None:
            return
        self._on.discard(attachment)
        if mode.saw_calls:
            for entry in attachment.entries:
                entry.step_at_attach = NOT_CALLED  # it had its chance
        if mode is _LOCAL.mode:
            mode.leave(self)
        else:
            mode.forget(self)  # it stays on the stack of its thread, and does nothing


def why_not_seen(entry: HookAtSite, missed: str, advice: str = "") -> str:
    """Return why a hook on a function never fired; ``missed`` and ``advice`` say it of a sort of function at large."""
    known = _not_called(entry) or why_left_alone(entry)
    if known is not None:
        return known
    if entry.attachment.kind.is_gradient:
        return (
            f"{missed}, or no backward pass came through its outputs; reentrant checkpointing repeats a forward where "
            "none is seen (use_reentrant=False shows all)"
        )
    return f"{missed}{advice}"


def _not_called(entry: HookAtSite) -> str | None:
    """Return what to say of a hook that is bound to a model which was passed by; None of others."""
    if entry.counter is NO_MODEL or entry.step_at_attach != NOT_CALLED:
        return None
    model = entry.counter.model()
    if model is not None and _torch.is_compiled(model):
        return "the model is compiled (model.compile()), and compiled code shows no functions"
    return (
        "the model itself was not called: within= counts what model(x) calls, and sees neither model.forward(x) nor "
        "calls of a part of the model; give that part as within=, or leave within= out"
    )


@_torch.constant_while_tracing
def _warn_compiled() -> None:
    if not _Warned.compiled:
        _Warned.compiled = True
        warnings.warn(
            "Something is being compiled that calls functions with hooks: hooks on functions fire in eager code alone. "
            "Hook the module instead, or run that part eagerly (torch.compiler.disable).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


class _Warned:
    compiled = False


def _make_table(scopes: tuple[FunctionsOfModel, ...], hooks: list[_Entries]) -> _HooksByFunction:
    """Return the hooks of these scopes, by function."""
    gathered: dict[Any, list[HookAtSite]] = {}
    for by_function in hooks:
        for func, entries in by_function.items():
            gathered.setdefault(func, []).extend(entries)
    names = {entry: place.name for scope in scopes for entry, place in scope.places.items()}
    return {func: FunctionHooks(names[entries[0]], func, entries) for func, entries in gathered.items()}


class _State:
    published = 0
    """How often hooks have come or gone."""


def publish() -> None:
    """Give every thread a new table for its next call, since hooks have come or gone; under LOCK."""
    _State.published += 1
    for mode in _modes():
        mode.refresh()
    _LOCAL.mode.settle()


def in_this_thread() -> FunctionsOfThread:
    """Return the scope of hooks on functions of torch that are put on in this thread and bound to no model."""
    return _LOCAL.mode.in_this_thread


def unbound_attachments() -> Iterator[Attachment]:
    """Return what is put on functions, by any thread that is still there, and bound to no model."""
    for scope in (ANYWHERE, *(mode.in_this_thread for mode in _modes())):
        yield from tuple(scope.attachments)


def hooks_below(func: Any) -> FunctionHooks | None:
    """Return the hooks on an operator or class that a call in this thread is for."""
    return _LOCAL.mode.below.get(func)


ANYWHERE: Final = FunctionsOfModel(NO_MODEL)
"""The hooks on operators and classes that are bound to no model: they count in all threads."""


class _Local(threading.local):
    """The mode of this thread."""

    def __init__(self) -> None:
        self.mode = _Mode()
        with LOCK:  # another thread may be going through them
            _MODES.add(self.mode)


def _modes() -> list[_Mode]:
    """Return the modes of all threads that are still there."""
    with LOCK:
        return list(_MODES)


_MODES: Final[weakref.WeakSet[_Mode]] = weakref.WeakSet()
_LOCAL: Final = _Local()


_torch.leave_to_python(FunctionsOfModel.enter, FunctionsOfModel.leave)
