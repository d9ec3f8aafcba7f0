"""While a hook runs, the functions that it calls itself are nobody's business.

Used by ``kernels`` and ``classes``, which torch calls from wherever; a function mode is off in its own handler anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

__all__ = ["QUIET", "undisturbed"]


class _Quiet(threading.local):
    on = False
    """Whether this thread is in a hook of ours, or in our own wiring."""


QUIET: Final = _Quiet()


def undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook, or what our own wiring calls, such that what it uses itself goes unseen."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, QUIET.on = QUIET.on, True
        try:
            return function(*args, **kwargs)
        finally:
            QUIET.on = before

    return run
