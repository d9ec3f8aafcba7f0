"""One slow sink and its way through the log: made, given records in order, tried again when it fails.

Runs in the helper process, which calls ``advance`` again and again; keeps the sink's position in a file.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hookline.sinks.log_position import read_position, write_position
from hookline.sinks.record import Record
from hookline.sinks.record_log import Context, number_of, parsed
from hookline.sinks.resilient_log import BackOff

__all__ = ["Delivery", "Tail", "made_sink"]

BATCH: Final = 256
"""Records that are delivered before the position is written: as many may come twice after a kill."""
_LONGEST: Final = 1.0
"""Seconds after which the other sinks have their turn."""
_SUSPECT: Final = 5
"""After so many failures at one record it is seen whether the next one goes through: then the record is to blame."""


class Delivery:
    """A sink, what it has had, and what comes next."""

    def __init__(self, spec: dict[str, Any], log: Path, say: Callable[[dict[str, Any]], None]) -> None:
        self.name: str = spec["name"]
        self.back_off = BackOff()
        self._spec, self._log, self._say = spec, log, say
        self._sink: Any = None
        self._tail = Tail(log)
        self.position = read_position(log, self.name)
        """The number of the first record that has not arrived for good."""
        self._taken = self.position
        """The number of the first record that the sink has not taken; until it has flushed, the position is lower."""
        self._next: deque[Record | Context] = deque()
        self._expected: int | None = None
        """The number of the next record in the log; None if that may be any."""
        self._before: dict[str, Any] | None = {}
        """What contexts have said before the first record that is wanted; None from then on."""

    def advance(self) -> bool:
        """Deliver a batch, if there is one and it is time; whether anything came of it."""
        if not self.back_off.is_due:
            return False
        before = self.position
        what = "be read from the log"
        try:
            self._fetch()
            if self._next:
                what = "be made"
                self._sink = self._sink or made_sink(self._spec)
                what = "take metrics"
                self._deliver()
            if self._taken > self.position:
                what = "flush"
                self._sink.flush()
                what = "keep its position"
                write_position(self._log, self.name, self._taken)
                self.position = self._taken
        except Exception as error:
            self._failed(what, error)
            return False
        self.back_off.worked()
        return self.position > before

    def is_done(self) -> bool:
        """Whether everything in the log has arrived."""
        return not self._next and self._taken == self.position and self._tail.is_at_end()

    def seek(self) -> None:
        """The log was cut back: go through it from its beginning, past what the sink has had."""
        self._tail = Tail(self._log)
        self._next.clear()
        self._expected = None
        self._before = {}

    def close(self) -> bool:
        """Let go of the sink; whether everything has arrived."""
        done = self.is_done()
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:
                self._failed("close", error)
                return False
        return done

    def _fetch(self) -> None:
        if self._next:
            return
        if self._tail.is_cut():
            self.seek()
        sought = False
        while not self._next and (lines := self._tail.read(BATCH)):
            if not sought and self._has_lost_its_place(lines[0]):
                sought = True  # once: a number may also be missing in the log itself
                self.seek()
                continue
            for line in lines:
                number = number_of(line)
                if number is not None:
                    self._expected = number + 1
                found = parsed(line) if number is None or number >= self._taken else None
                if found is not None:
                    self._line_up(found)

    def _has_lost_its_place(self, line: bytes) -> bool:
        """Whether the log was cut back and has grown again while nobody looked, so that this is some other place."""
        if self._expected is None or line.startswith(b'{"context"'):
            return False
        return number_of(line) != self._expected

    def _line_up(self, found: Record | Context) -> None:
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
                if not self._is_to_blame(error):
                    raise
                self._say({"failed": self.name, "what": "take metrics", "error": _words(error), "skipped": True})
                self._next.popleft()
            self._next.popleft()
            self.back_off.worked()

    def _hand(self, item: Record | Context) -> None:
        if isinstance(item, Context):
            self._sink.set_run_context(**item.context)
        else:
            self._sink.write(item)
            self._taken = item.number + 1

    def _is_to_blame(self, error: Exception) -> bool:
        """Whether it is the record that cannot be taken, rather than the sink that cannot take any."""
        if isinstance(error, OSError) or self.back_off.attempts < _SUSPECT or len(self._next) < 2:
            return False
        if not isinstance(self._next[0], Record) or not isinstance(self._next[1], Record):
            return False
        try:
            self._hand(self._next[1])
        except Exception:
            return False
        return True

    def _failed(self, what: str, error: Exception) -> None:
        self.back_off.failed()
        if self.back_off.attempts == 1:
            traceback.print_exception(error)  # to the file that our errors go to
        self._say({"failed": self.name, "what": what, "error": _words(error)})


class Tail:
    """A log that is read while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, most: int) -> list[bytes]:
        """The next whole lines."""
        found: list[bytes] = []
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return found
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                found.append(line)
                self._offset += len(line)
                if len(found) == most:
                    break
        return found

    def is_cut(self) -> bool:
        """Whether the log has become shorter than what was read."""
        return self._size() < self._offset

    def is_at_end(self) -> bool:
        """Whether there is nothing more, but for half a line perhaps."""
        if self._size() <= self._offset:
            return True
        before = self._offset
        more = self.read(1)
        self._offset = before
        return not more

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def made_sink(spec: dict[str, Any]) -> Any:
    """The sink that a spec describes."""
    try:
        module = importlib.import_module(spec["module"])
    except ModuleNotFoundError as error:
        if spec["file"] is None or error.name not in (spec["module"], spec["module"].partition(".")[0]):
            raise
        module = _from_file(spec["module"], spec["file"])
    made: Any = module
    for name in spec["class"].split("."):
        made = getattr(made, name)
    return made(**spec["options"])


def _from_file(name: str, file: str) -> Any:
    """A module that was loaded by its path, as experiments are, rather than by its name."""
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ModuleNotFoundError(f"No module can be made of {file}.", name=name)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
