"""Notice the tensors on which a loop calls ``backward()``, so that hooks see the loss of a loop that tells nobody.

`Follow` makes one while it lasts. ``torch.autograd.backward``, which ``loss.backward()`` calls too, is replaced by a
function that notes the tensor and calls torch's own; the device is not waited for. ``zero_grad`` of optimizers and
modules is listened to as well: what was noted before gradients were cleared is no part of a step. Nor is a loss whose
backward has changed no gradient of the model: it is that of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.distributed.shards import placed
from hookline.integrations.wrapped import wrapped
from hookline.phases import phase
from hookline.sites.functions.replaced_function import BACKWARD, Mark, mark_of

__all__ = ["BackwardLosses"]

_MOST_PARAMETERS: Final = 256
"""Of how many parameters gradients are looked at: 50 µs."""


class _Noted(NamedTuple):
    """The loss of one backward."""

    loss: Tensor
    scale: Tensor | None
    is_own: bool | None = None
    """Whether its backward has changed a gradient of the model; None if nobody has looked."""


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
        parameters: Those that are trained. When their gradients are cleared, what was noted until then is forgotten.
        on_forget: Called then.
    """

    def __init__(
        self,
        scale: Callable[[], Tensor | None] = lambda: None,
        *,
        most: int | None = None,
        parameters: Iterable[Tensor] = (),
        on_forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._scale = scale
        self._most = most
        self._parameters = tuple(parameters)
        self._on_forget = on_forget
        self._looked_at = _some_of(self._parameters)
        self._noted: list[_Noted] = []
        self._probe: Tensor | None = None
        """A parameter that got a gradient by the last backward: it tells when gradients are cleared."""
        self.keeps_all = False
        """Whether nothing is forgotten until `take`: a closure clears gradients each time that it is called."""
        BACKWARD.add(self)
        self._ends = [wrapped(owner, "zero_grad", self._zero_grad) for owner in (Optimizer, nn.Module)]

    def take(self, *, first: bool = False) -> Tensor | None:
        """Return their sum, or the first of them, on its device; None if there were none. Begin anew."""
        noted, self.keeps_all = self._noted, False
        if not noted:
            return None
        self._noted, self._probe = [], None
        if len(noted) > 1 and any(one.is_own for one in noted):  # if none is, gradients are kept where nobody looks
            noted = [one for one in noted if one.is_own is not False]
        if first:
            noted = noted[:1]
        if len(noted) == 1 and noted[0].scale is None:  # the usual case, without any arithmetic
            return noted[0].loss
        return _add_up(noted)

    def hand_to(self, other: BackwardLosses) -> None:
        """Let ``other`` have those that were noted here, which began to listen later."""
        other._noted = [_Noted(one.loss, other._scale()) for one in self._noted] + other._noted
        self._noted = []

    def forget(self) -> None:
        """Begin anew: what was noted belongs to no step."""
        if self.keeps_all:
            return
        self._noted, self._probe = [], None
        self._on_forget()

    def remove(self) -> None:
        """Notice nothing more, and give torch its own functions back; may be called again."""
        BACKWARD.discard(self)
        for end in self._ends:
            end()
        self._noted, self._probe = [], None

    def is_wanted(self) -> bool:
        """Return True: each backward may be that of a step."""
        return True

    def note(self, loss: Any) -> None:
        """Note one, if it is a loss of training: a single real number, outside of interventions and evaluations."""
        if phase() != "train" or not _is_number(loss):
            return
        if self._probe is not None and self._probe.grad is None:
            self.forget()
        if self._most is None or len(self._noted) < self._most:
            self._noted.append(_Noted(loss.detach(), self._scale()))

    def marks(self) -> list[Mark]:
        """Return something that changes with the gradients of the model."""
        return list(map(mark_of, self._looked_at))

    def note_gradients(self, before: list[Mark]) -> None:
        """Look which parameter has got a gradient, after a backward, and whether any has changed."""
        if self._noted and before and self._noted[-1].is_own is None:
            is_own = any(mark_of(each) != mark for each, mark in zip(self._looked_at, before, strict=True))
            self._noted[-1] = self._noted[-1]._replace(is_own=is_own)
        if self._noted and (self._probe is None or self._probe.grad is None):
            self._probe = next((one for one in self._parameters if one.grad is not None), None)

    def _zero_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``zero_grad``, and look whether it has cleared the gradients of a loss that was noted."""
        probe = self._probe
        before = None if probe is None else mark_of(probe)
        found = original(*args, **kwargs)
        if probe is not None and before is not None and mark_of(probe) != before:
            self.forget()
        return found


def _is_number(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()


def _some_of(parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return parameters whose gradients tell of which model a backward was, evenly from first to last.

    FSDP2 adds to shards inside of a gradient, or keeps gradients elsewhere until the last batch of a step: then none.
    """
    if any(placed(each) is not None for each in parameters):
        return ()
    return parameters[:: -(-len(parameters) // _MOST_PARAMETERS) or 1]


def _add_up(noted: list[_Noted]) -> Tensor:
    with torch.no_grad():
        parts = [loss.reshape(()) if scale is None else loss.reshape(()) / scale for loss, scale, _ in noted]
        return sum(parts[1:], start=parts[0])
