"""Name the moments of a run: the points at which hooks fire, and the steps at which something is due.

Hooks declare points in ``hook_points``. The loops (training/loops.py), runs of other trainers
(integrations/host_run.py) and a user's own loop fire them through `HookManager.fire`. These ask a `StepSchedule` at
each step: ``watch``, ``trace``, analyses/layers.py and the plan of a manager (lifecycle/managed_hooks.py). For a
manager, anything with ``is_active(step)`` is a schedule.

The names of points are written to records, logs and files of sinks, and read back: rename none. Their order here is the
order within an epoch.

A new point needs all of this:

- To fire it: training/loops.py and integrations/host_run.py.
- If an epoch has it before its end: ``begin_epoch`` of `GradientRetention` (training/run.py).
- If the step loop fires it: ``POINTS`` (training/loops.py) and ``_LOOPS`` (testing/checking.py).
- If its name ends with ``_STEP``, every step has it (`HookPoint.is_step`): ``_STEP_POINTS`` (lifecycle/manager.py).
- The loops in the docstring of `HookPoint`, docs/loops.md and docs/lifecycle.md; tests/lifecycle/test_when.py, and the
  tests that unpack `HookPoint` (grep for ``= HookPoint``).

A new mode of a schedule is a name in `_MODES` and a case in `StepSchedule.is_active`, in ``_next_due`` and in
``_schedule_text`` (both lifecycle/managed_hooks.py). It goes into the docstrings of `StepSchedule`, into
tests/lifecycle/test_when.py, and into the modes that tests/training/test_firing.py draws.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hookline.errors import OptionError
from hookline.messages import did_you_mean, suggest


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
    """Once in so many epochs, or steps where steps are counted (``snapshot_every=``)."""

    # The enum's own hash and comparison go through Python code (0.2 µs per look-up); members are single objects.
    __hash__ = object.__hash__

    is_step: bool
    """True if it comes with every step: hooks there may have a schedule, and their metrics are buffered."""

    def __init__(self, name: str) -> None:
        self.is_step = name.endswith("_STEP")  # an attribute, as a property takes 0.7 µs, and each firing asks

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
    """Return the points that a hook declares, one or several, each also by its name, as a set."""
    if isinstance(points, HookPoint | str):
        points = [points]
    return frozenset(HookPoint.of(point) for point in points)


_MODES: Final = ("continual", "stride", "burst")
"""The modes of a schedule; the head of this file says where else each has a case."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Every step, every n-th, or k in a row every n.

    Recipe::

        StepSchedule()  # every step
        StepSchedule("stride", stride=50)  # 0, 50, 100, ...
        StepSchedule("burst", stride=100, burst_length=3, warmup=200)  # 200, 201, 202, 300, ...

    Steps count from 0. ``warmup`` is a floor, it does not shift the steps: with a stride of 10 and a warmup of 11, the
    first step that is due is 20.
    """

    mode: str = "continual"
    """``"continual"``, ``"stride"`` or ``"burst"``."""
    stride: int = 1
    """How many steps from one that is due (or the first of a burst) to the next."""
    burst_length: int = 1
    """How many steps in a row are due, for ``"burst"``."""
    warmup: int = 0
    """No step before this one is due."""

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            meant = suggest(self.mode, _MODES) or "."
            raise OptionError(
                f"Unknown schedule mode {self.mode!r}: it is one of {', '.join(map(repr, _MODES))}{meant}"
            )
        for name, least in (("stride", 1), ("burst_length", 1), ("warmup", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{name}= must be a whole number of at least {least}, got {value!r}.")

    def is_active(self, step: int) -> bool:
        """Return whether `step`, counted from 0, is due."""
        if step < self.warmup:
            return False
        if self.mode == "continual":
            return True
        return step % self.stride < (self.burst_length if self.mode == "burst" else 1)

    @classmethod
    def of(cls, every: StepSchedule | int) -> StepSchedule:
        """Return the schedule that ``every=`` means: one, or the number of steps between two that are due."""
        if isinstance(every, StepSchedule):
            return every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise OptionError(f"every= is a number of steps of at least 1, or a StepSchedule; got {every!r}.")
        return cls() if every == 1 else cls("stride", stride=every)
