"""Find values that leave what the curve was just before: sudden rises, falls of an accuracy, a loss that ends high.

`anomalies` calls these with one curve each. Everything is compared with recent values of the same curve, so a rule
means the same for a loss of 4 and for one of 0.004. Each threshold is the larger of a fixed factor and six times the
curve's own noise; noise is measured on the differences of neighbours, so that a trend does not count as noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hookline.report.metric_series import Curve

__all__ = ["FEWEST", "Event", "end_above_best", "falls", "rises"]

FEWEST: Final = 8
"""A curve needs so many points before one of them can be judged."""
_LEVEL: Final = 5
"""The level of a curve is the median of so many points: short, so that it follows a curve that falls."""
_WINDOW: Final = 20
"""Noise is measured over so many points, or over what there is."""
_SIGMAS: Final = 6.0
"""Batches of the quiet recorded runs stay within 5 of their noise; see the table in docs/report.md."""
_OVER: Final = 2.0
"""A rise is over when the curve is back below this many times the level it left."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of a curve that is out of line."""

    step: int
    """Where it begins."""
    level: float
    """What the curve was before."""
    extreme: float
    """How far it went."""
    until: int | None
    """The step at which it was back; None if it never was."""


def rises(curve: Curve, factor: float, floor: float = 0.0) -> Iterator[Event]:
    """Yield where the curve rises to `factor` times its recent level or more, and above `floor`.

    Recipe: ``[event.step for event in rises(curve, 3.0)]``. Only positive values are looked at.
    """
    values, steps = _finite(curve)
    positive = values > 0
    values, steps = values[positive], steps[positive]
    if values.size <= FEWEST:
        return
    logs = np.log(values)
    index = FEWEST
    for candidate in _candidates(logs, np.log(factor), floor):
        if candidate < index:
            continue
        level = float(np.median(logs[candidate - _LEVEL : candidate]))
        noise = _noise(logs[max(0, candidate - _WINDOW) : candidate])
        if logs[candidate] - level - _growth(logs[:candidate]) > max(np.log(factor), _SIGMAS * noise):
            back = np.flatnonzero(logs[candidate:] < level + np.log(_OVER))
            index = candidate + int(back[0]) if back.size else values.size
            peak = float(values[candidate:index].max())
            yield Event(int(steps[candidate]), float(np.exp(level)), peak, int(steps[index]) if back.size else None)
            index = max(index, candidate + _LEVEL)  # what comes right after belongs to it


def _growth(logs: Values) -> float:
    """Return how much the level lags behind a curve that grows steadily, as gradients do when learning sets in."""
    steps = np.diff(logs[-_LEVEL - 1 :])
    return (_LEVEL + 1) / 2 * float(np.median(steps)) if (steps > 0).all() else 0.0


def _candidates(logs: Values, least: float, floor: float) -> Iterator[int]:
    """Yield the points that may be rises; a median of every window of every curve would take seconds."""
    lowest = np.lib.stride_tricks.sliding_window_view(logs, _LEVEL)[:-1].min(axis=1)
    high = logs[_LEVEL:] - lowest > least
    if floor > 0:
        high &= logs[_LEVEL:] > np.log(floor)
    yield from (int(at) + _LEVEL for at in np.flatnonzero(high))


def falls(curve: Curve, least: float) -> Iterator[Event]:
    """Yield where the curve falls by `least` or more below the best level it had, slowly or at once."""
    values, steps = _finite(curve)
    if values.size < 3:
        return
    best = _best_before(values)
    index = 0
    for candidate in np.flatnonzero(best - values >= least):
        if candidate < max(index, 3):
            continue
        level = float(best[candidate])
        noise = _noise(values[max(0, candidate - _WINDOW) : candidate])
        if level - values[candidate] > max(least, _SIGMAS * noise):
            back = np.flatnonzero(values[candidate:] > level - least / 2)
            index = int(candidate) + int(back[0]) if back.size else values.size
            lowest = float(values[candidate:index].min())
            yield Event(int(steps[candidate]), level, lowest, int(steps[index]) if back.size else None)


def _best_before(values: Values) -> Values:
    """Return the best level before each point; levels are medians of three, so that no single point is one."""
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, 3), axis=1)
    best = np.full(values.size, -np.inf)
    best[3:] = np.maximum.accumulate(levels)[:-1]
    return best


def end_above_best(curve: Curve, factor: float, least: float) -> Event | None:
    """Return the best moment of a curve that ends at `factor` times its best level, and `least` above it.

    Recipe: ``end_above_best(loss, 1.5, least=0.1)``; None for a curve that ends near its best.
    """
    values, steps = _finite(curve)
    if values.size <= FEWEST:
        return None
    size = max(_LEVEL, values.size // 20)  # of many points the lowest few are chance, so a level is of a twentieth
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, size), axis=1)
    lowest = int(levels.argmin())
    best, last = float(levels[lowest]), float(levels[-1])
    if last > factor * best and last - best > max(least, _noise(values[-_WINDOW:])):
        return Event(int(steps[lowest + size // 2]), best, last, None)
    return None


def _finite(curve: Curve) -> tuple[Values, NDArray[np.int64]]:
    finite = np.isfinite(curve.values)
    return curve.values[finite], curve.steps[finite]


def _noise(values: Values) -> float:
    """Return the standard deviation of a curve around its trend, by its median difference of neighbours."""
    if values.size < 3:
        return 0.0
    differences = np.diff(values)
    spread = np.median(np.abs(differences - np.median(differences)))
    return float(1.4826 * spread / np.sqrt(2))
