"""Run a function in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers_waiting import PATIENCE

__all__ = ["in_thread", "in_threads"]


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns, or raise what it raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def in_threads(work: Callable[[int], object], count: int = 2) -> None:
    """Run ``work(number)`` in several threads that begin together; raise what any of them raised."""
    barrier = threading.Barrier(count, timeout=PATIENCE)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, number) for number in range(count)]:
            future.result()
