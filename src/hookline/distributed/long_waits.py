"""Say for which ranks this one waits, once it has waited for some seconds.

`Connections` has a `LongWaits`, and enters `at` around everything that waits for other ranks. A thread looks at the
clock: what waits is code of torch, which can be asked nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

__all__ = ["LongWaits"]

logger = logging.getLogger(__name__)

_PARTS: Final = 10
"""How often the thread looks, in the time after which a wait is long."""


class LongWaits:
    """Tell of each wait that is longer than some seconds, once.

    Recipe: ``with waits.at("watch of Net"): dist.all_reduce(...)``.

    Args:
        store: A connection to the store of the ranks that nothing else waits on; None: the ranks are not named.
        rank: This rank.
        size: How many ranks there are.
        seconds: What a long wait is. A rank that has waited half as long writes that down for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._now: tuple[float, str] | None = None
        """When the wait under way began, and what it is at."""
        self._noted: tuple[float, str] | None = None
        self._told: tuple[float, str] | None = None
        self._has_thread = False

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Wait for other ranks in the block."""
        if not self._has_thread:
            self._has_thread = True
            every = self._seconds / _PARTS
            threading.Thread(target=_look, args=(weakref.ref(self), every), daemon=True, name="hookline waits").start()
        self._now = (time.monotonic(), what)
        try:
            yield
        finally:
            self._now = None

    def look(self) -> None:
        """Write down that this rank waits, and tell for whom; the thread calls it."""
        now = self._now
        waited = 0.0 if now is None else time.monotonic() - now[0]
        with suppress(RuntimeError, OSError):  # the rank that holds the store is gone
            if self._noted not in (None, now):
                self._noted = None
                self._store.delete_key(_key(self._rank))
            if now is not None and waited > self._seconds / 2 and self._noted is None and self._store is not None:
                self._store.set(_key(self._rank), now[1])
                self._noted = now
            if now is not None and waited > self._seconds and self._told is not now:
                self._told = now
                logger.warning(
                    "Rank %d has waited %.0f s at %r for %s. Every rank has to make this call: look for an `if rank == "
                    "0:` around it. For the numbers of one rank alone: to_metrics(local=True).",
                    self._rank, waited, now[1], self._absent(),
                )  # fmt: skip

    def _absent(self) -> str:
        others = [rank for rank in range(self._size) if rank != self._rank]
        absent = [rank for rank in others if self._store is not None and not self._store.check([_key(rank)])]
        return f"rank {', '.join(map(str, absent))}" if absent else "the other ranks"


def _key(rank: int) -> str:
    return f"hookline/waiting/{rank}"


def _look(waits: weakref.ref[LongWaits], every: float) -> None:
    while (found := waits()) is not None:
        found.look()
        del found
        time.sleep(every)
