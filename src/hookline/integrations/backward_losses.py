"""Notice the tensors on which a loop calls ``backward()``, so that hooks see the loss of a loop that tells nobody.

`Follow` makes one while it lasts. ``torch.Tensor.backward`` is replaced by a function that notes the tensor and calls
torch's own; the device is not waited for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookline.lifecycle.run_phase import phase

__all__ = ["BackwardLosses"]


class BackwardLosses:
    """Add up the numbers on which ``backward()`` was called since `take` was called last.

    Recipe::

        losses = BackwardLosses()
        (model(x).square().mean() / 2).backward()
        (model(y).square().mean() / 2).backward()
        losses.take()  # their sum, which is the loss of the step

    Args:
        scale: Returns what the loop multiplies its losses by, for a `GradScaler`; None if there is none.
        most: How many are kept at most; later ones are passed over.
    """

    _listening: ClassVar[list[BackwardLosses]] = []
    _torchs_own: ClassVar[Any] = None
    _ours: ClassVar[Any] = None
    _lock = threading.Lock()

    def __init__(self, scale: Callable[[], Tensor | None] = lambda: None, *, most: int | None = None) -> None:
        self._scale = scale
        self._most = most
        self._noted: list[tuple[Tensor, Tensor | None]] = []
        with self._lock:
            if not self._listening:
                _replace()
            self._listening.append(self)

    def take(self, *, first: bool = False) -> Tensor | None:
        """Return their sum, or the first of them, on its device; None if there were none. Begin anew."""
        noted, self._noted = self._noted[:1] if first else self._noted, []
        if len(noted) == 1 and noted[0][1] is None:  # the usual case, without any arithmetic
            return noted[0][0]
        return _add_up(noted) if noted else None

    def hand_to(self, other: BackwardLosses) -> None:
        """Let ``other`` have those that were noted here, which began to listen later."""
        other._noted = [(loss, other._scale()) for loss, _ in self._noted] + other._noted
        self._noted = []

    def remove(self) -> None:
        """Notice nothing more, and give torch its own function back; may be called again."""
        with self._lock:
            if self in self._listening:
                self._listening.remove(self)
            # One who has replaced it after us calls ours, which calls torch's.
            if not self._listening and Tensor.backward is type(self)._ours:
                Tensor.backward = type(self)._torchs_own  # type: ignore[method-assign]
        self._noted = []

    def note(self, loss: Tensor) -> None:
        """Note one, if it is a loss of training: a single real number, outside of interventions and evaluations."""
        is_loss = loss.numel() == 1 and loss.is_floating_point() and phase() == "train"
        if is_loss and (self._most is None or len(self._noted) < self._most):
            self._noted.append((loss.detach(), self._scale()))


def _replace() -> None:
    cls = BackwardLosses
    original: Any = Tensor.backward
    cls._torchs_own = original

    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for losses in tuple(cls._listening):
                losses.note(self)
        return original(self, *args, **kwargs)

    cls._ours = Tensor.backward = backward  # type: ignore[method-assign]


def _add_up(noted: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    with torch.no_grad():
        parts = [loss.reshape(()) if scale is None else loss.reshape(()) / scale for loss, scale in noted]
        return sum(parts[1:], start=parts[0])
