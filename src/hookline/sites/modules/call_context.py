"""Whose call it is: a hook with ``scope="context"`` fires for the thread, or asyncio task, that attached it alone.

Opened by ``attach``, asked by the torch_hooks when a hook is about to run. What the owner starts in a copy of its
context (a task, ``asyncio.to_thread``) is the owner's too."""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from typing import Final

from hookline.sites import _torch

__all__ = ["close_context", "open_context", "open_contexts"]

_NUMBERS: Final = itertools.count()
_LIVE: Final[set[int]] = set()
_OPEN: Final[ContextVar[frozenset[int]]] = ContextVar("hookline_open_scopes", default=frozenset())

open_contexts: Final = _OPEN.get
"""The scopes that are open in this context. On CUDA the backward runs in a thread of its own, so ask in the forward."""


def open_context() -> int:
    """Open a scope in this context; its number."""
    number = next(_NUMBERS)
    _LIVE.add(number)
    known = _OPEN.get()
    _OPEN.set((known if _torch.in_run() else known & _LIVE) | {number})
    return number


def close_context(number: int) -> None:
    """Forget a scope whose hook is off. Other contexts may still have the number, which nobody will ask for again.

    So does this one while a model runs: a firing that is under way still runs the hook.
    """
    _LIVE.discard(number)
    if not _torch.in_run():
        _OPEN.set(_OPEN.get() - {number})
