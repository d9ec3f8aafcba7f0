"""Wrap a function of a class, a module or one object for as long as someone has to know of its calls.

The adapters use it where a trainer tells callbacks too little; `follow` uses it on loaders and on ``zero_grad``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from hookline.sites import _torch

__all__ = ["wrapped"]

_LOCK: Final = threading.RLock()
_STATE: Final = "_hookline_wrap"
"""The attribute of a function of ours that has its `_Wrap`."""


class _Wrap:
    """Whether a function of ours still does something, and what was in its place."""

    def __init__(self, there: tuple[Any, ...]) -> None:
        self.there = there
        """What the owner itself had; nothing if its class had it."""
        self.is_on = True


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(original, *args, **kwargs)`` in place of ``owner.name``; return a function that ends it.

    Recipe::

        def around(original, *args, **kwargs):
            print("a backward begins")
            return original(*args, **kwargs)


        end = wrapped(torch.autograd, "backward", around)

    Several may wrap the same and end in any order: the original is back when the last one has ended. A function that
    someone else has put in front stays, and calls the original through ours. ``end`` may be called again.
    """
    with _LOCK:
        original = getattr(owner, name)
        wrap = _Wrap((vars(owner)[name],) if name in vars(owner) else ())

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if wrap.is_on else original(*args, **kwargs)

        setattr(call, _STATE, wrap)
        setattr(owner, name, _torch.untraced_in_place(call))

    def end() -> None:
        with _LOCK:
            wrap.is_on = False
            while (found := getattr(vars(owner).get(name), _STATE, None)) is not None and not found.is_on:
                if found.there:
                    setattr(owner, name, found.there[0])
                else:
                    delattr(owner, name)

    return end
