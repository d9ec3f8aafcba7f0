"""Listen to calls of a method of one object, for as long as a run lasts.

The adapters of the Hugging Face Trainer and of Lightning use it, where it tells callbacks too little: the batch and
loss of a step, the beginning of an evaluation, the losses of manual optimization. The class and other objects are
not touched, and the method comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Listener", "listen"]


class Listener(NamedTuple):
    """What is called around a method."""

    before: Callable[..., None]
    """Gets the arguments of the call."""
    after: Callable[[Any], None]
    """Gets what it returned."""
    failed: Callable[[BaseException], None]
    """Gets what it raised, which is raised again."""


def listen(owner: Any, name: str, listener: Listener) -> Callable[[], None]:
    """Call ``listener`` around the method ``name`` of ``owner``; return a function that ends it, in any order."""
    there = vars(owner).get(name)
    if not isinstance(there, _Listened):
        there = _Listened(getattr(owner, name), there)
        setattr(owner, name, there)
    listened = there
    listened.listeners = (*listened.listeners, listener)

    def end() -> None:
        listened.listeners = tuple(one for one in listened.listeners if one is not listener)
        if listened.listeners or vars(owner).get(name) is not listened:
            return
        if listened.own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, listened.own)

    return end


class _Listened:
    """A method with listeners, in its place on the object."""

    def __init__(self, method: Callable[..., Any], own: Any) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        self.own = own
        """What was on the object itself, in front of its class; None if nothing was."""
        self.listeners: tuple[Listener, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listeners = self.listeners
        try:
            for listener in listeners:
                listener.before(*args, **kwargs)
            found = self._method(*args, **kwargs)
            for listener in listeners:
                listener.after(found)
        except BaseException as error:
            for listener in listeners:
                listener.failed(error)
            raise
        return found
