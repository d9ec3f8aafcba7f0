"""Replace a function of torch for as long as someone listens to its calls.

`BackwardLosses` uses it for ``torch.autograd.backward`` and the two ``zero_grad``. The function comes back when the
last listener has gone, unless someone else has replaced it since: their function calls ours, which then only hands on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hookline.sites import _torch

__all__ = ["ReplacedFunction"]

_Listener = TypeVar("_Listener")


class ReplacedFunction(Generic[_Listener]):
    """A function in its place, which may be replaced by one that tells `listeners` of each call.

    Recipe::

        def make(original, replaced):
            def backward(*args, **kwargs):
                for listener in replaced.listeners:
                    listener(args)
                return original(*args, **kwargs)

            return backward


        backward = ReplacedFunction(torch.autograd, "backward", make)
        backward.add(print)  # now torch.autograd.backward(loss) prints its arguments
        backward.discard(print)

    Args:
        owner: The module or class that has it.
        name: What it is called there.
        make: Makes what is called in its place, of the original and this object. It is not traced by the compiler.
    """

    def __init__(self, owner: Any, name: str, make: Callable[..., Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._original: Any = None
        self._ours: Any = None
        self.listeners: tuple[_Listener, ...] = ()
        """Those that are told."""
        self._lock = threading.Lock()

    def add(self, listener: _Listener) -> None:
        """Tell ``listener`` from now on."""
        with self._lock:
            if not self.listeners:
                self._replace()
            self.listeners = (*self.listeners, listener)

    def discard(self, listener: _Listener) -> None:
        """Tell ``listener`` no more; may be called again."""
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
            if not self.listeners and self._ours is not None and self._there() is self._ours:
                setattr(self._owner, self._name, self._original)
                self._ours = None

    def _there(self) -> Any:
        return vars(self._owner).get(self._name)

    def _replace(self) -> None:
        if self._ours is not None:  # still called, by a function that was put in front of it
            return
        self._original = self._there()
        replaced = functools.wraps(self._original)(self._make(self._original, self))
        self._ours = _torch.untraced_in_place(replaced)
        setattr(self._owner, self._name, self._ours)
