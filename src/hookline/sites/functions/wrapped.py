"""Wrap a function of a class, a module or one object for as long as someone has to know of its calls.

`wrapped` is used in ``integrations`` alone: by the adapters of Accelerate, Lightning and transformers where their
callbacks say too little, and by ``loop_events`` (for `follow`) around ``zero_grad`` and loaders. `around_backward` is
used by ``loop_events`` and by the hook ``norms`` (``analyses.gradients``). Tests: tests/integrations/test_wrapped.py,
and test_follow_losses.py there for `around_backward`.

A wrapper stays harmless after its end, since somebody may keep it or wrap it again: it then only calls the original.
What is put in place of the function carries its `_Wrap` in the attribute `_STATE`. Wrappers come and go under `_LOCK`;
a call takes no lock. The compiler does not trace a wrapper (`_torch.untraced_in_place`), so it may be any Python.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from hookline.sites import _torch

_LOCK: Final = threading.RLock()
_STATE: Final = "_hookline_wrap"
"""The attribute of a function of ours that has its `_Wrap`. ``functools.wraps`` copies it, so see `_ours` too."""


class _Wrap:
    """Whether a function of ours still does something, and what was in its place."""

    def __init__(self, there: tuple[Any, ...]) -> None:
        self.there = there
        """What the owner itself had; nothing if its class had it."""
        self.call: Any = None
        """The function of ours."""
        self.is_on = True


def _ours(function: Any) -> _Wrap | None:
    """Return the `_Wrap` of a function of ours; None for any other, one that somebody has made of ours included."""
    found: _Wrap | None = getattr(function, _STATE, None)
    return found if found is not None and found.call is function else None


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(original, *args, **kwargs)`` in place of ``owner.name``; return a function that ends it.

    Recipe::

        def around(original, *args, **kwargs):
            print("gradients are asked for")
            return original(*args, **kwargs)


        end = wrapped(torch.autograd, "grad", around)

    Several may wrap the same and end in any order: the original is back when the last one has ended. A function that
    someone else has put in front stays, and calls the original through ours. ``end`` may be called again. Of a class,
    ``args`` begin with the object; not for class methods and static methods.
    """
    with _LOCK:
        original = getattr(owner, name)
        wrap = _Wrap((vars(owner)[name],) if name in vars(owner) else ())

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if wrap.is_on else original(*args, **kwargs)

        setattr(call, _STATE, wrap)
        wrap.call = _torch.untraced_in_place(call)
        setattr(owner, name, wrap.call)

    def end() -> None:
        with _LOCK:
            wrap.is_on = False
            while (found := _ours(vars(owner).get(name))) is not None and not found.is_on:
                if found.there:
                    setattr(owner, name, found.there[0])
                else:
                    delattr(owner, name)

    return end


def around_backward(before: Callable[[Sequence[Any]], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call ``before(losses)`` and ``after()`` around each outermost ``backward()`` of losses; return what ends it.

    ``loss.backward()`` calls ``torch.autograd.backward``, which is wrapped. ``after`` is called after an error too.
    """
    within = threading.local()  # `backward`: whether this thread is in the middle of one of losses

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        # With gradients, or inside of another backward, it is no loss: a part of a checkpoint, a stage of a pipeline.
        gradients = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        if gradients is not None or getattr(within, "backward", False):
            return original(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors")
        before(tensors if isinstance(tensors, list | tuple) else (tensors,))
        within.backward = True
        try:
            return original(*args, **kwargs)
        finally:
            within.backward = False
            after()

    return wrapped(torch.autograd, "backward", around)
