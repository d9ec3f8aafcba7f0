"""Wrap the calls of one module: run ``always_call`` hooks however a call ends, and leave what was entered around it.

`ModuleHooks` puts a `CallGuard` in the place of the module's ``_call_impl`` (the method behind ``module(...)``) while
it has such hooks.
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite


class AroundCall(Protocol):
    """Something that is on for the time of a call."""

    def enter(self) -> None:
        """Begin, as a call begins in this thread."""

    def leave(self) -> None:
        """End, as the call is over, however it ended."""

    def entries(self) -> Iterator[HookAtSite]:
        """Return one entry of each hook that it is there for."""


class _Attempt:
    """One call under way: its values so far, and which of the hooks have run."""

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
    """Stands for the guard in a copied or unpickled model; removes itself at the first call, and passes that on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = _torch.caller()
        if module is not None and module.__dict__.get(_torch.CALL_IMPL) is self:
            del module.__dict__[_torch.CALL_IMPL]
        return getattr(type(module), _torch.CALL_IMPL)(module, *args, **kwargs)


class CallGuard:
    """Wraps one module's call.

    torch runs its own ``always_call`` hooks on an Exception alone; these run on whatever ends the call, a
    KeyboardInterrupt from the forward or from a hook included. A direct call of ``module.forward()`` does not pass
    here.
    """

    __slots__ = ("__weakref__", "_attempts", "_module", "_module_hooks")

    def __init__(self, module_hooks: Any, module: nn.Module) -> None:
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
        """Note the values that the call has reached."""
        if self._attempts.stack:
            attempt = self._attempts.stack[-1]
            attempt.args, attempt.kwargs, attempt.output = args, kwargs, output

    def note_ran(self, entry: HookAtSite) -> None:
        """Note that ``entry`` runs."""
        if self._attempts.stack:
            self._attempts.stack[-1].ran.add(entry)

    def _clean_up(self, module: Any, attempt: _Attempt) -> None:
        for entry in self._module_hooks.always_called():
            if entry in attempt.ran or not entry.is_due():
                continue
            entry.count()
            more = (attempt.kwargs,) if entry.attachment.options.with_kwargs else ()
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
