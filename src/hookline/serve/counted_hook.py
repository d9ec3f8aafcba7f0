"""What a served model puts around a hook: its cost and its errors are counted, and an error need not hurt anybody.

Takes specs from ``live_hooks``, which has `register_hooks` call a `Factory` in the place of theirs, and reads the
counts.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.errors import OptionError
from hookline.sites.handle import HookHandle
from hookline.sites.signature import changes_in_place, check_hook, hook_name, may_return_value
from hookline.specs.hook_spec import HookSpec
from hookline.specs.spec_hooks import hook_made_by

__all__ = ["Factory", "Guarded", "innermost"]

logger = logging.getLogger("hookline.serve.hooks")


def _guard(hook: Any, *, name: str, on_error: str, wants_site: bool, observe: bool) -> Guarded:
    """The hook, watched. Whether a hook can edit is read off its code, hence a class for each."""
    edits = not observe and (may_return_value(hook) or changes_in_place(hook))
    return (_Editing if edits else _Watching)(hook, name=name, on_error=on_error, wants_site=wants_site)


class Guarded:
    """A hook with what is known of it."""

    def __init__(self, hook: Any, *, name: str, on_error: str, wants_site: bool) -> None:
        self.hook = hook
        self.name = self.__qualname__ = name  # reports call it by the latter
        self.calls = 0
        """How often it was called."""
        self.seconds = 0.0
        """How long it took, on the host."""
        self.errors = 0
        self.last_error: str | None = None
        self.off = False
        self.in_graph = False
        """Whether it may be part of compiled code, where only its receipt counts."""
        self._on_error = on_error
        self._wants_site = wants_site

    def _call(self, args: tuple[Any, ...], site: Any) -> Any:
        self.calls += 1
        start = time.perf_counter()
        try:
            return self._straight(args, site)
        except Exception as error:
            self._take_note(error, site)
            if self._on_error == "raise":
                raise
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def _straight(self, args: tuple[Any, ...], site: Any) -> Any:
        return self.hook(*args, site=site) if self._wants_site else self.hook(*args)

    def take_note(self, error: Exception, where: str) -> None:
        """Count an error, and keep it as the last."""
        self.errors += 1
        self.last_error = f"{type(error).__name__} {where}: {error}"

    def _take_note(self, error: Exception, site: Any) -> None:
        self.take_note(error, f"on {site.name or 'the model'}")
        self.off = self._on_error == "disable"
        if self.errors == 1:
            becomes = {"disable": "is switched off", "warn": "stays on; further errors are not logged"}
            what = becomes.get(self._on_error, "fails the requests of that batch; further errors are not logged")
            logger.error("Hook '%s' raised on %s; it %s", self.name, site.name or "the model", what, exc_info=error)


class _Watching(Guarded):
    """One that returns nothing."""

    def __call__(self, *args: Any, site: Any) -> None:
        if not self.off:
            self._call(args, site)


class _Editing(Guarded):
    """One whose return value counts."""

    def __call__(self, *args: Any, site: Any) -> Any:
        if self.off:
            return None
        if torch.compiler.is_compiling():  # the edit becomes part of the graph, where there is nothing to count
            return self._straight(args, site)
        return self._call(args, site)


class Factory:
    """Stands for the factory of a spec, and keeps what it makes."""

    def __init__(self, spec: HookSpec, allow: tuple[str, ...] | None, *, compiled: bool = False) -> None:
        self.spec = spec
        self._compiled = compiled
        self.hook: Any = None
        self.guarded: Guarded | None = None
        self._allow = allow

    def __call__(self, config: dict[str, Any]) -> Guarded | None:
        spec = self.spec
        self.hook = hook_made_by(spec.hook_factory, config, self._allow)
        if self.hook is None:
            return None
        kind, subject = spec.kind
        wants_site = check_hook(self.hook, kind, subject=subject)
        name = spec.name or hook_name(self.hook)
        self.guarded = _guard(self.hook, name=name, on_error=spec.on_error, wants_site=wants_site, observe=spec.observe)
        self._check_compiled(self.guarded)
        return self.guarded

    def _check_compiled(self, guarded: Guarded) -> None:
        guarded.in_graph = self._compiled and isinstance(guarded, _Editing)
        if guarded.in_graph and (self.spec.every or 1) > 1:  # else every request would fail
            raise OptionError(
                f"Hook {guarded.name!r} edits, and has every={self.spec.every}: in compiled code an edit is made in "
                "every forward or none. Leave every out, or use observe=True."
            )

    def __str__(self) -> str:  # in messages
        return str(self.spec.hook_factory)


def innermost(handle: RemovableHandle) -> Any:
    """The hook that was made; ``every`` has put something around it."""
    assert isinstance(handle, HookHandle)
    hook: Any = handle._attachment.hook
    return hook if isinstance(hook, Guarded) else hook.hook
