"""What has to happen however a call ends: ``always_call`` hooks, and leaving what was entered around it.

Takes the place of the module's ``_call_impl`` (the method behind ``module(...)``) while its `ModuleHooks` holds such
hooks, or something to be `AroundCall` the call; hands the call on, and runs the hooks that have not had their turn when
it is cut short.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from torch.compiler import is_dynamo_compiling

from hookline.errors import HooklineWarning
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.modules.module_hooks import ModuleHooks

__all__ = ["AroundCall", "CallGuard", "StaleCallGuard"]


class AroundCall(Protocol):
    """Something that is on for the time of a call."""

    def enter(self) -> None:
        """The call begins in this thread."""

    def leave(self) -> None:
        """It is over, however it ended."""

    def entries(self) -> Iterator[HookAtSite]:
        """The hooks that it is there for, one entry of each."""


class _Attempt:
    """One call under way: what is known of it, and which of the hooks have run."""

    __slots__ = ("args", "kwargs", "output", "ran")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.output: Any = None
        self.ran: set[HookAtSite] = set()


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Attempt] = []


class StaleCallGuard:
    """What a copied or unpickled model finds in place of a guard: goes at the first call, which it hands on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = _torch.caller()
        if module is not None and module.__dict__.get(_torch.CALL_IMPL) is self:
            del module.__dict__[_torch.CALL_IMPL]
        return getattr(type(module), _torch.CALL_IMPL)(module, *args, **kwargs)


class CallGuard:
    """Wraps one module's call.

    torch runs its own ``always_call`` hooks on an Exception alone; these run on whatever ends the call, a
    KeyboardInterrupt from the forward or from anybody's hook included. ``module.forward()`` called directly
    does not come this way and stays silent.
    """

    __slots__ = ("__weakref__", "_attempts", "_module", "_module_hooks")

    def __init__(self, module_hooks: ModuleHooks, module: nn.Module) -> None:
        self._module_hooks = module_hooks
        self._module: weakref.ref[Any] = weakref.ref(module)  # of this very class, which the compiler knows
        self._attempts = _Attempts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # frames cannot be traced; a compiled call cannot be cut short between two hooks
            module = self._module()
            return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[union-attr]
        # A shallow copy of the module, a data-parallel replica say, shares this guard.
        module = _torch.caller()
        module_hooks = self._module_hooks
        if module is None:
            module = module_hooks.module()
        elif module is not self._module():
            recompile_guard.drop_copied_forward(module)
        around = module_hooks.around
        if around is None:
            return self._attempt(module, args, kwargs)
        around.enter()
        try:
            if module_hooks.calls_always:
                return self._attempt(module, args, kwargs)
            return getattr(type(module), _torch.CALL_IMPL)(module, *args, **kwargs)
        finally:
            around.leave()

    def _attempt(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempt = _Attempt(args, kwargs)
        self._attempts.stack.append(attempt)
        try:
            return getattr(type(module), _torch.CALL_IMPL)(module, *args, **kwargs)
        except BaseException:
            self._clean_up(module, attempt)
            raise
        finally:
            self._attempts.stack.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        return StaleCallGuard, ()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The call has come this far."""
        if self._attempts.stack:
            attempt = self._attempts.stack[-1]
            attempt.args, attempt.kwargs, attempt.output = args, kwargs, output

    def note_ran(self, entry: HookAtSite) -> None:
        """``entry`` is having its turn."""
        if self._attempts.stack:
            self._attempts.stack[-1].ran.add(entry)

    def _clean_up(self, module: Any, attempt: _Attempt) -> None:
        for entry in self._module_hooks.always_called():
            if entry in attempt.ran or not entry.due():
                continue
            entry.count()
            more = (attempt.kwargs,) if entry.attachment.with_kwargs else ()
            try:
                entry.call(module, (attempt.args, *more, attempt.output))
            except Exception as error:
                with suppress(HooklineWarning):  # where warnings are errors, the first error is still the one to raise
                    warnings.warn(
                        f"always_call hook {entry.attachment.name!r} on {entry.name!r} raised {error!r}; silenced, "
                        "because another error was raised in the forward.",
                        HooklineWarning,
                        stacklevel=3,
                    )


_torch.leave_to_python(CallGuard.__call__, CallGuard._attempt, StaleCallGuard.__call__, below=False)
_torch.leave_to_python(CallGuard._clean_up, _Attempt.__init__, _torch.caller)
