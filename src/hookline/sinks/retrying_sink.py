"""A sink of the training process: given each record at once, or later if its disk or its host is away.

Asked by the fan-out, which counts and tells what is raised.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from hookline.sinks.record import Record
from hookline.sinks.resilient_log import BackOff
from hookline.sinks.sink import hand

__all__ = ["QuickSink"]

MOST_KEPT: Final = 1_000
"""Records that wait for a sink; the log has them all."""


class QuickSink:
    """A sink, and what it could not take yet.

    An `OSError` (a full disk, a host that is gone) passes, so the record waits and is given again, ever later, before
    those that follow. Whatever else a sink raises would be raised again: that record is passed over.
    """

    def __init__(self, name: str, sink: Any) -> None:
        self.name, self.sink = name, sink
        self._waiting: deque[Record] = deque()
        self._back_off = BackOff()
        self._lost = 0

    def give(self, record: Record) -> None:
        """Hand a record over, after those that wait; raises what the sink raises."""
        if self._waiting:
            self._wait(record)
            self._give_waiting()
            return
        try:
            hand(self.sink, record)
        except OSError:
            self._wait(record)
            self._back_off.failed()
            raise

    def hurry(self) -> None:
        """Try at once to give what waits."""
        if self._waiting:
            self._back_off.hurry()
            self._give_waiting()

    def give_up(self) -> int:
        """Another run begins, or none: what still waits would be in the wrong place. How many records were lost."""
        lost, self._lost = self._lost + len(self._waiting), 0
        self._waiting.clear()
        self._back_off.worked()
        return lost

    def call(self, method: str, **arguments: Any) -> None:
        """Have the sink do something else, if it knows how."""
        if hasattr(self.sink, method):
            getattr(self.sink, method)(**arguments)

    def _give_waiting(self) -> None:
        while self._waiting and self._back_off.is_due:
            try:
                hand(self.sink, self._waiting[0])
            except OSError:
                self._back_off.failed()
                raise
            except Exception:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
            self._back_off.worked()

    def _wait(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) > MOST_KEPT:
            self._waiting.popleft()
            self._lost += 1
