"""Deliver the log to one slow sink: make the sink, hand it records in order, retry when it fails.

The helper process calls `Delivery.advance` again and again. How far a sink is stands in a small file beside the log, so
that nothing is delivered twice when a run goes on; `HelperProcess` reads it to say which sink is behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from hookline.error_policy import error_text
from hookline.files import replace_file
from hookline.records.log import Context, parse_line, read_lines, record_number, size_of
from hookline.records.resilient_log import BackOff
from hookline.records.sink import Record
from hookline.records.values import dumps, loads

__all__ = ["Delivery", "position_path", "read_position"]

BATCH: Final = 256
"""Records that are delivered before the position is written: as many may come twice after a kill."""
_LONGEST: Final = 1.0
"""Seconds after which the other sinks continue."""
_SUSPECT: Final = 5
"""After so many failures at one record the next one is tried: if that succeeds, the record is skipped."""


def position_path(log: Path, sink: str) -> Path:
    """Return the file that says how far ``sink`` is in ``log``."""
    return log.parent / f".{re.sub(r'[^A-Za-z0-9_-]+', '_', sink)}.position"


def read_position(log: Path, sink: str) -> int:
    """Return the number of the first record that ``sink`` has not received; 0 if the file is of another log."""
    try:
        found = loads(position_path(log, sink).read_bytes())
        return int(found["number"]) if found["log"] == _checksum(log) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _write_position(log: Path, sink: str, number: int) -> None:
    """Replace the position file as a whole."""
    replace_file(position_path(log, sink), dumps({"number": number, "log": _checksum(log)}))


def _checksum(log: Path) -> int:
    """Return what tells one log from another at its place: the first line holds a time, and is never cut back."""
    with log.open("rb") as file:
        return zlib.crc32(file.readline(4096))


class Delivery:
    """One slow sink, the records it has received, and those that come next."""

    def __init__(self, recipe: dict[str, Any], log: Path, send: Callable[[dict[str, Any]], None]) -> None:
        self.name: str = recipe["name"]
        self.back_off = BackOff()
        self._recipe, self._log, self._send = recipe, log, send
        self._sink: Any = None
        self._offset = 0  # bytes of the log that were read
        self.position = read_position(log, self.name)
        """The number of the first record that has not arrived for good."""
        self._taken = self.position
        """The number of the first record that the sink has not taken; until it has flushed, the position is lower."""
        self._next: deque[Record | Context] = deque()
        self._expected: int | None = None
        """The number of the next record in the log; None if it may be any."""
        self._before: dict[str, Any] | None = {}
        """The contexts before the first record that is wanted; None after it."""

    def advance(self) -> bool:
        """Deliver a batch, if there is one and the back-off is over; return whether the position has moved."""
        if not self.back_off.is_due:
            return False
        before = self.position
        what = "be read from the log"
        try:
            self._fetch()
            if self._next:
                what = "be made"
                self._sink = self._sink or _make_sink(self._recipe)
                what = "take metrics"
                self._deliver()
            if self._taken > self.position:
                what = "flush"
                self._sink.flush()
                what = "keep its position"
                _write_position(self._log, self.name, self._taken)
                self.position = self._taken
        except Exception as error:
            self._fail(what, error)
            return False
        self.back_off.reset()
        return self.position > before

    def is_done(self) -> bool:
        """Return whether everything in the log has arrived."""
        return not self._next and self._taken == self.position and not self._whole_lines(1)

    def seek(self) -> None:
        """Read the log from its beginning, as it was cut back; what the sink has received is skipped."""
        self._offset = 0
        self._next.clear()
        self._expected = None
        self._before = {}

    def close(self) -> bool:
        """Close the sink; return whether everything has arrived."""
        is_done = self.is_done()
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:
                self._fail("close", error)
                return False
        return is_done

    def _fetch(self) -> None:
        """Read the next batch from the log."""
        if self._next:
            return
        if size_of(self._log) < self._offset:
            self.seek()
        has_sought = False
        while not self._next and (lines := self._whole_lines(BATCH)):
            if not has_sought and self._is_other_place(lines[0]):
                has_sought = True  # once: a number may also be missing in the log itself
                self.seek()
                continue
            self._offset += sum(map(len, lines))
            for line in lines:
                number = record_number(line)
                if number is not None:
                    self._expected = number + 1
                found = parse_line(line) if number is None or number >= self._taken else None
                if found is not None:
                    self._append(found)

    def _whole_lines(self, most: int) -> list[bytes]:
        """Return the next whole lines of the log, which grows, ``most`` at the most."""
        if size_of(self._log) <= self._offset:
            return []
        with suppress(FileNotFoundError):
            return list(islice(read_lines(self._log, self._offset), most))
        return []

    def _is_other_place(self, line: bytes) -> bool:
        """Return whether ``line`` is not the next one: the log was cut back and has grown again since the last read."""
        if self._expected is None or line.startswith(b'{"context"'):
            return False
        return record_number(line) != self._expected

    def _append(self, found: Record | Context) -> None:
        """Add to the batch; contexts before the first record that is wanted become one."""
        if self._before is not None:
            if isinstance(found, Context):
                self._before |= found.context
                return
            if self._before:
                self._next.append(Context(self._before))
            self._before = None
        self._next.append(found)

    def _deliver(self) -> None:
        started = time.monotonic()
        while self._next and time.monotonic() - started < _LONGEST:
            try:
                self._hand(self._next[0])
            except Exception as error:
                if not self._skip_bad_record(error):
                    raise
            self._next.popleft()
            self.back_off.reset()

    def _hand(self, item: Record | Context) -> None:
        if isinstance(item, Context):
            self._sink.set_run_context(**item.context)
        else:
            self._sink.write(item)
            self._taken = item.number + 1

    def _skip_bad_record(self, error: Exception) -> bool:
        """Deliver the second record; if that succeeds, drop the first one, which was to blame, and return True."""
        if isinstance(error, OSError) or self.back_off.attempts < _SUSPECT or len(self._next) < 2:
            return False
        if not isinstance(self._next[0], Record) or not isinstance(self._next[1], Record):
            return False
        try:
            self._hand(self._next[1])
        except Exception:
            return False
        self._send({"failed": self.name, "what": "take metrics", "error": error_text(error), "skipped": True})
        self._next.popleft()
        return True

    def _fail(self, what: str, error: Exception) -> None:
        self.back_off.fail()
        if self.back_off.attempts == 1:
            traceback.print_exception(error)  # to the file of the helper's standard error
        self._send({"failed": self.name, "what": what, "error": error_text(error)})


def _make_sink(recipe: dict[str, Any]) -> Any:
    """Return the sink that ``recipe`` describes."""
    try:
        module = importlib.import_module(recipe["module"])
    except ModuleNotFoundError as error:
        if recipe["file"] is None or error.name not in (recipe["module"], recipe["module"].partition(".")[0]):
            raise
        module = _load_file(recipe["module"], recipe["file"])
    made: Any = module
    for name in recipe["class"].split("."):
        made = getattr(made, name)
    return made(**recipe["options"])


def _load_file(name: str, file: str) -> Any:
    """Return a module that was loaded by its path, as experiments are, rather than by its name."""
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ModuleNotFoundError(f"No module can be made of {file}.", name=name)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
