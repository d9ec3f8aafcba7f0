"""Keeps the record log going: what cannot be written now, as the disk is full, is written when there is room again.

Takes records from the fan-out, writes them to a `RecordLog`, and raises nothing into the run.
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

from hookline.errors import OptionError
from hookline.sinks.record import Record
from hookline.sinks.record_log import Context, RecordLog
from hookline.sinks.warn_once import Teller

__all__ = ["BackOff", "LogKeeper"]

MOST_KEPT: Final = 10_000
"""Records in memory while the log cannot be written."""
_LOOK_EVERY: Final = 5.0
"""Seconds between looks at whether the file is still there."""


class BackOff:
    """When to try again: at first soon, then ever later."""

    def __init__(self, first: float = 0.2, last: float = 30.0) -> None:
        self._first, self._last = first, last
        self.attempts = 0
        """How often it failed in a row."""
        self._next = 0.0

    def failed(self) -> None:
        """It failed again."""
        wait = min(self._first * 2.0 ** min(self.attempts, 20), self._last)
        self.attempts += 1
        self._next = time.monotonic() + wait

    def worked(self) -> None:
        """It worked."""
        self.attempts, self._next = 0, 0.0

    def hurry(self) -> None:
        """Try at once."""
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to try."""
        return not self._next or time.monotonic() >= self._next


class LogKeeper:
    """A log that goes on, whatever happens to its disk.

    Args:
        log: The log, or where it is to be; None for one in a temporary folder.
        teller: Is told what went wrong.
    """

    def __init__(self, log: str | Path | RecordLog | None, teller: Teller, most_kept: int = MOST_KEPT) -> None:
        self._teller = teller
        self._most_kept = most_kept
        self._waiting: deque[Record | Context] = deque()
        self._back_off = BackOff(first=0.5)
        self._dropped = 0
        self._looked = 0.0
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
                self._failed(error)

    @property
    def number(self) -> int:
        """How many records are in the log."""
        return self._number if self._log is None else self._log.number

    def append(self, record: Record) -> Record:
        """Write a record, now or later; the same with its number, if it has one yet."""
        log = self._log
        if log is None or self._waiting or record.time - self._looked > _LOOK_EVERY:
            self._looked = record.time
            if not self._is_ready():
                self._wait(record)
                return record
            log = self._ready
        known = len(log.altered)
        try:
            record = log.append(record)
        except OSError as error:
            self._failed(error)
            self._wait(record)
        except Exception as error:  # a mapping of one's own that cannot be read, say
            self._teller.counts["log"] += 1
            self._teller.once(
                "record", f"A record could not be written to the log ({error!r}); the sinks are given it."
            )
        if len(log.altered) > known:
            self._tell_altered(log)
        return record

    def append_context(self, context: Mapping[str, Any]) -> None:
        """Write which run follows, now or later."""
        if self._is_ready():
            try:
                self._ready.append_context(context)
                return
            except OSError as error:
                self._failed(error)
        self._wait(Context(dict(context)))

    def flush(self) -> None:
        """Try to write what waits, and have it on the disk."""
        self._back_off.hurry()
        if self._is_ready():
            with suppress(OSError):  # a file system that cannot
                self._ready.sync()

    def close(self) -> None:
        """Flush, and let go of the file. A record that comes later opens it again."""
        if self._log is None and not self._waiting:
            return
        self.flush()
        if self._log is not None:
            self._number = self._log.number
            self._log.close()
            self._log = None
        if self._waiting:
            self._teller.once(
                f"lost {len(self._waiting)}",
                f"{len(self._waiting):,} records could not be written to {self.path} by the end of the run, and are "
                "in none but the sinks of this process.",
            )

    def remove(self) -> None:
        """Take the temporary folder away, log and all."""
        if self.is_temporary:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        """What to go back to when a run is resumed from now."""
        self._is_ready()
        # On a full disk too: what is written later must go, or it is there twice.
        return {} if self._log is None else self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the log back."""
        self._waiting.clear()
        if not state:
            return
        self._back_off.hurry()
        if not self._is_ready():
            return
        try:
            self._ready.load_state_dict(state)
        except (OSError, OptionError) as error:
            self._teller.once(f"load {error}", str(error))

    # -- when it fails -------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> RecordLog:
        assert self._log is not None
        return self._log

    def _is_ready(self) -> bool:
        """Whether the log can be written, as far as one knows; what had to wait is written first."""
        if not self._back_off.is_due:
            return False
        try:
            if self._log is not None and not self._log.is_in_place():
                self._number = self._log.number
                self._log.close()
                self._log = None
            if self._log is None:
                self._open()
            self._write_waiting()
        except (OSError, OptionError) as error:  # also if somebody else writes a log there by now
            self._failed(error)
            return False
        self._back_off.worked()
        return True

    def _open(self) -> None:
        self._log = RecordLog(self.path)
        self._log.number = max(self._log.number, self._number)

    def _write_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Context):
                self._ready.append_context(first.context)
            else:
                self._ready.append(first)
            self._waiting.popleft()
        if self._dropped:
            self._teller.once(
                f"dropped {self._dropped}",
                f"The record log {self.path} can be written again; {self._dropped:,} records are missing in it, as "
                f"only {self._most_kept:,} were kept in memory.",
            )
            self._dropped = 0

    def _wait(self, item: Record | Context) -> None:
        self._waiting.append(item)
        while len(self._waiting) > self._most_kept:
            oldest = self._waiting.popleft()
            if isinstance(oldest, Record):
                self._dropped += 1
            elif isinstance(self._waiting[0], Context):
                self._waiting[0] = Context({**oldest.context, **self._waiting[0].context})
            else:  # contexts stay: in the place of the record after them
                self._waiting[0] = oldest
                self._dropped += 1

    def _failed(self, error: OSError | OptionError) -> None:
        self._back_off.failed()
        self._teller.counts["log"] += 1
        why = getattr(error, "strerror", None) or error
        self._teller.once(
            "log",
            f"THE RECORD LOG {self.path} CANNOT BE WRITTEN ({why}); the run and its sinks go on. "
            f"Up to {self._most_kept:,} records are kept in memory and written as soon as that works. Make room, or "
            "give a folder that can be written.",
        )

    def _tell_altered(self, log: RecordLog) -> None:
        names = [repr(name) for name in list(log.altered)[:3]]
        self._teller.once(
            "altered",
            f"JSON cannot hold all of {', '.join(names)}: in the log it is text, or the nearest number. What else is "
            "written like that is in RecordLog.altered.",
        )
