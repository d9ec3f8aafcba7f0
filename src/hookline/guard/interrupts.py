"""Ctrl-C waits while a state is half saved or half put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["undisturbed"]


@contextmanager
def undisturbed() -> Iterator[None]:
    """An interrupt that comes inside the block is delivered after it (8 µs).

    Only the main thread is sent interrupts, so in others there is nothing to do; nor where a handler was not set from
    Python, since it could not be set again.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
