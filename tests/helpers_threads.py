"""Run a function in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["in_threads"]


def in_threads(run: Callable[[int], object], count: int = 2) -> None:
    """Call ``run(number)`` in ``count`` threads, and wait for all of them."""
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
