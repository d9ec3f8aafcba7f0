"""Hook functions that no function mode sees: operators (``aten.mm``) and ``autograd.Function`` classes.

``attach_function`` calls `override`; torch calls what stands in for the function here, in every thread. The hooks are
kept by the scope that they fire in, and only known of here: one that refers to its model does not keep it alive, and
when the model is gone the function gets its own place back.

Each hooked operator has its kernels overridden in two places of the dispatcher; other operators run unchanged. At the
*autograd* level the graph is in sight, so gradients can be watched and edits count. At the *backend* level arrives what
never passes there: everything in inference mode, and what kernels call among themselves; a call that has been seen
above is not counted again. Before transforms of ``torch.func`` a third stands, which runs no hook and replaces numbers
that would not get through. A compiled frame calls kernels of its own; one warning says so.

For a class, another ``apply`` would not do: most people keep a reference (``relu = MyReLU.apply``). ``apply`` looks up
what it calls in the bases of the class, by ``super()``: so while the class has hooks, a base of ours stands between
torch's own ``Function`` and the C++ one behind it. Where ``apply`` itself is the C++ one (from torch 2.14 on), our base
stands before torch's, and a reference that was taken before the hook was attached goes past it.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from hookline.errors import HooklineWarning, UnhookableError
from hookline.messages import caller_stacklevel
from hookline.sites import _torch
from hookline.sites.functions.function_mode import hooks_below, why_not_seen
from hookline.sites.hook_at_site import HookAtSite, HookContainer
from hookline.sites.modules.module_hooks import LOCK, ON_SWEEP

if TYPE_CHECKING:
    from hookline.sites.functions.function_hooks import FunctionHooks
    from hookline.sites.functions.function_mode import FunctionsOfModel
    from hookline.sites.functions.function_names import Place
    from hookline.sites.hook_at_site import Attachment


class _HooksOff(threading.local):
    on = False
    """Whether this thread is in a hook of ours, or in our own wiring."""


HOOKS_OFF: Final = _HooksOff()


def with_hooks_off(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook, or what our own wiring calls, such that what it uses itself goes unseen."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, HOOKS_OFF.on = HOOKS_OFF.on, True
        try:
            return function(*args, **kwargs)
        finally:
            HOOKS_OFF.on = before

    return run


class Override(HookContainer):
    """One such function while it has hooks; the scopes of function_mode keep them."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.users: WeakSet[Attachment] = WeakSet()
        """The hooks on it; one that is bound to a model goes with that."""
        self.process = os.getpid()
        """Where the last of them came on; a forked worker is another."""

    def put_on(self) -> None:
        """Take the place of the function; all or nothing."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the function its place back."""
        raise NotImplementedError

    def due(self) -> FunctionHooks | None:
        """Return the hooks that a call in this thread is for."""
        return None if HOOKS_OFF.on else hooks_below(self.place.func)

    def hooks_on(self, func: Any) -> FunctionHooks | None:
        """Return the same for the function itself, in the middle of its call."""
        return self.due()

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; the last one gives the function its place back."""
        self.users.discard(entry.attachment)
        if not self.users and _OVERRIDES.get(self.place.func) is self:
            self.restore()
            del _OVERRIDES[self.place.func]


_OVERRIDES: Final[dict[Any, Override]] = {}
"""What stands in for functions now."""


def override(attachment: Attachment, place: Place, scope: FunctionsOfModel) -> HookAtSite:
    """Put a hook on an operator or class, to fire in ``scope``; all or nothing, under LOCK."""
    found = _OVERRIDES.get(place.func)
    if found is None:
        found = (Patch if isinstance(place.func, type) else Operator)(place)
        found.put_on()
        _OVERRIDES[place.func] = found
    entry = HookAtSite(attachment, place.name, found, scope.counter)
    entry.hook = with_hooks_off(entry.hook)
    found.users.add(attachment)
    found.process = os.getpid()
    scope.keep(entry, place)
    return entry


def _drop_unused() -> None:
    """Restore the functions whose hooks have gone with their models."""
    with LOCK:
        for unused in [each for each in _OVERRIDES.values() if not each.users]:
            unused.restore()
            del _OVERRIDES[unused.place.func]


ON_SWEEP.append(_drop_unused)


class _Thread(threading.local):
    """The calls of operators that this thread is in."""

    def __init__(self) -> None:
        self.above: set[Operator] = set()
        """The operators whose autograd level has seen the call."""
        self.transformed: set[Operator] = set()
        """Those that a transform of torch.func has called: it comes by the autograd level once for each transform."""


_THREAD: Final = _Thread()


class Operator(Override):
    """One overload of one operator, with its kernels overridden."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._restore: list[Callable[[], None]] = []

    def put_on(self) -> None:
        """Take the place of its kernels on every device there is."""
        if _torch.has_compiled():
            _warn_of_compiling("Code has been compiled in this process")
        try:
            self._override_kernels()
        except BaseException:
            self.restore()
            raise

    def _override_kernels(self) -> None:
        for backend in _torch.backends():
            self._stand_in(f"Autograd{backend}", functools.partial(self._kernel, at_autograd=True))
            self._stand_in(backend, functools.partial(self._kernel, at_autograd=False))
        if not self._restore:
            raise UnhookableError(
                f"{self.place.name} has no kernel here that Python may stand in for, so no hook on it would ever fire. "
                "Hook the function or the module that uses it."
            )
        self._stand_in(_torch.TRANSFORMS, self._before_transforms)

    def _stand_in(self, key: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        restore = _torch.override_kernel(self.place.func, key, make)
        if restore is not None:
            self._restore.append(restore)

    def restore(self) -> None:
        """Give the kernels their places back."""
        for restore in self._restore:
            restore()
        self._restore.clear()

    def _before_transforms(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return where a transform of torch.func takes a call in hand; no hook runs here."""
        replace_numbers = with_hooks_off(functools.partial(_torch.without_numbers, self.place.func))

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            return original(keys, *replace_numbers(args), **kwargs)

        return kernel

    def _kernel(self, original: Callable[..., Any], *, at_autograd: bool) -> Callable[..., Any]:
        """Return what runs the hooks around a kernel, at the autograd level or at that of the backend."""
        run_original = self._run_at_autograd if at_autograd else _run

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if _torch.called_by_us(2):
                return with_hooks_off(original)(keys, *args, **kwargs)
            seen = _THREAD.transformed if at_autograd else _THREAD.above
            hooks = None if self in seen else self.due()
            if hooks is None:
                return original(keys, *args, **kwargs)
            run = functools.partial(run_original, original, keys)
            return hooks.call(run, args, kwargs, self.hooks_on, gradients=at_autograd)

        return kernel

    def _run_at_autograd(self, original: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the kernel at the autograd level; what comes by again within it is the same call."""
        here = _THREAD
        seen = (here.above, here.transformed) if _torch.in_transform() else (here.above,)
        for calls in seen:
            calls.add(self)
        try:
            return original(keys, *args, **kwargs)
        finally:
            for calls in seen:
                calls.discard(self)

    def due(self) -> FunctionHooks | None:
        """Return the hooks that this call is for: none in a forked worker, since they are the parent's."""
        hooks = super().due()
        if hooks is None or os.getpid() != self.process:
            return None
        if _torch.is_tracing():
            _warn_of_compiling(f"Something is being compiled that uses {self.place.name}")
            return None
        return hooks

    def why_silent(self, entry: HookAtSite) -> str:
        """Return what is known of operators that are never seen."""
        elsewhere = "; the model may come by another overload or operator (a Linear runs aten.addmm or aten.mm), or run"
        return why_not_seen(entry, "the operator never ran in eager code", f"{elsewhere} compiled")


def _run(original: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    return original(keys, *args, **kwargs)


class _Said:
    compiling = False


def _warn_of_compiling(what: str) -> None:
    if not _Said.compiling:
        _Said.compiling = True
        warnings.warn(
            f"{what}: hooks on operators fire in eager code alone, and a compiled frame need never call them. Hook the "
            "module instead, or run that part eagerly (torch.compiler.disable).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


class Patch(Override):
    """One class that has a base of ours for a while."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._base = self._make_base()

    def put_on(self) -> None:
        """Put our base behind the others, or before them where torch's own would not call it."""
        cls = self.place.func
        try:
            own = cls.__bases__
            cls.__bases__ = (*own, self._base) if _torch.APPLY_IS_PYTHON else (self._base, *own)
        except TypeError as error:
            raise UnhookableError(
                f"{self.place.name} cannot be hooked: its bases cannot be changed ({error})."
            ) from None

    def _make_base(self) -> type:
        hooked = self.place.func

        class Hooked(_torch.FunctionBase):
            """Stands before the C++ half of ``autograd.Function``."""

            @classmethod
            def apply(cls, *args: Any, **kwargs: Any) -> Any:
                # A reference to this method may be kept, and used when the base is taken away again.
                run = super().apply if Hooked in cls.__mro__ else cls.apply  # type: ignore[misc]
                hooks = self.due() if cls is hooked else None  # a subclass is another function
                return run(*args, **kwargs) if hooks is None else hooks.call(run, args, kwargs, self.hooks_on)

        return Hooked

    def restore(self) -> None:
        """Give the class its own bases back; whatever else was done to them stays."""
        cls = self.place.func
        cls.__bases__ = tuple(base for base in cls.__bases__ if base is not self._base)

    def why_silent(self, entry: HookAtSite) -> str:
        """Return what is known of functions that are never seen."""
        past = "" if _torch.APPLY_IS_PYTHON else ", or by an `apply` that was kept before the hook was attached"
        return why_not_seen(entry, f"it was not applied{past}")
