"""What a served model puts around a hook: its cost and its errors are counted, and an error need not hurt anybody.

Takes specs from ``live_hooks``, which has `register_hooks` call a `Factory` in the place of theirs, and reads the
counts.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from hookline.error_policy import ErrorPolicy
from hookline.errors import OptionError
from hookline.sites.handle import HookHandle
from hookline.sites.signature import changes_in_place, check_hook, hook_name, may_return_value
from hookline.specs.apply_specs import ErrorHandlingHook, call_factory
from hookline.specs.hook_spec import HookSpec

__all__ = ["CountedHook", "Factory", "innermost"]

logger = logging.getLogger("hookline.serve.hooks")

_CONSEQUENCES: Final = {
    "raise": "fails the requests of that batch; further errors are not logged",
    "warn": "stays on; further errors are not logged",
    "disable": "is switched off",
}


class CountedHook(ErrorHandlingHook):
    """A hook with what is known of it: calls, seconds, errors."""

    def __init__(self, hook: Any, *, name: str, on_error: str, wants_site: bool) -> None:
        super().__init__(hook, ErrorPolicy(on_error, logger, _CONSEQUENCES), name, wants_site)
        self.__qualname__ = name  # reports call it by this
        self.calls = 0
        """How often it was called."""
        self.seconds = 0.0
        """How long it took, on the host."""
        self.in_graph = False
        """Whether it may be part of compiled code, where only its receipt counts."""

    @property
    def errors(self) -> int:
        """How often it raised."""
        return self.policy.counts[self.name]

    @property
    def last_error(self) -> str | None:
        """The last error, with its place; None before the first."""
        return self.policy.last.get(self.name)

    def _call(self, args: tuple[Any, ...], site: Any) -> Any:
        self.calls += 1
        start = time.perf_counter()
        try:
            return self._invoke(args, site)
        except Exception as error:
            if not self._handle(error, site):
                raise
            return None
        finally:
            self.seconds += time.perf_counter() - start


class _CountedObserver(CountedHook):
    """Call a hook that returns nothing."""

    def __call__(self, *args: Any, site: Any) -> None:
        if not self.off:
            self._call(args, site)


class _CountedEdit(CountedHook):
    """Call a hook whose return value counts."""

    def __call__(self, *args: Any, site: Any) -> Any:
        if self.off:
            return None
        if torch.compiler.is_compiling():  # the edit becomes part of the graph, where there is nothing to count
            return self._invoke(args, site)
        return self._call(args, site)


class Factory:
    """Stands for the factory of a spec, and keeps what it makes."""

    def __init__(self, spec: HookSpec, allow: tuple[str, ...] | None, *, compiled: bool = False) -> None:
        self.spec = spec
        self._compiled = compiled
        self.hook: Any = None
        self.counted: CountedHook | None = None
        self._allow = allow

    def __call__(self, config: dict[str, Any]) -> CountedHook | None:
        spec = self.spec
        self.hook = call_factory(spec.hook_factory, config, self._allow)
        if self.hook is None:
            return None
        kind, subject = spec.kind
        wants_site = check_hook(self.hook, kind, site_type=subject)
        name = spec.name or hook_name(self.hook)
        # Whether a hook can edit is read off its code, hence a class for each.
        edits = not spec.observe and (may_return_value(self.hook) or changes_in_place(self.hook))
        counted = _CountedEdit if edits else _CountedObserver
        self.counted = counted(self.hook, name=name, on_error=spec.on_error, wants_site=wants_site)
        self._check_compiled(self.counted)
        return self.counted

    def _check_compiled(self, counted: CountedHook) -> None:
        counted.in_graph = self._compiled and isinstance(counted, _CountedEdit)
        if counted.in_graph and (self.spec.every or 1) > 1:  # else every request would fail
            raise OptionError(
                f"Hook {counted.name!r} edits, and has every={self.spec.every}: in compiled code an edit is made in "
                "every forward or none. Leave every out, or use observe=True."
            )

    def __str__(self) -> str:  # in messages
        return str(self.spec.hook_factory)


def innermost(handle: RemovableHandle) -> Any:
    """The hook that was made; ``every`` has put something around it."""
    assert isinstance(handle, HookHandle)
    hook: Any = handle._attachment.hook
    return hook if isinstance(hook, CountedHook) else hook.hook
