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

from hookline.errors import HookSignatureError, OptionError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.handle import HookHandle
from hookline.sites.signature import changes_in_place, hook_name, may_return_value
from hookline.specs.copy_config import own_copy
from hookline.specs.hook_spec import HookSpec
from hookline.specs.resolve import resolve_callable

__all__ = ["close_hook", "close_hooks", "hook_made_by", "hooks_of", "turns_of", "with_care"]

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
    return (_Editing if edits and not spec.observe else _Watching)(hook, spec, wants_site)


def turns_of(hook: Any) -> dict[str, tuple[int, int]] | None:
    """Where the hook ran, if that is not wherever it was called."""
    return hook.turns if isinstance(hook, _Careful) else None


def hooks_of(handles: Iterable[RemovableHandle]) -> list[Any]:
    """The hooks behind some handles, as their factories made them."""
    found = [handle._attachment.hook for handle in handles if isinstance(handle, HookHandle)]
    return [hook.hook if isinstance(hook, _Careful) else hook for hook in found]


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


class _Careful:
    """A hook that has a turn in some forwards, and whose exceptions may stay inside."""

    def __init__(self, hook: Any, spec: HookSpec, wants_site: bool) -> None:
        self.hook = hook
        self.errors = 0
        """How often it raised."""
        self.off = False
        self.turns: dict[str, tuple[int, int]] = {}
        """How often it ran at each site, and in which forward last: what a receipt tells."""
        self._every = spec.every or 1
        self._on_error = spec.on_error
        self._wants_site = wants_site
        self._name = spec.name or hook_name(hook)

    def _is_due(self, step: int) -> bool:
        # Before any step began (-1) it is due: a gradient of a parameter, where no hook saw the forward that led to it.
        return not self.off and max(step, 0) % self._every == 0

    def _call(self, args: tuple[Any, ...], site: Any) -> Any:
        self.turns[site.name] = self.turns.get(site.name, (0, -1))[0] + 1, site.step
        options = {"site": site} if self._wants_site else {}
        if self._on_error == "raise":
            return self.hook(*args, **options)
        try:
            return self.hook(*args, **options)
        except Exception as error:
            self._take_note(error, site)
            return None

    def _take_note(self, error: Exception, site: Any) -> None:
        self.errors += 1
        self.off = self._on_error == "disable"
        if self.errors == 1:
            becomes = "is switched off" if self.off else "stays on; further errors are not logged"
            logger.error("Hook '%s' raised on %s; it %s", self._name, site.name or "the model", becomes, exc_info=error)


class _Watching(_Careful):
    """One that returns nothing."""

    def __call__(self, *args: Any, site: Any) -> None:
        if self._is_due(site.step):
            self._call(args, site)


class _Editing(_Careful):
    """One whose return value counts."""

    def __call__(self, *args: Any, site: Any) -> Any:
        if torch.compiler.is_compiling():
            _refuse(self._name, self._every, self._on_error)
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
