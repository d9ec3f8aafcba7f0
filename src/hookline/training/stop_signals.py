"""Let a run with checkpoints end its step and save when it is asked to stop.

`Saving` holds signals back by it for as long as a run lasts.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Final, Self

from hookline.records.fan_out import has_ranks

__all__ = ["StopSignals"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Note the first SIGINT or SIGTERM; the second does what it would have done without.

    Only the main thread may set handlers, so in others nothing is noted. A signal that is ignored (``nohup``) stays
    ignored. A handler of the user's own is called as well, at once.
    """

    def __init__(self) -> None:
        self.came: str | None = None
        """The name of the signal that came."""
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:  # None: set by another language
                    self._before[number] = before
                    signal.signal(number, self._take)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:  # else someone has set another one meanwhile
                signal.signal(number, before)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if os.getpid() != self._process:
            self._in_worker(number)
            return
        if self.came is not None and has_ranks() and signal.Signals(number).name != self.came:
            return  # of torchrun, which passes on what it was sent itself
        if self.came is not None:  # pressed again
            self._put_back()
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, before)
                signal.raise_signal(number)
            return
        self.came = signal.Signals(number).name
        if before not in _DEFAULTS and callable(before):
            before(number, frame)

    @staticmethod
    def _in_worker(number: int) -> None:
        """Ignore Ctrl-C in a process that a loader has forked: the run decides when to stop."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
