"""Wait for the first step of an optimizer in this process, and remember what came before it.

``sitecustomize`` of ``script_start`` and the callback for Fabric use it, where nobody says what is trained: the first
optimizer that makes a step tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hookline.integrations.backward_losses import BackwardLosses
from hookline.integrations.loader_passes import LoaderPass, LoaderPasses
from hookline.phases import phase

__all__ = ["FirstStep"]

_MOST_LOSSES: Final = 1000
"""How many are kept until the first step: in a process that makes none, they would be kept for ever."""


class FirstStep:
    """Call a function at the first step of an optimizer, before it changes any weight.

    Recipe::

        def begin(optimizer, first):
            first.hand_over(hookline.follow(model, optimizer, ["norms"], loader=first.loader))
            return True  # False: wait for another optimizer; this one is not asked about again


        FirstStep(begin)

    Args:
        begin: Called with the optimizer and this object; returns whether the wait is over.
        at_batch: Called with this object when a ``DataLoader`` gives a batch, before the loop gets it, for those who
            can tell the optimizer before it makes a step; returns whether the wait is over.
    """

    def __init__(
        self,
        begin: Callable[[Any, FirstStep], bool],
        at_batch: Callable[[FirstStep], bool] = lambda first: False,
    ) -> None:
        self._begin = begin
        self._at_batch = at_batch
        self._is_over = False
        self._latest: LoaderPass | None = None
        self._others: WeakSet[Any] = WeakSet()  # looking for the model of one takes longer than most steps
        self._handles = [register_optimizer_step_pre_hook(self._take_step)]
        self._passes = LoaderPasses(DataLoader, self._remember)
        self._losses = BackwardLosses(most=_MOST_LOSSES)

    @property
    def loader(self) -> Any:
        """The ``DataLoader`` whose batch was taken last, in a pass that is not over; None if there is none."""
        return None if self._latest is None or self._latest.is_over else self._latest.loader

    def hand_over(self, run: Any) -> None:
        """Give a `Follow` what was noted: the losses, and the pass over its loader that is under way."""
        run.take_over(self._latest, self._losses)

    def remove(self) -> None:
        """Wait no more; may be called again."""
        self._is_over = True
        for handle in self._handles:
            handle.remove()
        self._stop_noting()

    def _stop_noting(self) -> None:
        self._passes.remove()
        self._losses.remove()
        self._latest = None

    def _remember(self, latest: LoaderPass) -> None:
        self._latest = latest
        if not self._is_over and phase() != "intervention" and self._at_batch(self):
            self.remove()
            latest.tell()  # the one who has begun gets this batch

    def _take_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over or phase() == "intervention":
            return
        if optimizer not in self._others:
            self._is_over = self._begin(optimizer, self)
        if not self._is_over:
            self._others.add(optimizer)
            self._losses.forget()  # those were its own
        else:
            self._stop_noting()
            self._handles.append(optimizer.register_step_post_hook(self._remove_hook))

    def _remove_hook(self, *_: Any) -> None:
        # Only now: torch goes through the hooks before a step while it calls `_take_step`, and fails if one goes.
        self._handles[0].remove()
