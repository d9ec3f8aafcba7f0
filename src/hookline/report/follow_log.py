"""Read what comes to a record log while another process writes it.

`live_runs` asks a `LogFollower` now and then. Each question reads only the bytes that are new, and never locks or
changes the file, so that the run which writes it cannot notice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from hookline.sinks.record_log import Entry, parse_line
from hookline.sinks.sink import Record

__all__ = ["LogFollower", "LogNews"]

_MOST: Final = 32 << 20
"""Bytes that one question reads: a log of any size is caught up with in pieces of less than a second."""
_MARK: Final = 256
"""Bytes before the place that is read up to, by which a log that was cut and has grown again is known."""


@dataclass(slots=True)
class LogNews:
    """What came since the last question."""

    entries: list[Entry] = field(default_factory=list)
    """Contexts and records, in order."""
    is_anew: bool = False
    """Whether what was read before does not count any more: the log was cut back, or is that of another run."""
    share: float = 1.0
    """How much of the log is read; below 1 there is more at once."""


class LogFollower:
    """Follows one log.

    Recipe: ``follower = LogFollower(Path("runs/a/b/records.jsonl")); follower.news().entries``.

    A last line without its end is read when it is whole. A log that is cut back, as when a run is resumed, is read once
    more from its beginning. If another file takes its place, what is left of the old one is read first; records whose
    numbers go on then belong to the same run (the log was rotated), others are those of a new one.
    """

    def __init__(self, path: Path, *, most: int = _MOST) -> None:
        self.path = path
        self._most = most
        self._file: BinaryIO | None = None
        self._at = 0
        self._mark = b""
        self._last = -1
        """The number of the last record; of a run that begins anew, its numbers do as well."""
        self._is_judged = True
        """Whether the records of this file are known to follow those before, or not to."""
        self._contexts: list[Entry] = []
        """Those that came before the first record of a file that is not judged."""

    def news(self) -> LogNews:
        """Return what came since the last call."""
        found = LogNews()
        if self._file is None and not self._open():
            return found
        if not self._is_as_left():
            self._begin_again()
        self._read(found)
        if found.share == 1.0 and self._is_replaced():
            self.close()
            if self._open():
                self._begin_again()
                self._read(found)
        return found

    def close(self) -> None:
        """Close the file. May be called more than once."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except OSError:  # not written yet, or between two names
            return False
        return True

    def _begin_again(self) -> None:
        self._at, self._mark, self._is_judged = 0, b"", False
        self._contexts = []

    def _is_replaced(self) -> bool:
        """Return whether the path leads to another file now."""
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def _is_as_left(self) -> bool:
        """Return whether the bytes before the place that is read up to are still there."""
        assert self._file is not None
        self._file.seek(self._at - len(self._mark))
        return self._file.read(len(self._mark)) == self._mark

    def _read(self, found: LogNews) -> None:
        assert self._file is not None
        self._file.seek(self._at)
        read = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # being written, or never will be
                break
            read += len(line)
            self._mark = line[-_MARK:]
            if (entry := parse_line(line)) is not None:
                self._take(entry, found)
            if read >= self._most:
                break
        self._at += read
        size = os.fstat(self._file.fileno()).st_size
        found.share = min(1.0, self._at / size) if read >= self._most and size else 1.0

    def _take(self, entry: Entry, found: LogNews) -> None:
        number = entry.number if isinstance(entry, Record) and isinstance(entry.number, int) else None
        if not self._is_judged and number is None:
            self._contexts.append(entry)
            return
        if not self._is_judged and number is not None:
            self._is_judged = True
            if number <= self._last:
                found.is_anew = True
                found.entries.clear()
            found.entries += self._contexts
        if number is not None:
            self._last = number
        found.entries.append(entry)
