"""Check what ``watch`` is asked for; called by it before anything is attached."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import NoMatchError, OptionError
from hookline.messages import type_name
from hookline.sites.select import Named, select, without_scripted

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Target

__all__ = ["KINDS", "check_scaler", "checked_kinds", "chosen_modules"]

KINDS: Final = ("forward", "backward", "param", "param_grad")
"""What can be watched."""


def checked_kinds(on: str | Iterable[str] | None) -> list[str]:
    """Return the kinds that `on` names; all of them for None."""
    kinds = list(dict.fromkeys(KINDS if on is None else [on] if isinstance(on, str) else on))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        near = get_close_matches(str(unknown[0]), KINDS, n=1) if unknown else []
        meant = f" Did you mean {near[0]!r}?" if near else ""
        got = f"unknown kind {unknown[0]!r}" if unknown else "no kind"
        raise OptionError(f"watch(on=...): {got}.{meant} There are {', '.join(map(repr, KINDS))}.")
    return kinds


def check_scaler(scaler: Any) -> None:
    """Raise unless `scaler` is None or scales as torch's do."""
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "scale")):
        raise OptionError(f"scaler= takes a torch.amp.GradScaler, got {type_name(scaler)}.")


def chosen_modules(model: nn.Module, target: Target, exclude: Target, *, lenient: bool) -> list[Named]:
    """Return the modules that `target` means; none if there is no such module, and `lenient`."""
    try:
        return without_scripted(select(model, target, exclude=exclude), target)
    except NoMatchError:
        if not lenient:
            raise
        return []  # parameters may answer to it
