"""While a hook runs, the functions that it calls itself are nobody's business.

Used by ``kernels`` and ``classes``, which torch calls from wherever; a function mode is off in its own handler anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

__all__ = ["HOOKS_OFF", "with_hooks_off"]


class _HooksOff(threading.local):
    on = False
    """Whether this thread is in a hook of ours, or in our own wiring."""


HOOKS_OFF: Final = _HooksOff()


def with_hooks_off(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook, or what our own wiring calls, such that what it uses itself goes unseen."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, HOOKS_OFF.on = HOOKS_OFF.on, True
        try:
            return function(*args, **kwargs)
        finally:
            HOOKS_OFF.on = before

    return run
