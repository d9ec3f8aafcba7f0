"""See the calls of functions: through two modes in each thread, and through a base of ours in classes.

``attach_function`` adds entries to scopes: a model's, whose forwards enter and leave it, or a thread's. torch shows
functions to a function mode, operators (``aten.mm``) to a dispatch mode, and an ``autograd.Function`` class to neither:
while it has hooks, it has one more base. All three look the function up in one table of hooks, that of the scopes the
thread is in. It is made when hooks come or go, so that a function without hooks costs one look-up; each mode is on its
stack only while the table has something for it.

Modes are a stack per thread, and whoever leaves a ``with`` block takes off what is on top. So a hook that is put on
without ``with`` goes *under* the modes that are there, and comes off by being lifted out from among them; what is not
ours is never taken off.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from weakref import WeakSet

from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline.errors import HooklineWarning, UnhookableError
from hookline.messages import caller_stacklevel
from hookline.sites import _torch
from hookline.sites.functions.function_hooks import FunctionHooks, why_left_alone
from hookline.sites.functions.function_names import spellings
from hookline.sites.hook_at_site import NO_MODEL, HookAtSite, HookContainer
from hookline.sites.modules.module_hooks import LOCK, ON_SWEEP
from hookline.sites.receipt import NOT_CALLED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.sites.functions.function_names import Place
    from hookline.sites.hook_at_site import Attachment, ForwardCounter

_Running: TypeAlias = "tuple[weakref.ref[FunctionsOfModel], ...]"


# -- what torch calls ----------------------------------------------------------------------------------------------


class _FunctionMode(TorchFunctionMode):
    """Torch calls it for every function of torch while it is on the stack of its thread."""

    def __init__(self, thread: _Thread) -> None:
        super().__init__()
        self._thread = thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        thread = self._thread
        hooks = thread.table.get(func)
        if is_dynamo_compiling():
            if hooks is not None:
                _warn_compiled()
            return func(*args, **kwargs) if kwargs else func(*args)
        thread.saw_calls = True
        if hooks is None or is_compiling() or _torch.called_by_us(2):
            return func(*args, **kwargs) if kwargs else func(*args)
        return hooks.call(func, args, kwargs or {}, thread.hooks_on)


class _OperatorMode(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch calls it for every operator, below autograd: edits count for the run, and not for its gradients."""

    supports_higher_order_operators = True

    def __init__(self, thread: _Thread) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._thread = thread

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's way to skip it imports the compiler; `leave_to_python` does not

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch compiles nothing while it is on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        thread = self._thread
        thread.saw_calls = True
        hooks = thread.table.get(func)
        if hooks is None or thread.in_class_hook or _torch.called_by_us(2):
            return func(*args, **kwargs) if kwargs else func(*args)
        if _torch.is_tracing():
            _warn_compiled()
            return func(*args, **kwargs) if kwargs else func(*args)
        return hooks.call(func, args, kwargs or {}, thread.hooks_on, gradients=False)


class _Patch:
    """One ``autograd.Function`` class that has a base of ours while it has hooks.

    Another ``apply`` would not do: most people keep a reference (``relu = MyReLU.apply``). ``apply`` looks up what it
    calls in the bases of the class, by ``super()``: so a base of ours stands between torch's own ``Function`` and the
    C++ one behind it. Where ``apply`` itself is the C++ one (from torch 2.14 on), our base stands before torch's, and a
    reference that was taken before the hook was attached goes past it.
    """

    def __init__(self, place: Place) -> None:
        self.cls = cls = place.func
        self.users: WeakSet[Attachment] = WeakSet()
        """The hooks on it; one that is bound to a model goes with that, and is kept by the scope of the model."""
        self._base = self._make_base()
        own = cls.__bases__
        try:
            cls.__bases__ = (*own, self._base) if _torch.APPLY_IS_PYTHON else (self._base, *own)
        except TypeError as error:
            raise UnhookableError(f"{place.name} cannot be hooked: its bases cannot be changed ({error}).") from None

    def _make_base(self) -> type:
        hooked = self.cls

        class Hooked(_torch.FunctionBase):
            """Stands before the C++ half of ``autograd.Function``."""

            @classmethod
            def apply(cls, *args: Any, **kwargs: Any) -> Any:
                # A reference to this method may be kept, and used when the base is taken away again.
                run = super().apply if Hooked in cls.__mro__ else cls.apply  # type: ignore[misc]
                thread = _LOCAL.thread
                # A subclass is another function.
                hooks = None if thread.in_class_hook or cls is not hooked else thread.table.get(cls)
                return run(*args, **kwargs) if hooks is None else hooks.call(run, args, kwargs, thread.hooks_on)

        return Hooked

    def restore(self) -> None:
        """Give the class its own bases back; whatever else was done to them stays."""
        self.cls.__bases__ = tuple(base for base in self.cls.__bases__ if base is not self._base)


