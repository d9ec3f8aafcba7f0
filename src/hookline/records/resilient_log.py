"""Keep the record log going: what cannot be written now, as the disk is full, is written when there is room again.

The fan-out hands records to a `ResilientLog`, which writes them to a `RecordLog` and raises nothing into the run.
`BackOff` is also what the fan-out and the helper process retry sinks by.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hookline.error_policy import ErrorPolicy
from hookline.errors import OptionError
from hookline.records.log import Context, RecordLog
from hookline.records.sink import Record

__all__ = ["BackOff", "ResilientLog"]

MAX_WAITING: Final = 10_000
"""Records in memory while the log cannot be written."""
_LOOK_EVERY: Final = 5.0
"""Seconds between two checks that the file is still there."""


class BackOff:
    """Times to try again: soon at first, then ever later."""

    def __init__(self, first: float = 0.2, last: float = 30.0) -> None:
        self._first, self._last = first, last
        self.attempts = 0
        """How often it failed in a row."""
        self._next = 0.0

    def fail(self) -> None:
        """Note a failure: wait twice as long as before."""
        wait = min(self._first * 2.0 ** min(self.attempts, 20), self._last)
        self.attempts += 1
        self._next = time.monotonic() + wait

    def reset(self) -> None:
        """Note a success."""
        self.attempts, self._next = 0, 0.0

    def hurry(self) -> None:
        """Make the next attempt due at once."""
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to try."""
        return not self._next or time.monotonic() >= self._next


class ResilientLog:
    """A log that goes on, whatever happens to its disk.

    Args:
        log: The log, or its path; None for one in a temporary folder.
        errors: Collects what went wrong.
        max_waiting: How many records are kept in memory while the log cannot be written.
    """

    def __init__(self, log: str | Path | RecordLog | None, errors: ErrorPolicy, max_waiting: int = MAX_WAITING) -> None:
        self._errors = errors
        self._max_waiting = max_waiting
        self._waiting: deque[Record | Context] = deque()
        self._back_off = BackOff(first=0.5)
        self._num_dropped = 0
        self._looked_at = 0.0
        self.is_temporary = log is None
        if log is None:
            log = Path(tempfile.mkdtemp(prefix="hookline-")) / "records.jsonl"
        self._log = log if isinstance(log, RecordLog) else None
        self.path = log.path if isinstance(log, RecordLog) else Path(log)
        self._number = 0
        if self._log is None:
            try:
                self._open()
            except OSError as error:
                self._fail(error)

    @property
    def number(self) -> int:
        """How many records are in the log."""
        return self._number if self._log is None else self._log.number

    def append(self, record: Record) -> Record:
        """Write ``record``, now or later; return it with its number, if it has one yet."""
        log = self._log
        if log is None or self._waiting or record.time - self._looked_at > _LOOK_EVERY:
            self._looked_at = record.time
            log = self._prepare()
            if log is None:
                self._wait(record)
                return record
        num_altered = len(log.altered)
        try:
            record = log.append(record)
        except OSError as error:
            self._fail(error)
            self._wait(record)
        except Exception as error:  # for example a mapping of the user's own that cannot be read
            self._errors.counts["log"] += 1
            self._errors.warn_later(
                "record", f"A record could not be written to the log ({error!r}); the sinks are given it."
            )
        if len(log.altered) > num_altered:
            names = ", ".join(repr(name) for name in list(log.altered)[:3])
            self._errors.warn_later(
                "altered",
                f"JSON cannot hold all of {names}: in the log it is text, or the nearest number. What else is "
                "written like that is in RecordLog.altered.",
            )
        return record

    def append_context(self, context: Mapping[str, Any]) -> None:
        """Write which run follows, now or later."""
        log = self._prepare()
        if log is not None:
            try:
                log.append_context(context)
                return
            except OSError as error:
                self._fail(error)
        self._wait(Context(dict(context)))

    def flush(self) -> None:
        """Try to write what waits, and have it on the disk."""
        self._back_off.hurry()
        log = self._prepare()
        if log is not None:
            with suppress(OSError):  # a file system that cannot sync
                log.sync()

    def close(self) -> None:
        """Flush, and close the file. A later record opens it again."""
        if self._log is None and not self._waiting:
            return
        self.flush()
        self._close_file()
        if self._waiting:
            self._errors.warn_later(
                f"lost {len(self._waiting)}",
                f"{len(self._waiting):,} records could not be written to {self.path} by the end of the run, and are "
                "in none but the sinks of this process.",
            )

    def remove(self) -> None:
        """Delete the temporary folder with the log."""
        if self.is_temporary:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        """Return how much there is, for a run that is resumed from now."""
        self._prepare()
        # Also when it cannot be written: what is written later must be cut off, or it is there twice.
        return {} if self._log is None else self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off what was written after ``state``."""
        self._waiting.clear()
        if not state:
            return
        self._back_off.hurry()
        log = self._prepare()
        if log is not None:
            try:
                log.load_state_dict(state)
            except (OSError, OptionError) as error:
                self._errors.warn_later(f"load {error}", str(error))

    # -- when it fails -------------------------------------------------------------------------------------------

    def _prepare(self) -> RecordLog | None:
        """Reopen the log if it is gone, write what waits, and return it; None if it cannot be written now."""
        if not self._back_off.is_due:
            return None
        try:
            if self._log is not None and not self._log.is_in_place():
                self._close_file()
            log = self._log or self._open()
            self._write_waiting(log)
        except (OSError, OptionError) as error:  # an OptionError if another process writes a log there by now
            self._fail(error)
            return None
        self._back_off.reset()
        return log

    def _open(self) -> RecordLog:
        self._log = RecordLog(self.path)
        self._log.number = max(self._log.number, self._number)
        return self._log

    def _close_file(self) -> None:
        if self._log is not None:
            self._number = self._log.number
            self._log.close()
            self._log = None

    def _write_waiting(self, log: RecordLog) -> None:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Context):
                log.append_context(first.context)
            else:
                log.append(first)
            self._waiting.popleft()
        if self._num_dropped:
            self._errors.warn_later(
                f"dropped {self._num_dropped}",
                f"The record log {self.path} can be written again; {self._num_dropped:,} records are missing in it, as "
                f"only {self._max_waiting:,} were kept in memory.",
            )
            self._num_dropped = 0

    def _wait(self, item: Record | Context) -> None:
        """Keep ``item`` until the log can be written; drop the oldest record if there are too many."""
        self._waiting.append(item)
        while len(self._waiting) > self._max_waiting:
            oldest = self._waiting.popleft()
            if isinstance(oldest, Record):
                self._num_dropped += 1
            elif isinstance(self._waiting[0], Context):
                self._waiting[0] = Context({**oldest.context, **self._waiting[0].context})
            else:  # contexts stay: in the place of the record after them
                self._waiting[0] = oldest
                self._num_dropped += 1

    def _fail(self, error: OSError | OptionError) -> None:
        self._back_off.fail()
        self._errors.counts["log"] += 1
        why = getattr(error, "strerror", None) or error
        self._errors.warn_later(
            "log",
            f"THE RECORD LOG {self.path} CANNOT BE WRITTEN ({why}); the run and its sinks go on. "
            f"Up to {self._max_waiting:,} records are kept in memory and written as soon as that works. Make room, or "
            "give a folder that can be written.",
        )
