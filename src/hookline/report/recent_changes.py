"""Find values that leave what the curve was just before: spikes of a loss, sudden rises, falls of an accuracy.

`anomalies` calls these with one curve each; the flight recorder of ``hookline.debug`` asks `LossHistory`, which
judges the newest loss by the same rule. Everything is compared with recent values of the same curve, so a rule
means the same for a loss of 4 and for one of 0.004. Each threshold is the larger of what matters and six times the
curve's own noise; noise is measured on the differences of neighbours, so that a trend does not count as noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hookline.report.metric_series import Curve

__all__ = [
    "FEWEST", "Event", "LossHistory", "end_above_best", "falls", "first_level", "loss_spikes", "may_be_cross_entropy",
    "rises",
]  # fmt: skip

FEWEST: Final = 8
"""A curve needs so many points before one of them can be judged."""
_LEVEL: Final = 5
"""The level of a curve is the median of so many points: short, so that it follows a curve that falls."""
_WINDOW: Final = 20
"""Noise is measured over so many points, or over what there is."""
_LOSS_WINDOW: Final = 64
"""The same of a loss. Of 100,000 normal losses 0 to 3 are then beyond six times the noise. Over 20 points it were 40:
so short a measure of noise is often too small, and the other rules need a rise that is larger by itself."""
_SIGMAS: Final = 6.0
"""Batches of the quiet recorded runs stay within 5 of their noise; see docs/report.md."""
_SETTLED: Final = 20
"""A curve that stays up for so many points has a new level."""
_LOSS: Final = 1.4
"""Times its recent level, of a loss: less does not matter, however small the noise."""
_PERPLEXITY: Final = 1.5
"""The same of the perplexity, if the loss is a cross entropy: 4.0 to 4.5 is 1.1 times the loss and 1.6 times that."""
_MOST_NATS: Final = 16.0
"""A larger loss is no cross entropy in nats: guessing among nine million classes is as much."""
_SMALL: Final = 0.02
"""Of the loss at the start: a smaller rise is that of a model that has learned."""

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


def loss_spikes(curve: Curve, first: float) -> Iterator[Event]:
    """Yield the spikes of a loss, whose level at the start of the run was ``first``."""
    return rises(curve, _LOSS, least=_SMALL * first, nats=math.log(_PERPLEXITY), window=_LOSS_WINDOW)


def first_level(curve: Curve) -> float:
    """Return the level of a curve at its start, 0 if nothing is finite."""
    finite = _finite(curve)[0][:_LEVEL]
    return float(np.median(finite)) if finite.size else 0.0


def may_be_cross_entropy(loss: Curve) -> bool:
    """Return whether a loss may be a cross entropy in nats: never below zero, and at the start at most a guess."""
    return bool((_finite(loss)[0] >= 0).all()) and first_level(loss) < _MOST_NATS


def rises(
    curve: Curve, factor: float, *, least: float = 0.0, nats: float = math.inf, window: int = _WINDOW
) -> Iterator[Event]:
    """Yield where the curve rises to ``factor`` times its recent level or more, and by ``least`` or more.

    Recipe: ``[event.step for event in rises(curve, 5.0)]``. Only positive values are looked at. A rise by ``nats``
    matters too, whatever the factor, while the value may be a cross entropy. A curve that stays up has risen once.
    """
    values, steps = _finite(curve)
    positive = values > 0
    values, steps = values[positive], steps[positive]
    if values.size <= FEWEST:
        return
    logs = np.log(values)
    index = FEWEST
    for candidate in _candidates(values, factor, max(least, 0.0), nats):
        if candidate < index:
            continue
        level = float(np.median(logs[candidate - _LEVEL : candidate])) + _growth(logs[:candidate])
        rise = float(logs[candidate]) - level
        noise = _noise(logs[max(0, candidate - window) : candidate])
        if rise > _SIGMAS * noise and _matters(float(values[candidate]), math.exp(level), factor, least, nats):
            back = np.flatnonzero(logs[candidate:] < level + rise / 2)
            over = candidate + int(back[0]) if back.size else values.size
            peak = float(values[candidate:over].max())
            yield Event(int(steps[candidate]), math.exp(level), peak, int(steps[over]) if back.size else None)
            # What comes right after belongs to it; what stays is the new level.
            index = max(min(over, candidate + _SETTLED), candidate + _LEVEL)


def _matters(value: float, level: float, factor: float, least: float, nats: float) -> bool:
    is_large = value > factor * level or (value - level > nats and value < _MOST_NATS)
    return is_large and value - level > least


def _growth(logs: Values) -> float:
    """Return how much the level lags behind a curve that grows steadily, as gradients do when learning sets in."""
    steps = np.diff(logs[-_LEVEL - 1 :])
    return (_LEVEL + 1) / 2 * float(np.median(steps)) if (steps > 0).all() else 0.0


def _candidates(values: Values, factor: float, least: float, nats: float) -> Iterator[int]:
    """Yield the points that may be rises; a median of every window of every curve would take seconds."""
    lowest = np.lib.stride_tricks.sliding_window_view(values, _LEVEL)[:-1].min(axis=1)
    higher = values[_LEVEL:] - lowest
    high = ((values[_LEVEL:] > factor * lowest) | (higher > nats)) & (higher > least)
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


class LossHistory:
    """Tell whether a loss begins a spike, by those before it.

    Recipe: ``history = LossHistory(); is_spike = history.add(2.31)``.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * _LOSS_WINDOW)
        self._first: list[float] = []

    def add(self, loss: float | None) -> bool:
        """Add a loss; return whether it begins a spike."""
        if loss is None or not math.isfinite(loss):
            return False
        if len(self._first) < _LEVEL:
            self._first.append(loss)
        self._losses.append(loss)
        values = np.array(self._losses)
        if loss < _LOSS * values[-_LEVEL - 1 :].min() and loss - values[-_LEVEL - 1 :].min() < math.log(_PERPLEXITY):
            return False  # no rise over any level; to find all rises takes thirty times as long
        curve = Curve("loss", np.arange(values.size), values)
        return any(event.step == values.size - 1 for event in loss_spikes(curve, float(np.median(self._first))))
