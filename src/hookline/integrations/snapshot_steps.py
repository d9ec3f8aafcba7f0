"""Fire SNAPSHOT at some steps of a run that a host trains, and at its last one, so that watches and trackers report.

`HostRun` calls `StepReports`. The length of a script is not known when it begins: an interval that grows gives a short
run many reports, and a long one not too many.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hookline.when import HookPoint, growing_interval

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookline.lifecycle.hook import TrainingHook
    from hookline.training.run import Run

__all__ = ["OFTEN_AT_FIRST", "SnapshotSteps", "StepReports", "can_count_steps"]

_AT_FIRST: Final = 20
"""Reports before the interval doubles for the first time; ten reports after that, it doubles again."""
_STEP_POINTS: Final = frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT})

logger = logging.getLogger(__name__)


def can_count_steps(hooks: Iterable[TrainingHook]) -> bool:
    """Return whether all that these hooks do can be done where steps are counted, and not epochs."""
    return all(
        _STEP_POINTS.issuperset(hook.hook_points or ())
        if hook.loop_points is None
        else bool(hook.loop_points.get("step"))
        for hook in hooks
    )


@dataclass(frozen=True)
class SnapshotSteps:
    """Every ``every`` steps, from step 0 on; 0 for none."""

    every: int
    grows: bool = False
    """Whether the interval doubles whenever the run has become twice as long: 10 steps at first, 160 after 1,600. A run
    of 1,000,000 steps has 144 reports."""

    def is_due(self, step: int) -> bool:
        """Return whether there is a report at the end of ``step``, counted from 0."""
        return self.every > 0 and step % self._interval(step) == 0

    def next(self, step: int) -> int:
        """Return the first step from ``step`` on that has a report."""
        interval = self._interval(step)
        return -(-step // interval) * interval

    def _interval(self, step: int) -> int:
        return growing_interval(step, every=self.every, first=_AT_FIRST) if self.grows else self.every


OFTEN_AT_FIRST: Final = SnapshotSteps(10, grows=True)
"""When a run reports that was told nothing else."""


class StepReports:
    """Fire SNAPSHOT in a run that counts steps: where it is due, and at the end for the steps since.

    Recipe: ``begin_run()``; ``begin_step(run, step)`` and ``end_step(run)`` around each step; ``end_run(run)``.
    """

    def __init__(self, when: SnapshotSteps) -> None:
        self._when = when
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run: nothing is left to report."""
        self._is_first = True
        self._is_open = False
        """Whether a step was made since the last report."""
        self._loss: Any = None

    def go_on(self) -> None:
        """Go on with loaded state, in which the steps up to the next report have begun."""
        self._is_first = False

    def begin_step(self, run: Run, step: int) -> None:
        """Begin the steps up to the next report, if ``step`` is the first of them."""
        is_first, self._is_first = self._is_first, False
        if self._when.every and (is_first or step == 0 or self._when.is_due(step - 1)):
            run.begin_stretch(self._when.next(step))

    def end_step(self, run: Run) -> None:
        """Report if it is time to."""
        if self._when.is_due(run.step):
            self._report(run)
        else:
            self._is_open, self._loss = True, run.loss

    def end_run(self, run: Run, *, is_in_step: bool) -> None:
        """Report the steps since the last report, which a run of any length would otherwise end without.

        Args:
            run: The run.
            is_in_step: Whether a step has begun that was never made: a loop may take a batch and stop, or fail.
        """
        if not self._when.every:
            return
        if is_in_step:
            run.step -= 1
            run.manager.global_step = run.step
            run.loss = self._loss
        if self._is_open:
            self._report(run)

    def end_failed_run(self, run: Run, error: BaseException, *, is_in_step: bool) -> None:
        """Report as `end_run` does when ``error`` ends the run; not on one of several ranks: others may still train."""
        if not run.manager.output.ranks.is_single:
            return
        try:
            self.end_run(run, is_in_step=is_in_step)
        except BaseException:  # also a second Ctrl-C: what ended the run is what the user has to see, and it is written
            logger.exception("The last steps could not be reported when the run ended by %s", type(error).__name__)

    def _report(self, run: Run) -> None:
        self._is_open, self._loss = False, None
        run.end_stretch()
        run.fire(HookPoint.SNAPSHOT)
