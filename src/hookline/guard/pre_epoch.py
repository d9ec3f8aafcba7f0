"""A run as it was before an epoch, for hooks that ask how the epoch could have gone otherwise.

Taken by the loops at the beginning of an epoch whose hooks need it, handed to `ModelDataContext`.
"""

from __future__ import annotations

from typing import Any, Self

from hookline.errors import GuardError
from hookline.guard.interrupts import undisturbed
from hookline.guard.snapshot import Snapshot, roots_of, unrestored
from hookline.guard.tensor_copies import Where

__all__ = ["PreEpochState"]


class PreEpochState:
    """Model, optimizer, scheduler, scaler and random streams before an epoch.

    Recipe::

        before = PreEpochState.take(model, optimizer)
        train_one_epoch()
        before.restore()  # inside an intervention, which is undone again
        before = PreEpochState.take(model, optimizer, into=before)  # the next epoch, in the same memory
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @classmethod
    def take(
        cls,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        loader: Any = None,
        where: Where = "auto",
        into: PreEpochState | None = None,
    ) -> Self:
        """Save them as they are now; ``into`` an earlier one, whose memory is used again and which is no more."""
        roots = roots_of(model, optimizer, scheduler, scaler, loader)
        snapshot = Snapshot(roots, where) if into is None or not into.is_about(roots) else into._snapshot
        with undisturbed():
            snapshot.take("all", gradients=False)
        return cls(snapshot)

    def is_about(self, roots: dict[str, object]) -> bool:
        """Whether these are the objects that were saved."""
        return self._snapshot.roots == roots

    def restore(self) -> None:
        """Go back to before the epoch; gradients stay as they are."""
        with undisturbed():
            lost = self._snapshot.restore(gradients=False, hooks=False, versions=False)
        if lost:
            raise GuardError(unrestored("restore_pre_epoch(): something since", lost))

    @property
    def saved_bytes(self) -> int:
        """How much was copied."""
        return self._snapshot.nbytes
