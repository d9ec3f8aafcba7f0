"""Time parts of a run: each hook, and sections that hooks mark themselves.

Hooks get it as ``ctx.profiler``, users read ``manager.profiler``; it costs nothing when it is off.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from hookline.tables import ShownAsTable, Table

__all__ = ["OFF", "CheckpointProfiler"]

_NOTHING: Final = nullcontext()


class CheckpointProfiler(ShownAsTable):
    """Time sections of code by name; print as a table, the longest first.

    Recipe::

        with profiler.section("svd"):
            ...
        print(profiler)  # or profiler.report()["svd"]["mean_ms"]

    A section is timed until the device has done its work. One that raises is not counted. Sections may lie inside
    one another; each is charged with all that happens inside it.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        """Whether sections are timed."""
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Time a block."""
        return self._timed(name) if self.enabled else _NOTHING

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        _synchronize()
        start = time.perf_counter()
        yield
        _synchronize()
        self._counts[name] += 1
        self._seconds[name] += time.perf_counter() - start

    def report(self) -> dict[str, dict[str, float]]:
        """Return ``count``, ``total_ms`` and ``mean_ms`` of every section, the longest first."""
        longest = sorted(((1e3 * seconds, name) for name, seconds in self._seconds.items()), reverse=True)
        counts = self._counts
        return {n: {"count": counts[n], "total_ms": total, "mean_ms": total / counts[n]} for total, n in longest}

    def reset(self) -> None:
        """Start anew."""
        self._counts.clear()
        self._seconds.clear()

    def _table(self) -> Table:
        rows = [
            (name, f"{t['count']}", f"{t['total_ms']:.2f}", f"{t['mean_ms']:.3f}") for name, t in self.report().items()
        ]
        return Table(("section", "count", "total ms", "mean ms"), rows, numbers=(1, 2, 3), rule=False)


OFF: Final = CheckpointProfiler(enabled=False)
"""Times nothing."""


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
