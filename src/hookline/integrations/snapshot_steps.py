"""Say at which steps of a run that a host trains SNAPSHOT is fired, so that watches and trackers report.

`HostRun` asks. The length of a script is not known when it begins: an interval that grows gives a short run many
reports, and a long one not too many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["SnapshotSteps"]

_AT_FIRST: Final = 20
"""Reports before the interval doubles for the first time; ten reports after that, it doubles again."""


@dataclass(frozen=True)
class SnapshotSteps:
    """Every ``every`` steps, from step 0 on; 0 for none."""

    every: int
    grows: bool = False
    """Whether the interval doubles whenever the run has become twice as long: 10 steps at first, 160 after 1,600. A run
    of 1,000,000 steps has 143 reports."""

    def is_due(self, step: int) -> bool:
        """Return whether there is a report at the end of ``step``, counted from 0."""
        return self.every > 0 and step % self._interval(step) == 0

    def next(self, step: int) -> int:
        """Return the first step from ``step`` on that has a report."""
        interval = self._interval(step)
        return -(-step // interval) * interval

    def count(self, steps: int) -> int:
        """Return how many reports a run of so many steps has."""
        found, step = 0, 0
        while self.every > 0 and (step := self.next(step)) < steps:
            found, step = found + 1, step + 1
        return found

    def _interval(self, step: int) -> int:
        return self.every << (step // (self.every * _AT_FIRST)).bit_length() if self.grows else self.every