_PATCHED: Final[dict[type, _Patch]] = {}
"""The classes that have hooks now."""


def patch_class(attachment: Attachment, place: Place) -> None:
    """Have a class show its calls for as long as the attachment is on; under LOCK."""
    if place.func not in _PATCHED:
        _PATCHED[place.func] = _Patch(place)
    _PATCHED[place.func].users.add(attachment)


def restore_classes(attachment: Attachment | None = None) -> None:
    """Give the classes their own bases back that have no hooks any more, that of ``attachment`` not counted."""
    with LOCK:
        for patch in tuple(_PATCHED.values()):
            if attachment is not None:
                patch.users.discard(attachment)
            if not patch.users:
                patch.restore()
                del _PATCHED[patch.cls]


ON_SWEEP.append(restore_classes)


# -- the scopes of hooks -------------------------------------------------------------------------------------------


class _HookOnFunction(HookAtSite):
    """One hook on one function, operator or class."""

    __slots__ = ("func",)

    func: Any


class _HooksByFunction(dict[Any, FunctionHooks]):
    """The hooks of some scopes, by function, operator or class."""

    def __init__(self, scopes: tuple[FunctionsOfModel, ...]) -> None:
        gathered: dict[Any, list[HookAtSite]] = {}
        for scope in scopes:
            for entry in scope.hooks:
                gathered.setdefault(entry.func, []).append(entry)
        super().__init__((func, FunctionHooks(hooks[0].name, func, hooks)) for func, hooks in gathered.items())
        self.has_operators = any(isinstance(func, _torch.OpOverload) for func in self)
        self.has_functions = any(not isinstance(func, _torch.OpOverload | type) for func in self)


