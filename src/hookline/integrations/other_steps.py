"""Count the steps of optimizers that train something other than the model that is followed.

The session of a followed script uses it, to say at the end what was not seen: the generator beside the discriminator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook

from hookline.lifecycle.run_phase import phase
from hookline.sites import _torch

__all__ = ["OtherSteps"]


class OtherSteps:
    """Count steps of optimizers that share no parameter with one.

    Recipe: ``others = OtherSteps(optimizer)``; after training, ``others.counts`` is ``{"Adam": 12}``.

    Args:
        optimizer: The one that is followed.
        before: Steps of others that were made before, by the class of the optimizer.
    """

    def __init__(self, optimizer: Any, before: Mapping[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter(before or {})
        """How many steps, by the class of the optimizer."""
        self._followed = optimizer
        self._is_other: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._handle = register_optimizer_step_post_hook(self._note)

    def remove(self) -> None:
        """Count no more; may be called again."""
        self._handle.remove()

    @_torch.untraced_in_place  # also where a loop compiles the step of its optimizer
    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._followed or phase() == "intervention":
            return
        if optimizer not in self._is_other:  # one inside a wrapper has the same parameters
            self._is_other[optimizer] = not _parameters(optimizer) & _parameters(self._followed)
        if self._is_other[optimizer]:
            self.counts[type(optimizer).__name__] += 1


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
