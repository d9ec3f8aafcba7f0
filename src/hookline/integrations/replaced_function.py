"""Replace a function of torch for as long as someone listens to its calls.

`BackwardLosses` uses it for ``torch.autograd.backward`` and the two ``zero_grad``. The function comes back when the
last listener has gone, unless someone else has replaced it since: their function calls ours, which then only hands on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["ReplacedFunction"]

_Listener = TypeVar("_Listener")


class ReplacedFunction(Generic[_Listener]):
    """A function in its place, which may be replaced by one that tells `listeners` of each call.

    Recipe::

        def tell(original, listeners, *args, **kwargs):
            for listener in listeners:
                listener(args)
            return original(*args, **kwargs)


        backward = ReplacedFunction(torch.autograd, "backward", tell)
        backward.add(print)  # now torch.autograd.backward(loss) prints its arguments
        backward.discard(print)

    Args:
        owner: The module or class that has it.
        name: What it is called there.
        tell: Called in its place, with the original, the listeners and the arguments.
    """

    def __init__(self, owner: Any, name: str, tell: Callable[..., Any]) -> None:
        self._owner, self._name, self._tell = owner, name, tell
        self._original: Any = None
        self._ours: Any = None
        self._listeners: tuple[_Listener, ...] = ()
        self._lock = threading.Lock()

    def add(self, listener: _Listener) -> None:
        """Tell ``listener`` from now on."""
        with self._lock:
            if not self._listeners:
                self._replace()
            self._listeners = (*self._listeners, listener)

    def discard(self, listener: _Listener) -> None:
        """Tell ``listener`` no more; may be called again."""
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)
            if not self._listeners and self._ours is not None and self._there() is self._ours:
                setattr(self._owner, self._name, self._original)
                self._ours = None

    def _there(self) -> Any:
        return vars(self._owner).get(self._name)

    def _replace(self) -> None:
        if self._ours is not None:  # still called, by a function that was put in front of it
            return
        self._original = original = self._there()
        tell = self._tell

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return tell(original, self._listeners, *args, **kwargs)

        self._ours = replaced
        setattr(self._owner, self._name, replaced)
