"""Define the steps at which something is due.

``watch`` and `PointHooks` ask a `StepSchedule` at each step. Reports of runs whose length nobody knows are as far apart
as `growing_interval` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hookline.errors import OptionError
from hookline.messages import suggest

__all__ = ["ReportedSteps", "StepSchedule", "growing_interval"]

_MODES: Final = ("continual", "stride", "burst")


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


@dataclass(frozen=True, slots=True)
class ReportedSteps(StepSchedule):
    """Just the steps at whose ends a run reports: what is reported is then of the step that the record bears."""

    reports: Any = None
    """Has ``is_due(step)``."""

    def is_active(self, step: int) -> bool:
        """Return whether there is a report at the end of ``step``."""
        return bool(self.reports.is_due(step))


def growing_interval(step: int, *, every: int, first: int) -> int:
    """Return how far apart points are at ``step``, so that their number grows with the logarithm of a run's length.

    Recipe: ``if step % growing_interval(step, every=10, first=20) == 0``, at 0, 10, …, 200, 220, …, 400, 440, …

    Args:
        step: Counted from 0.
        every: How far apart the ``first`` points are. Whenever the run has become twice as long, it is twice that.
        first: How many points come before the interval doubles, 2 or more; half as many before it doubles again.
    """
    return every << (step // (every * first)).bit_length()
