"""The hook that a factory makes: made, given turns and care as its spec asks for them, and closed.

Called by ``apply_specs``, and by those who look after hooks of their own (`ModelRunner`, served models). A hook whose
spec asks for neither turns (``every``) nor care (``on_error``) is handed back as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.error_policy import ErrorPolicy
from hookline.errors import HookSignatureError, OptionError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.handle import HookHandle
from hookline.sites.signature import changes_in_place, hook_name, may_return_value
from hookline.specs.copy_config import own_copy
from hookline.specs.hook_spec import HookSpec
from hookline.specs.resolve import resolve_callable

__all__ = ["ErrorHandlingHook", "close_hook", "close_hooks", "hook_made_by", "hooks_of", "turns_of", "with_care"]

logger = logging.getLogger("hookline.specs.hook_spec")


def hook_made_by(path: Any, config: Mapping[str, Any], allow: Iterable[str] | None) -> Any:
    """Return what a factory, or the one at a path, makes of a copy of `config`; None if that is what it returns."""
    factory = resolve_callable(path, allow) if isinstance(path, str) else path
    if not callable(factory):
        raise HookSignatureError(f"Hook factory '{path}' is called with a config, and is {type_name(factory)}.")
    hook = factory(own_copy(dict(config)))
    if inspect.iscoroutine(hook):
        hook.close()  # it would warn that nobody waited for it
        raise HookSignatureError(f"Hook factory '{path}' is async: it gives no hook, but a promise of one.")
    return hook


def with_care(hook: Any, spec: HookSpec, *, wants_site: bool) -> Any:
    """The hook with what its spec asks for."""
    if spec.every is None and spec.on_error == "raise":
        return hook
    edits = may_return_value(hook) or changes_in_place(hook)
    # Two classes, as whether a hook can edit is read off its code, and one that cannot is cheaper to watch with.
    return (_ScheduledEdit if edits and not spec.observe else _ScheduledObserver)(hook, spec, wants_site)


def turns_of(hook: Any) -> dict[str, tuple[int, int]] | None:
    """Where the hook ran, if that is not wherever it was called."""
    return hook.turns if isinstance(hook, _ScheduledHook) else None


def hooks_of(handles: Iterable[RemovableHandle]) -> list[Any]:
    """The hooks behind some handles, as their factories made them."""
    found = [handle._attachment.hook for handle in handles if isinstance(handle, HookHandle)]
    return [hook.hook if isinstance(hook, _ScheduledHook) else hook for hook in found]


def close_hooks(hooks: Iterable[Any]) -> None:
    """Have hooks write what they still have, each once; one that raises is logged, and the others go on."""
    for hook in {id(hook): hook for hook in hooks}.values():
        close_hook(hook)


def close_hook(hook: Any) -> Exception | None:
    """Have a hook write what it still has, if it can be closed; what it raised, which is logged."""
    close = getattr(hook, "close", None)
    try:
        if callable(close):
            close()
    except Exception as error:
        logger.exception("Closing hook '%s' raised; what it had not written may be lost", hook_name(hook))
        return error
    return None


class ErrorHandlingHook:
    """Call a hook; under ``on_error`` "warn" and "disable" its exceptions are counted, logged once, and kept inside."""

    def __init__(self, hook: Any, policy: ErrorPolicy, name: str, wants_site: bool) -> None:
        self.hook = hook
        self.name = name
        self.policy = policy
        self.off = False
        """Whether an error has switched it off."""
        self._wants_site = wants_site

    def _invoke(self, args: tuple[Any, ...], site: Any) -> Any:
        return self.hook(*args, site=site) if self._wants_site else self.hook(*args)

    def _handle(self, error: Exception, site: Any) -> bool:
        """Count the error; return whether it stays inside."""
        goes_on = self.policy.handle(self.name, error, f"on {site.name or 'the model'}")
        self.off = self.name in self.policy.disabled
        return goes_on


class _ScheduledHook(ErrorHandlingHook):
    """Run a hook in every n-th forward of the model (``every``)."""

    def __init__(self, hook: Any, spec: HookSpec, wants_site: bool) -> None:
        super().__init__(hook, ErrorPolicy(spec.on_error, logger), spec.name or hook_name(hook), wants_site)
        self.turns: dict[str, tuple[int, int]] = {}
        """How often it ran at each site, and in which forward last; a receipt shows it."""
        self._every = spec.every or 1

    def _is_due(self, step: int) -> bool:
        # Before any step began (-1) it is due: a gradient of a parameter, where no hook saw the forward that led to it.
        return not self.off and max(step, 0) % self._every == 0

    def _call(self, args: tuple[Any, ...], site: Any) -> Any:
        self.turns[site.name] = self.turns.get(site.name, (0, -1))[0] + 1, site.step
        if self.policy.on_error == "raise":
            return self._invoke(args, site)
        try:
            return self._invoke(args, site)
        except Exception as error:
            self._handle(error, site)
            return None


class _ScheduledObserver(_ScheduledHook):
    """Call a hook that returns nothing."""

    def __call__(self, *args: Any, site: Any) -> None:
        if self._is_due(site.step):
            self._call(args, site)


class _ScheduledEdit(_ScheduledHook):
    """Call a hook whose return value counts."""

    def __call__(self, *args: Any, site: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse(self.name, self._every, self.policy.on_error)
        if self._is_due(site.step):
            return self._call(args, site)
        return None


@_torch.constant_while_tracing
def _refuse(name: str, every: int, on_error: str) -> None:
    option = f"every={every}" if every > 1 else f"on_error={on_error!r}"
    raise OptionError(
        f"Hook {name!r} edits, and has {option}: in compiled code an edit is part of the graph, and is made in every "
        f"forward or none. Use observe=True, leave {option.partition('=')[0]} out, or run that module eagerly "
        "(torch.compiler.disable)."
    )
