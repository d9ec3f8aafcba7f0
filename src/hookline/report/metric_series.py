"""Collect what a log holds, by metric: curves, distributions, which step was when, which metrics are of one layer.

`report_runs` hands records to a `Collector`; the page and the anomalies take its `RunSeries`, and place curves on maps
by `layer_places`. Nothing is thinned or rounded here, so that the rules for anomalies see everything.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hookline.records.sink import Record, StepSeries

Steps = NDArray[np.int64]
Values = NDArray[np.float64]

_MAX_BINS: Final = 256
"""Of longer lists every n-th entry is shown; a screen has no more rows for them."""
_OF_THE_LOOP: Final = ("train/", "eval/")
"""The first part of metrics that the loop itself records."""
MISSING: Final = -float(np.finfo(np.float32).max)
"""Stands for no value in a grid: NaN is one, which a page shows as such. ``data.js`` has the same number."""
_MAX_ANCHORS: Final = 1000
"""Between so many moments, the time and epoch of a step are interpolated."""
KINDS: Final = ("forward", "backward", "param", "param_grad")
"""The kinds of a watch: ``hook/{layer}/{kind}/{statistic}``. observe/watch/hooks.py lists who knows them."""
_THE_RUN: Final = ("train", "eval", "initial")
"""Metrics of the loop itself: ``eval/top1`` is no layer."""
_MIN_ROWS: Final = 3
"""Two curves are better shown as two curves."""
_LOOKS_LIKE_A_LAYER: Final = 0.5
"""The share of the names in one place that have a dot or a digit in them, as names of layers do."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One number over the steps of a run."""

    name: str
    """As the page shows it: ``hook/metric``, with the moment or the rank where one name has several."""
    steps: Steps
    """Strictly increasing; -1 is before the first step."""
    values: Values
    """NaN and infinities are kept: they are values."""
    same_as: str = ""
    """The curve seen before that is the same at every step, as when a hook reports what the evaluation found."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Several numbers over the steps of a run: a list, or counts by bin."""

    name: str
    """As the page shows it."""
    steps: Steps
    """Strictly increasing."""
    bins: list[str]
    """What each row stands for: a place in the list, or a bin."""
    counts: bool
    """Whether the numbers are counts, so that their shares mean something."""
    values: Values
    """(bins, steps); `MISSING` where a list was shorter, or a key was missing from what is no count."""
    by_key: bool = False
    """Whether the rows are keys of a dictionary; else they are places in a list."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time and epoch of some steps."""

    steps: list[int]
    """Increasing."""
    seconds: list[float]
    """Since the start of the run."""
    epochs: list[float] | None
    """How many epochs were over; None if the run counted steps alone."""


@dataclass(slots=True)
class RunSeries:
    """Everything of one run."""

    curves: list[Curve] = field(default_factory=list)
    """In the order in which they were first seen, which is the order of the model."""
    grids: list[Grid] = field(default_factory=list)
    """Lists and counts."""
    words: dict[str, str] = field(default_factory=dict)
    """Metrics that are text: the newest."""
    clock: StepTimes = field(default_factory=lambda: StepTimes([], [], None))
    """When steps were made."""
    num_records: int = 0
    """How many records there were."""


_Key = tuple[str, str, int]
_Points = tuple["array[int]", "array[float]"]
"""Steps and values; arrays, as 14 million numbers in lists are half a gigabyte."""
_Rows = tuple[list[int], list[Any]]


