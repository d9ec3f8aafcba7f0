"""The groups of rows, by the name that ``--only`` takes.

Takes them from ``firing`` and ``attaching``, hands them to ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attaching import attaching, importing, twelve
from firing import backward, capture, everywhere, forward, removed, single
from measure import Row
from subject import Setting

__all__ = ["BENCHMARKS", "ON_GPU"]

BENCHMARKS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "removed": removed,
    "forward": forward,
    "backward": backward,
    "attaching": attaching,
    "importing": importing,
    "single": single,
    "capture": capture,
    "everywhere": everywhere,
    "twelve": twelve,
}
"""Those with targets first."""

ON_GPU = ("removed", "forward", "backward")
"""What a GPU can change: there the host runs ahead, and a hook costs only what it delays the launches."""
