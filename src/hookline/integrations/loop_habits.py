"""Learn how a followed loop trains, so that an intervention which trains does the same.

`FollowedLoop` calls it at the end of each step: it sees how many batches make a step, and whether the loop steps its
scheduler for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.integrations.host_adapter import HostSchedule
from hookline.training.step import MicroBatches

if TYPE_CHECKING:
    from hookline.integrations.host_run import HostRun

__all__ = ["LoopHabits"]


class LoopHabits:
    """Set ``accumulate`` and ``scheduler_per`` of a run to what its loop does, unless the user has said them."""

    def __init__(self, host: HostRun, parts: Mapping[str, Any]) -> None:
        self._host = host
        self._counts = "accumulate" not in parts
        self._scheduler = parts.get("scheduler") if "scheduler_per" not in parts else None
        self._position: int | None = None
        """Where the scheduler was at the end of the step before, of the same epoch."""

    def note_step(self, number: int) -> None:
        """Look at a step that is over; ``number`` counts those of its epoch from 1."""
        run = self._host.run
        if run is None or not isinstance(run.schedule, HostSchedule):
            return
        if self._counts and isinstance(run.batch, MicroBatches):
            # The most: the last step of an epoch may have fewer.
            run.experiment.accumulate = max(run.experiment.accumulate, len(run.batch))
        if self._scheduler is None:
            return
        now = getattr(self._scheduler, "last_epoch", None)
        if number > 1 and now is not None and self._position is not None and now > self._position:
            run.experiment.scheduler_per = "step"
            run.schedule.times = now - self._position  # Accelerate makes one for each rank
            self._scheduler = None
        self._position = now