class Collector:
    """Collects the metrics of a run, record by record."""

    def __init__(self) -> None:
        self.numbers: dict[_Key, _Points] = {}
        self.lists: dict[_Key, _Rows] = {}
        self.words: dict[str, str] = {}
        self.moments: list[tuple[int, int | None, float, bool]] = []
        self.num_records = 0

    def take(self, record: Record) -> None:
        """Add the metrics of one record."""
        step = -1 if record.step is None else record.step
        point, rank = record.point, record.rank
        self.num_records += 1
        self.moments.append((step, record.epoch, record.time, point.startswith("PRE_")))
        for name, value in record.metrics.items():
            key = (name, point, rank)
            if isinstance(value, StepSeries):
                self._add_series(key, value)
            else:
                self._add(key, step, value)

    def _points(self, key: _Key) -> _Points:
        points = self.numbers.get(key)
        if points is None:
            points = self.numbers[key] = (array("q"), array("d"))
        return points

    def _add_series(self, key: _Key, series: StepSeries) -> None:
        try:
            steps, values = array("q", series.steps), array("d", series)
        except (TypeError, OverflowError):  # not numbers alone
            for at, item in zip(series.steps, series, strict=False):
                self._add(key, at, item)
            return
        size = min(len(steps), len(values))
        points = self._points(key)
        points[0].extend(steps[:size])
        points[1].extend(values[:size])

    def _add(self, key: _Key, step: int, value: Any) -> None:
        if isinstance(value, (int, float)):
            points = self._points(key)
            points[0].append(step)
            points[1].append(as_float(value))
        elif isinstance(value, list):
            self._add_list(key, step, value)
        elif isinstance(value, Mapping):
            self._add_mapping(key, step, value)
        elif isinstance(value, str):
            self.words[key[0]] = value

    def _add_list(self, key: _Key, step: int, value: list[Any]) -> None:
        flat = [item for item in _flat(value) if isinstance(item, (int, float))]
        if flat:
            steps, rows = self.lists.setdefault(key, ([], []))
            steps.append(step)
            rows.append(flat)

    def _add_mapping(self, key: _Key, step: int, value: Mapping[str, Any]) -> None:
        if _is_histogram(value):
            steps, rows = self.lists.setdefault(key, ([], []))
            steps.append(step)
            rows.append(value)
            return
        for part, item in value.items():
            self._add((f"{key[0]}/{part}", *key[1:]), step, item)

    def series(self, started: float | None = None) -> RunSeries:
        """Return everything so far; seconds count from ``started``."""
        shown = shown_names([*self.numbers, *self.lists])
        return RunSeries(
            curves=_with_twins([_curve(shown[key], *points) for key, points in self.numbers.items()]),
            grids=[grid for key, points in self.lists.items() for grid in _grids(shown[key], *points)],
            words=self.words,
            clock=_clock(self.moments, started),
            num_records=self.num_records,
        )


def _flat(value: list[Any]) -> Iterable[Any]:
    for item in value:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item


