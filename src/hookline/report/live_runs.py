"""Keep runs that are still going in memory, up to date, and packed for the page that shows them.

`live_server` asks `LiveRuns` for the newest state; this reads what is new by `follow_log`, and packs by `report_page`.
The work is bounded: logs are read once, long runs are thinned here, and looking takes a tenth of the time at most.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hookline.errors import OptionError
from hookline.report.follow_log import LogFollower
from hookline.report.metric_series import Collector, RunSeries, newest_points
from hookline.report.report_page import JudgedRun, judge, packed_runs, thin
from hookline.report.report_runs import FACTS, RunRecords, distinct_names, find_runs, log_of, runs_of

__all__ = ["LiveCollector", "LiveRuns"]

_SHARE: Final = 0.1
"""Of the time of one core that reading, judging and packing may take."""
_MAX_POINTS: Final = 2_000_000
"""Numbers that are kept of one run, 32 MB: 10,000 steps of 200 metrics."""
_MAX_SENT: Final = 1_000_000
"""Numbers of all runs that the page is sent at once, about 3 MB."""
_MAX_ROWS: Final = 512
"""Moments that are kept of a list or a histogram; a screen has no more columns for them."""
_MAX_MOMENTS: Final = 100_000


class LiveCollector(Collector):
    """Collects the metrics of a run that may go on for ever: what is older is thinned when there is too much."""

    is_thinned = False

    def series(self, started: float | None = None) -> RunSeries:
        """Return everything so far, as copies: an array that numpy looks into cannot grow."""
        found = super().series(started)
        found.curves = [replace(one, steps=one.steps.copy(), values=one.values.copy()) for one in found.curves]
        return found

    def shrink(self, most: int = _MAX_POINTS) -> None:
        """Halve curves, the longest first, until there are ``most`` numbers at most; peaks stay."""
        total = sum(len(steps) for steps, _ in self.numbers.values())
        for key, (steps, values) in sorted(self.numbers.items(), key=lambda item: -len(item[1][0])):
            if total <= most or len(steps) < 200:
                break
            at, chosen = newest_points(steps)
            kept_at, kept = thin(at, np.asarray(values)[chosen][None], max(100, len(steps) // 2))
            total -= len(steps) - kept_at.size
            self.numbers[key] = (array("q", kept_at.tolist()), array("d", kept[0].tolist()))
            self.is_thinned = True
        for key, (moments, rows) in self.lists.items():
            if len(moments) > _MAX_ROWS:
                self.lists[key] = (moments[-1::-2][::-1], rows[-1::-2][::-1])  # every other one, the last among them
                self.is_thinned = True
        if len(self.moments) > _MAX_MOMENTS:
            self.moments = self.moments[-1::-2][::-1]


class _LiveLog:
    """One log, what was read of it, and what was found in that."""

    def __init__(self, path: Path) -> None:
        self.log = log_of(path)
        self.share = 1.0
        self.judged: list[JudgedRun] = []
        self._follower = LogFollower(self.log)
        self._records = RunRecords(LiveCollector)
        self._facts_at = self._stamp()

    def look(self) -> bool:
        """Read what is new; return whether anything is."""
        news, facts_at = self._follower.news(), self._stamp()
        if self.judged and not news.entries and not news.is_anew and facts_at == self._facts_at:
            return False
        if news.is_anew:
            self._records = RunRecords(LiveCollector)
        self._records.take(news.entries)
        self.share, self._facts_at = news.share, facts_at
        for collected in self._records.by_strategy.values():
            collected.shrink()
        self.judged = [judge(run) for run in runs_of(self.log, self._records, self._remarks())]
        return True

    def _remarks(self) -> list[str]:
        is_thinned = any(collected.is_thinned for collected in self._records.by_strategy.values())
        thinned = (
            "This run is long, so older points are thinned here, each stretch to its smallest and largest, and "
            "anomalies are looked for in what is left. The log has everything: hookline report."
        )
        reading = f"{100 * self.share:.0f} % of the log is read."
        return [thinned] * is_thinned + [reading] * (self.share < 1)

    def _stamp(self) -> tuple[int, bool]:
        """Return when ``run.json`` was written, and whether there is a log."""
        try:
            return os.stat(self.log.parent / FACTS).st_mtime_ns, self.log.exists()
        except OSError:
            return 0, self.log.exists()

    @property
    def news_at(self) -> float | None:
        """When the log was last written to, in seconds since 1970."""
        try:
            return os.stat(self.log).st_mtime
        except OSError:
            return None

    def close(self) -> None:
        self._follower.close()


class LiveRuns:
    """Runs that are followed, for a page.

    Recipe: ``runs = LiveRuns(["runs/mod_arithmetic"]); version, packed = runs.newest(); runs.newest(since=version)``.

    Runs that begin later in a folder that was given are added at the end. May be asked by several threads.

    Args:
        paths: Folders of runs, folders that hold runs, or logs.
        share: The share of one core's time that looking may take; the next look waits for as long as that needs.
    """

    def __init__(self, paths: Sequence[str | Path], *, share: float = _SHARE) -> None:
        self._paths = list(paths)
        self._logs = {path: _LiveLog(path) for path in find_runs(self._paths)}
        self._share = share
        self._lock = threading.Lock()
        self._next = 0.0
        self._version = 0
        self._packed = b""

    def newest(self, since: int | None = None) -> tuple[int, bytes | None]:
        """Return the version of what is known, and that packed; None for the latter if ``since`` is that version."""
        with self._lock:
            if time.monotonic() >= self._next:
                self._look()
            return self._version, None if since == self._version else self._packed

    def close(self) -> None:
        """Close all logs. May be called more than once."""
        with self._lock:
            for log in self._logs.values():
                log.close()

    def _look(self) -> None:
        began = time.monotonic()
        self._find()
        looked = [log.look() for log in self._logs.values()]
        if any(looked) or not self._version:
            self._version += 1
            self._packed = self._pack()
        ended = time.monotonic()
        is_behind = any(log.share < 1 for log in self._logs.values())
        self._next = ended if is_behind else ended + (ended - began) * (1 / self._share - 1)

    def _find(self) -> None:
        """Take in runs that have begun; the order of those there are stays, and so do their colours."""
        with suppress(OptionError):  # a folder was removed: what was read of it stays
            found = find_runs(self._paths)
            for path in [path for path in self._logs if path not in found]:
                self._logs.pop(path).close()
            self._logs |= {path: _LiveLog(path) for path in found if path not in self._logs}

    def _pack(self) -> bytes:
        shown: list[JudgedRun] = []
        news: list[float | None] = []
        for log in self._logs.values():
            shown += [replace(one, run=replace(one.run)) for one in log.judged]  # names are lengthened below
            news += [log.news_at] * len(log.judged)
        distinct_names([one.run for one in shown])
        live: dict[str, Any] = {"version": self._version, "news": news}
        return packed_runs(shown, {"live": live}, most=_MAX_SENT)
