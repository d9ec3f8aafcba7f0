"""Name the points of a run at which hooks fire.

Hooks declare points in ``hook_points``; the loops, or a user's own, fire them through a `HookManager`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from hookline.errors import OptionError
from hookline.messages import did_you_mean

__all__ = ["HookPoint", "validate_points"]


class HookPoint(enum.Enum):
    """A point of a run.

    Recipe: ``hook_points = {HookPoint.POST_EPOCH}`` in a hook; ``manager.fire(HookPoint.POST_EPOCH, epoch=0)`` to fire.

    The epoch loop fires all of them, each where it stands here::

        for epoch in range(epochs):
            PRE_EPOCH
            for batch in loader:
                PRE_STEP
                train_step()
                POST_STEP
            flush_step_metrics()
            scheduler.step()
            evaluate()
            POST_EPOCH
            SNAPSHOT  # if this epoch is one of every snapshot_every

    The step loop fires two of them::

        for step in range(steps):
            train_step()
            scheduler.step()
            POST_STEP
            SNAPSHOT  # if this step is one of every snapshot_every
    """

    PRE_EPOCH = "PRE_EPOCH"
    """Before the first batch of an epoch."""
    PRE_STEP = "PRE_STEP"
    """Before a training step."""
    POST_STEP = "POST_STEP"
    """After a training step."""
    POST_EPOCH = "POST_EPOCH"
    """After all batches, the scheduler and the evaluation."""
    SNAPSHOT = "SNAPSHOT"
    """Now and then, in both loops."""

    # The enum's own hash and comparison go through Python code (0.2 µs per look-up); members are single objects.
    __hash__ = object.__hash__

    @property
    def is_step(self) -> bool:
        """True if it comes with every step: hooks there may have a schedule, and their metrics are buffered."""
        return self is HookPoint.PRE_STEP or self is HookPoint.POST_STEP

    @classmethod
    def of(cls, point: HookPoint | str) -> HookPoint:
        """Return the point itself, or the one of that name."""
        if isinstance(point, cls):
            return point
        if isinstance(point, str) and point.upper() in cls.__members__:
            return cls[point.upper()]
        names = list(cls.__members__)
        meant = did_you_mean(str(point).upper(), names)
        raise OptionError(f"Unknown hook point {point!r}.{meant} There are {', '.join(names)}.")


def validate_points(points: HookPoint | str | Iterable[HookPoint | str]) -> frozenset[HookPoint]:
    """Return what a hook declares as a set of points; names are taken as well."""
    if isinstance(points, HookPoint | str):
        points = [points]
    return frozenset(HookPoint.of(point) for point in points)