def _is_histogram(value: Mapping[str, Any]) -> bool:
    """Return whether keys are numbers (bins, frequencies, classes), ``zero`` or ``nonfinite``."""
    if not value or not all(isinstance(item, (int, float)) for item in value.values()):
        return False
    return all(_number(key) is not None or key in ("zero", "nonfinite") for key in value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def shown_names(keys: list[_Key]) -> dict[_Key, str]:
    """Return a name for each of `keys`: the metric's, with the moment and the rank where several share it."""
    points: dict[str, set[str]] = {}
    ranks: dict[str, set[int]] = {}
    for name, point, rank in keys:
        points.setdefault(name, set()).add(point)
        ranks.setdefault(name, set()).add(rank)
    return {
        (name, point, rank): name
        + (f" @ {point}" if len(points[name]) > 1 else "")
        + (f" (rank {rank})" if len(ranks[name]) > 1 else "")
        for name, point, rank in keys
    }


def newest_points(steps: Sequence[int]) -> tuple[Steps, NDArray[np.int64] | slice]:
    """Return the steps in increasing order, and their places; of a step that was recorded twice, the newest."""
    at = np.asarray(steps, dtype=np.int64)
    if at.size < 2 or bool((np.diff(at) > 0).all()):
        return at, slice(None)
    unique, last = np.unique(at[::-1], return_index=True)
    return unique, at.size - 1 - last


def _curve(name: str, steps: Sequence[int], values: Sequence[float]) -> Curve:
    at, chosen = newest_points(steps)
    return Curve(name, at, np.asarray(values, dtype=np.float64)[chosen])


def _with_twins(curves: list[Curve]) -> list[Curve]:
    """Name the twin of each curve that another hook reports under the same name with the same numbers.

    The evaluation's ``eval/val_acc`` and the hook's ``training_metrics/val_acc`` are one curve; the loop's own is kept.
    """
    kept: dict[tuple[str, bytes, bytes], str] = {}
    for curve in sorted(curves, key=lambda curve: not curve.name.startswith(_OF_THE_LOOP)):
        kept.setdefault(_identity(curve), curve.name)
    names = [kept[_identity(curve)] for curve in curves]
    return [
        curve if curve.name == name else replace(curve, same_as=name) for curve, name in zip(curves, names, strict=True)
    ]


def _identity(curve: Curve) -> tuple[str, bytes, bytes]:
    hook, _, rest = curve.name.partition("/")
    return rest or hook, curve.steps.tobytes(), curve.values.tobytes()


def as_float(value: float) -> float:
    """Return ``value`` as a float; infinite for an int beyond all floats."""
    try:
        return float(value)
    except OverflowError:  # an int of more than 308 digits
        return math.inf if value > 0 else -math.inf


def _grids(name: str, steps: list[int], rows: list[Any]) -> Iterable[Grid]:
    """Yield lists as one grid, numbers by key as another: a metric may have been both."""
    for by_key in (False, True):
        picked = [(at, row) for at, row in zip(steps, rows, strict=True) if isinstance(row, Mapping) == by_key]
        if picked:
            at, chosen = newest_points([step for step, _ in picked])
            found = [row for _, row in picked]
            counts = by_key and _are_counts(found)
            bins, values = _key_rows(found, 0.0 if counts else MISSING) if by_key else _list_rows(found)
            yield Grid(name, at, bins, counts, values[:, chosen], by_key)


def _are_counts(rows: list[Mapping[str, Any]]) -> bool:
    """Return whether all numbers are whole and none is negative; shares of power, by frequency, are no counts."""
    return all(isinstance(item, int) and item >= 0 for row in rows for item in row.values())


def _list_rows(rows: list[list[float]]) -> tuple[list[str], Values]:
    longest = max(map(len, rows))
    values = np.full((longest, len(rows)), MISSING)
    for column, row in enumerate(rows):
        values[: len(row), column] = [as_float(item) for item in row]
    every = -(-longest // _MAX_BINS)
    return [str(index) for index in range(0, longest, every)], values[::every]


def _key_rows(rows: list[Mapping[str, float]], missing: float) -> tuple[list[str], Values]:
    labels = {label for row in rows for label in row}
    bins = sorted(labels, key=_place)
    place = {label: index for index, label in enumerate(bins)}
    values = np.full((len(bins), len(rows)), missing)
    for column, row in enumerate(rows):
        for label, number in row.items():
            values[place[label], column] = as_float(number)
    return bins, values


def _place(label: str) -> tuple[int, float]:
    """Return the place of a bin: zeros below the smallest number, what is not finite above the largest."""
    return (0, 0.0) if label == "zero" else (2, 0.0) if label == "nonfinite" else (1, _number(label) or 0.0)


def _clock(moments: list[tuple[int, int | None, float, bool]], started: float | None) -> StepTimes:
    if not moments:
        return StepTimes([], [], None)
    times = [time for _, _, time, _ in moments if time > 0]
    first = started if started is not None else min(times, default=0.0)
    latest: dict[int, tuple[float, float]] = {-1: (first, 0.0)}
    for step, epoch, time, is_before in moments:
        latest[step] = (time or first, 0.0 if epoch is None else float(epoch if is_before else epoch + 1))
    steps = sorted(latest)
    steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, _MAX_ANCHORS).round().astype(int))]
    seconds = np.maximum.accumulate([max(0.0, latest[step][0] - first) for step in steps])
    epochs = np.maximum.accumulate([latest[step][1] for step in steps])
    has_epochs = any(epoch is not None for _, epoch, _, _ in moments)
    return StepTimes(steps, seconds.round(3).tolist(), epochs.tolist() if has_epochs else None)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of a metric on a map of layers and steps."""

    group: str
    """The map: the hook and what it looked at, ``stats/forward``."""
    statistic: str
    """The statistic: ``mean``."""
    layer: str
    """The row."""


def layer_places(names: Iterable[str]) -> dict[str, LayerPlace]:
    """Return the place of each metric that there is for several layers; leave the others out."""
    found: dict[str, LayerPlace] = {}
    others: dict[int, list[tuple[str, list[str]]]] = {}
    for name in names:
        parts = name.split("/")
        # A layer's name may hold slashes of its own, so what is around it decides.
        if len(parts) >= 4 and parts[-2] in KINDS:
            found[name] = LayerPlace(f"{parts[0]}/{parts[-2]}", parts[-1], "/".join(parts[1:-2]))
        elif len(parts) >= 3 and parts[0] not in _THE_RUN:
            others.setdefault(len(parts), []).append((name, parts))
    known = {place.layer for place in found.values()}
    for same_length in others.values():
        found |= _by_place(same_length, known)
    return found


def _by_place(metrics: Sequence[tuple[str, list[str]]], known: set[str]) -> dict[str, LayerPlace]:
    """Return places by the part that looks most like a layer; all ``metrics`` have as many parts."""
    siblings: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for _, parts in metrics:
        for index in range(1, len(parts)):
            siblings.setdefault((index, _without(parts, index)), []).append(parts[index])
    share = {key: _likeness(found, known) for key, found in siblings.items() if len(found) >= _MIN_ROWS}
    placed: dict[str, LayerPlace] = {}
    for name, parts in metrics:
        keys = [(index, _without(parts, index)) for index in range(1, len(parts))]
        keys = [key for key in keys if share.get(key, 0.0) >= _LOOKS_LIKE_A_LAYER]
        if keys:
            # Units of a layer look like layers as well: of two parts, the one with more siblings is the row.
            index, rest = max(keys, key=lambda key: (len(siblings[key]), share[key]))
            placed[name] = LayerPlace("/".join(rest[:-1]), rest[-1], parts[index])
    return placed


def _without(parts: list[str], index: int) -> tuple[str, ...]:
    return (*parts[:index], *parts[index + 1 :])


def _likeness(found: list[str], known: set[str]) -> float:
    return sum(part in known or "." in part or any(map(str.isdigit, part)) for part in found) / len(found)
