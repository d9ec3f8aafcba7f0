"""Timing things against each other on a machine that is never quiet.

Takes trials (something to run, timed by itself) from the rows, hands back samples, and from those `Row`s. All
trials of a comparison run once per round, in an order shuffled anew for each; ratios are formed inside a
round, between neighbours in time, and the median over the rounds is the figure. The denominator runs twice in
every round: its second run over its first is the A/A spread, what this machine shows where nothing differs.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

__all__ = [
    "Row", "Samples", "Spread", "Trial", "added", "interleave", "ratios", "spread", "trial", "typical",
]  # fmt: skip

Samples = dict[str, list[float]]
"""Seconds by what was timed, one figure per round."""

Trial = Callable[[], Mapping[str, float]]
"""Runs something and tells how many seconds which part of it took."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results."""

    name: str
    numerator: str
    denominator: str
    model: str
    ratio: Spread
    same: Spread
    """The denominator against itself."""
    absolute: str
    """Numerator and denominator in units of time."""
    at_most: float | None = None
    """The target; None for a row that only informs."""
    like_same: bool = False
    """The target is "no difference": a ratio within the quartiles of the denominator against itself."""

    @property
    def target(self) -> str:
        """The target in words."""
        if self.like_same:
            return "1.00, within A/A"
        return "–" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def verdict(self) -> str:
        """Whether the target was met."""
        if self.like_same:
            return "met" if self.same.low <= self.ratio.median <= self.same.high else "**missed**"
        if self.at_most is None:
            return "–"
        return "met" if self.ratio.median <= self.at_most else "**missed**"


def trial(
    name: str,
    call: Callable[[], object],
    *,
    inner: int,
    batch: int = 1,
    hooked: Callable[[], AbstractContextManager[object]] = nullcontext,
    device: torch.device | None = None,
) -> Trial:
    """Time a call while ``hooked()`` is entered; entering, leaving and the first call are free.

    The figure is the least of ``inner`` timings of ``batch`` calls each: what else runs on the machine only adds.
    """
    on_gpu = device is not None and device.type == "cuda"
    # The thread's CPU time leaves out what other processes took. A GPU works, and autograd for it, elsewhere.
    clock = time.perf_counter if on_gpu else time.thread_time
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    def timing() -> float:
        start = clock()
        for _ in range(batch):
            call()
        synchronize()
        return (clock() - start) / batch

    def run() -> Mapping[str, float]:
        with hooked():
            call()
            synchronize()
            return {name: min(timing() for _ in range(inner))}

    return run


def interleave(trials: Sequence[Trial], rounds: int) -> Samples:
    """Run every trial once per round, in shuffled order, with the garbage collector off."""
    shuffle = random.Random(0).shuffle
    order = list(trials)
    samples: Samples = defaultdict(list)
    gc.collect()
    gc.freeze()  # what is alive now need not be looked at between rounds
    gc.disable()
    try:
        for run in order:  # once for caches and allocators
            run()
        for _ in range(rounds):
            shuffle(order)
            for run in order:
                for name, seconds in run().items():
                    samples[name].append(seconds)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def ratios(samples: Samples, numerator: str, denominator: str, *, beyond: str | None = None) -> list[float]:
    """Numerator over denominator, round by round; with ``beyond``, of what each costs more than that."""
    base = samples[beyond] if beyond is not None else [0.0] * len(samples[numerator])
    return [(a - c) / (b - c) for a, b, c in zip(samples[numerator], samples[denominator], base, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)


def added(samples: Samples, name: str, beyond: str) -> float:
    """How much more ``name`` takes than ``beyond``, in seconds: the median over the rounds."""
    return statistics.median(a - b for a, b in zip(samples[name], samples[beyond], strict=True))


def typical(samples: Samples, name: str) -> float:
    """The median time of ``name`` in seconds."""
    return statistics.median(samples[name])
