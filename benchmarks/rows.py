"""The groups of rows, by the name that ``--only`` takes.

Takes them from the files beside it, hands them to ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from adapters import adapters
from analyses import analyses
from capturing import capturing
from compiled import compiled
from debug_checks import debug_checks
from debugging import debug
from emitting import emitting, emitting_five
from firing import backward, forward, removed
from functions import functions
from gpu_llama import gpu_llama
from gpu_sizes import gpu_sizes
from gpu_statistics import gpu_compiled, gpu_eager
from guarding import guarding, guarding_large
from importing import importing
from managing import managing
from measure import Row
from rank_rows import ranks
from serving import serving
from subject import Setting
from threads import threads
from watching import watching

__all__ = ["BENCHMARKS", "ON_CPU", "ON_GPU"]

BENCHMARKS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "removed": removed,
    "forward": forward,
    "backward": backward,
    "functions": functions,
    "watching": watching,
    "debug_checks": debug_checks,
    "debug": debug,
    "ranks": ranks,
    "capturing": capturing,
    "managing": managing,
    "adapters": adapters,
    "emitting": emitting,
    "emitting_five": emitting_five,
    "guarding": guarding,
    "guarding_large": guarding_large,
    "analyses": analyses,
    "importing": importing,
    "compiled": compiled,
    "threads": threads,
    "serving": serving,
    "gpu_eager": gpu_eager,
    "gpu_compiled": gpu_compiled,
    "gpu_sizes": gpu_sizes,
    "gpu_llama": gpu_llama,
}
"""Those with targets first."""

_STATISTICS = ("gpu_eager", "gpu_compiled", "gpu_sizes", "gpu_llama")
ON_CPU = tuple(name for name in BENCHMARKS if name not in _STATISTICS)
ON_GPU = (
    *_STATISTICS,
    "debug_checks",
    "debug",
    "guarding_large",
    "removed",
    "forward",
    "backward",
    "functions",
    "compiled",
    "serving",
)
"""What a GPU can change: there the host runs ahead, and a hook costs only what it delays the launches."""
