"""Operators (``aten.mm``, a custom operator), hooked in the dispatcher: other operators run as if nothing were there.

Takes entries from ``attach_function``, and calls from torch's dispatcher in every thread, those of the backward pass
included. Each hooked operator has its kernels overridden in two places. At the *autograd* level the graph is in sight,
so gradients can be watched and edits count. At the *backend* level arrives what never passes there: everything in
inference mode, and what kernels call among themselves; a call that has been seen above is not counted again. Before
transforms of ``torch.func`` a third stands, which runs no hook and has numbers replaced that would not get through.
A compiled frame calls kernels of its own; that is said once.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import HooklineWarning, UnhookableError
from hookline.messages import caller_stacklevel
from hookline.sites import _torch
from hookline.sites.functions.function_hooks import why_left_alone
from hookline.sites.functions.function_mode import not_called
from hookline.sites.functions.function_overrides import Override, Overrides
from hookline.sites.functions.hooks_off import HOOKS_OFF, with_hooks_off

if TYPE_CHECKING:
    from hookline.sites.functions.function_hooks import FunctionHooks
    from hookline.sites.functions.function_mode import FunctionsOfModel
    from hookline.sites.functions.function_names import Place
    from hookline.sites.hook_at_site import HookAtSite

__all__ = ["Operators", "operators"]


class _Thread(threading.local):
    """What this thread is in the middle of."""

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
        for backend in _torch.backends():
            for key, level in ((f"Autograd{backend}", self._at_autograd), (backend, self._at_backend)):
                restore = _torch.override_kernel(self.place.func, key, level)
                if restore is not None:
                    self._restore.append(restore)
        if not self._restore:
            raise UnhookableError(
                f"{self.place.name} has no kernel here that Python may stand in for, so no hook on it would ever fire. "
                "Hook the function or the module that uses it."
            )
        before = _torch.override_kernel(self.place.func, _torch.TRANSFORMS, self._before_transforms)
        if before is not None:
            self._restore.append(before)

    def restore(self) -> None:
        """Give the kernels their places back."""
        for restore in self._restore:
            restore()
        self._restore.clear()

    def _before_transforms(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Where a transform of torch.func takes a call in hand; no hook runs here."""
        replace_numbers = with_hooks_off(functools.partial(_torch.without_numbers, self.place.func))

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            return original(keys, *replace_numbers(args), **kwargs)

        return kernel

    def _at_autograd(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if _torch.called_by_us(2):
                return with_hooks_off(original)(keys, *args, **kwargs)
            hooks = None if self in _THREAD.transformed else self._due()
            if hooks is None:
                return original(keys, *args, **kwargs)
            return hooks.call(functools.partial(self._run, original, keys), args, kwargs, self.hooks_on)

        return kernel

    def _run(self, original: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel at the autograd level; what comes by again within it is the same call."""
        here = _THREAD
        seen = (here.above, here.transformed) if _torch.in_transform() else (here.above,)
        for calls in seen:
            calls.add(self)
        try:
            return original(keys, *args, **kwargs)
        finally:
            for calls in seen:
                calls.discard(self)

    def _at_backend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if _torch.called_by_us(2):
                return with_hooks_off(original)(keys, *args, **kwargs)
            hooks = None if self in _THREAD.above else self._due()
            if hooks is None:
                return original(keys, *args, **kwargs)
            run = functools.partial(original, keys)
            return hooks.call(run, args, kwargs, self.hooks_on, gradients=False)

        return kernel

    def _due(self) -> FunctionHooks | None:
        """The hooks that this call is for."""
        if not self.armed or HOOKS_OFF.on:
            return None
        if _torch.is_tracing():
            _warn_of_compiling(f"Something is being compiled that uses {self.place.name}")
            return None
        return self.due()


class Operators(Overrides):
    """All hooks on operators."""

    def __init__(self) -> None:
        super().__init__(Operator)
        self._watches_forks = False

    def add(self, entry: HookAtSite, place: Place, scope: FunctionsOfModel) -> None:
        """Put a hook in its place; all or nothing."""
        if _torch.has_compiled():
            _warn_of_compiling("Code has been compiled in this process")
        super().add(entry, place, scope)
        if not self._watches_forks:
            self._watches_forks = True
            os.register_at_fork(after_in_child=self._disarm)

    def why_silent(self, entry: HookAtSite) -> str:
        """What is known of operators that are never seen."""
        known = not_called(entry) or why_left_alone(entry)
        if known is not None:
            return known
        if entry.attachment.kind.is_gradient:
            return (
                "it was not run where gradients are recorded, or no backward pass came through its outputs; reentrant "
                "checkpointing repeats a forward outside of the model's own (use_reentrant=False shows all)"
            )
        return (
            "the operator never ran in this thread's eager code; the model may come by another overload or operator "
            "(a Linear runs aten.addmm or aten.mm), or run compiled"
        )

    def _disarm(self) -> None:
        """In a forked worker the hooks, and whatever they write to, are the parent's."""
        for operator in self.overrides.values():
            operator.armed = False


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


operators: Final = Operators()