class FunctionsOfModel(HookContainer):
    """The hooks on functions that are called in the forwards of one model, whose table calls `enter` and `leave`.

    They are kept here, and this with the model, so that a hook which refers to its own model does not keep it alive.
    """

    def __init__(self, counter: ForwardCounter) -> None:
        self.counter = counter
        self.attachments: dict[Attachment, tuple[int, int]] = {}
        """Every attachment that is bound to this scope; by whom it was made, and when."""
        self.hooks: dict[_HookOnFunction, None] = {}
        """The hooks, in the order they came."""
        # Weak, since other scopes may be of models that are gone.
        self._tables: dict[_Running, _HooksByFunction] = {}
        self._published = -1

    def enter(self) -> None:
        """Begin a forward in this thread."""
        self.counter.begin()
        _LOCAL.thread.enter(self)

    def leave(self) -> None:
        """End it, however it ended."""
        _LOCAL.thread.leave(self)

    def entries(self) -> Iterator[HookAtSite]:
        """Return one entry of each attachment."""
        for attachment in self.attachments:
            yield from list(attachment.entries)[:1]

    def add(self, attachment: Attachment, place: Place) -> HookAtSite:
        """Put a hook on a function; `publish` makes it count."""
        entry = _HookOnFunction(attachment, place.name, self, self.counter)
        entry.func = place.func
        if isinstance(place.func, type):
            patch_class(attachment, place)
            entry.hook = _unseen(entry.hook)
        self.hooks[entry] = None
        return entry

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; `publish` makes that count."""
        self.hooks.pop(cast(_HookOnFunction, entry), None)

    def table(self, scopes: tuple[FunctionsOfModel, ...]) -> _HooksByFunction:
        """Return the hooks that count while a thread is in these scopes, this one the last of them."""
        running = tuple(map(weakref.ref, scopes))
        found = self._tables.get(running) if self._published == _State.published else None
        if found is None:
            with LOCK:
                if self._published != _State.published:
                    self._published = _State.published
                    self._tables = {}
                found = self._tables[running] = _HooksByFunction(scopes)
        return found

    def why_silent(self, entry: HookAtSite) -> str:
        """Return what is known of functions that are never seen."""
        known = _not_called(entry) or why_left_alone(entry)
        if known is not None:
            return known
        missed, advice = _missed(cast(_HookOnFunction, entry))
        if entry.attachment.kind.is_gradient:
            return (
                f"{missed}, or no backward pass came through its outputs; reentrant checkpointing repeats a forward "
                "where none is seen (use_reentrant=False shows all)"
            )
        return f"{missed}{advice}"


class FunctionsOfThread(FunctionsOfModel):
    """The hooks that are bound to no model; they count in the thread that has put them on."""

    def __init__(self, thread: _Thread) -> None:
        super().__init__(NO_MODEL)
        self._thread = weakref.ref(thread)
        self._on: set[Attachment] = set()

    def switch_on(self, attachment: Attachment) -> None:
        """Have the modes of this thread see calls for the hook."""
        self._on.add(attachment)
        thread = _LOCAL.thread
        thread.saw_calls = False
        thread.enter(self)

    def switch_off(self, attachment: Attachment) -> None:
        """Let the modes go, from whichever thread; do nothing if the hook was not switched on."""
        thread = self._thread()
        if attachment not in self._on or thread is None:
            return
        self._on.discard(attachment)
        if thread.saw_calls:
            for entry in attachment.entries:
                entry.step_at_attach = NOT_CALLED  # it had its chance
        if thread is _LOCAL.thread:
            thread.leave(self)
        else:
            thread.forget(self)  # its modes stay on the stacks of the thread, and do nothing


def _unseen(hook: Any) -> Any:
    """Return a hook on a class such that what it calls itself goes unseen, as modes have it by themselves."""

    def run(*args: Any, **kwargs: Any) -> Any:
        thread = _LOCAL.thread
        before, thread.in_class_hook = thread.in_class_hook, True
        try:
            return hook(*args, **kwargs)
        finally:
            thread.in_class_hook = before

    return run


def _missed(entry: _HookOnFunction) -> tuple[str, str]:
    """Return what did not happen where a hook never fired, and what to look at then."""
    if isinstance(entry.func, type):
        past = "" if _torch.APPLY_IS_PYTHON else ", or by an `apply` that was kept before the hook was attached"
        return f"it was not applied{past}", ""
    if isinstance(entry.func, _torch.OpOverload):
        return "the operator never ran in eager code", (
            "; the model may come by another overload or operator (a Linear runs aten.addmm or aten.mm; with gradients "
            "on, one that is made of others shows as those), or run compiled"
        )
    last = entry.name.rpartition(".")[2]
    has_all = spellings(last) <= {other.name for other in entry.attachment.entries}
    otherwise = "" if has_all else f"spelt otherwise (target '*.{last}' takes all spellings), or "
    return "it was not called as such", (
        f"; it may be {otherwise}called inside another function of torch, which hides it (hook that one, or the "
        "aten operator); compiled code shows no functions"
    )


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
    if not _State.warned:
        _State.warned = True
        warnings.warn(
            "Something is being compiled that calls functions or operators with hooks: these fire in eager code alone. "
            "Hook the module instead, or run that part eagerly (torch.compiler.disable).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


class _State:
    published = 0
    """How often hooks have come or gone."""
    warned = False
    """Whether it was said that compiled code shows no functions."""


ANYWHERE: Final = FunctionsOfModel(NO_MODEL)
"""The hooks on classes that are bound to no model: they count in all threads."""


# -- the threads ---------------------------------------------------------------------------------------------------


class _Switch:
    """Puts one mode of ours on its stack in this thread, and takes it off."""

    __slots__ = ("_is_on", "_mode", "_stack")

    def __init__(self, mode: Any, stack: _torch.ModeStack) -> None:
        self._mode, self._stack, self._is_on = mode, stack, False

    def turn_on(self, *, under: bool) -> None:
        """Put it on top, or ``under`` all modes that are there; do nothing if it is on."""
        if not self._is_on:
            self._is_on = True
            (self._stack.slip_under if under else self._stack.push)(self._mode)

    def turn_off(self) -> None:
        """Take it off. Inside one of our own hooks torch keeps it aside, and puts it back: it goes the next time."""
        if self._is_on:
            self._is_on = not self._stack.take_out(self._mode)


class _Thread:
    """The scopes that one thread is in, their hooks, and the modes that see calls for them."""

    def __init__(self) -> None:
        self.table: _HooksByFunction
        """The hooks of the scopes."""
        self.running: tuple[FunctionsOfModel, ...] = (ANYWHERE,)
        """The scopes in which this thread is, each once; the first is that of the process."""
        self.saw_calls = False
        """Whether a function was called since a hook was put on in this thread."""
        self.in_class_hook = False
        """Whether a hook on a class runs, whose own calls go unseen."""
        self.in_this_thread = FunctionsOfThread(self)
        """The hooks that were put on in this thread without a model."""
        self._entered: list[FunctionsOfModel] = []
        """The scopes as often as each was entered."""
        self._functions = _Switch(_FunctionMode(self), _torch.FUNCTION_MODES)
        self._operators = _Switch(_OperatorMode(self), _torch.DISPATCH_MODES)
        self.refresh()

    def hooks_on(self, func: Any) -> FunctionHooks | None:
        """Return the hooks on a function, as they are now."""
        return self.table.get(func)

    # -- in this thread itself -----------------------------------------------------------------------

    def enter(self, scope: FunctionsOfModel) -> None:
        """Fire the hooks of ``scope`` for calls from now on."""
        self._entered.append(scope)
        if scope not in self.running:
            self.running = (*self.running, scope)
            self.refresh()
        under = scope is self.in_this_thread
        if self.table.has_functions:
            self._functions.turn_on(under=under)
        if self.table.has_operators:
            self._operators.turn_on(under=under)

    def leave(self, scope: FunctionsOfModel) -> None:
        """Fire the hooks of ``scope`` no more."""
        self.forget(scope)
        self.settle()

    def settle(self) -> None:
        """Take the modes off their stacks if there is nothing to be on for."""
        if not self._entered:
            self._functions.turn_off()
            self._operators.turn_off()

    # -- from any thread, under LOCK -----------------------------------------------------------------

    def refresh(self) -> None:
        """Read the table anew, since hooks or scopes have changed."""
        self.table = self.running[-1].table(self.running)

    def forget(self, scope: FunctionsOfModel) -> None:
        """Do as `leave`, but keep the modes on their stacks, which only their own thread may change."""
        entered = self._entered
        if entered and entered[-1] is scope:
            entered.pop()
        elif scope in entered:
            entered.remove(scope)
        if scope not in entered:
            self.running = tuple(other for other in self.running if other is not scope)
            self.refresh()


class _Local(threading.local):
    """What there is of this thread."""

    def __init__(self) -> None:
        self.thread = _Thread()
        with LOCK:  # another thread may be going through them
            _THREADS.add(self.thread)


def _threads() -> list[_Thread]:
    """Return those that are still there."""
    with LOCK:
        return list(_THREADS)


def publish() -> None:
    """Give every thread a new table for its next call, since hooks have come or gone; under LOCK."""
    _State.published += 1
    for thread in _threads():
        thread.refresh()
    _LOCAL.thread.settle()


def in_this_thread() -> FunctionsOfThread:
    """Return the scope of hooks that are put on in this thread and bound to no model."""
    return _LOCAL.thread.in_this_thread


def unbound_attachments() -> Iterator[Attachment]:
    """Return what is put on functions, by any thread that is still there, and bound to no model."""
    for scope in (ANYWHERE, *(thread.in_this_thread for thread in _threads())):
        yield from tuple(scope.attachments)


_THREADS: Final[weakref.WeakSet[_Thread]] = weakref.WeakSet()
_LOCAL: Final = _Local()


_torch.leave_to_python(FunctionsOfModel.enter, FunctionsOfModel.leave, _OperatorMode.__torch_dispatch__)
