"""Replace a function of torch for as long as someone listens to its calls.

`BackwardLosses` and the hook ``norms`` use it for ``torch.autograd.backward``. The function comes back
when the last listener has gone, unless someone else has replaced it since: their function calls ours, which then only
hands on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from hookline.sites import _torch

__all__ = ["BACKWARD", "BackwardListener", "Mark", "ReplacedFunction", "mark_of"]

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


# -- the one that losses and gradients are read around ---------------------------------------------------------------

Mark: TypeAlias = tuple[int, int] | None
"""Which gradient a parameter has, and how often that was changed; None if it has none."""


def mark_of(parameter: Tensor) -> Mark:
    """Return something that changes with the gradient of a parameter."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


class BackwardListener(Protocol):
    """What is told of each outermost ``backward()`` of a loss."""

    def is_wanted(self) -> bool:
        """Return whether it is told of the one that begins now."""

    def note(self, loss: Any) -> None:
        """Take each tensor that it is called on."""

    def marks(self) -> list[Mark]:
        """Return what `note_gradients` is to be given."""

    def note_gradients(self, before: list[Mark]) -> None:
        """Look at the gradients, after it."""


class _Within(threading.local):
    """What this thread is in the middle of."""

    backward = False


_within = _Within()


def _make_backward(original: Any, replaced: ReplacedFunction[BackwardListener]) -> Any:
    """Make a ``backward(tensors, grad_tensors=None, …)`` that tells of the tensors."""

    def backward(*args: Any, **kwargs: Any) -> Any:
        for one in replaced.listeners:  # a comprehension or a generator would be one call more
            if one.is_wanted():
                break
        else:
            return original(*args, **kwargs)
        # With gradients, or inside of another backward, it is no loss: a part of a checkpoint, a stage of a pipeline.
        gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        if gradients is not None or _within.backward:
            return original(*args, **kwargs)
        wanting = [one for one in replaced.listeners if one.is_wanted()]
        tensors = args[0] if args else kwargs.get("tensors")
        for listener in wanting:
            for loss in tensors if isinstance(tensors, list | tuple) else (tensors,):
                listener.note(loss)
        before = [(listener, listener.marks()) for listener in wanting]
        _within.backward = True
        try:
            return original(*args, **kwargs)
        finally:
            _within.backward = False
            for listener, marks in before:
                listener.note_gradients(marks)

    return backward


BACKWARD: ReplacedFunction[BackwardListener] = ReplacedFunction(torch.autograd, "backward", _make_backward)
"""``torch.autograd.backward``, which ``loss.backward()`` calls too."""
