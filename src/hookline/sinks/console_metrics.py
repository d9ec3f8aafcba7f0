"""Choose and format metrics for a screen: how a value reads, which metrics of many are shown, the columns of a line.

`ConsoleSink` calls these; nothing here knows of rich.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from hookline.records.sink import Record

__all__ = ["MetricChoice", "SnapshotLines", "format_value", "has_nonfinite", "split_key", "trend", "typical"]

_LEAST_CHANGE: Final = 0.01
"""A change of less than one percent is no trend."""
_LONGEST: Final = 60
"""Characters of a text that are shown."""
_MAX_NUMBERS: Final = 8
"""Numbers in a line: with their names they fit into about 110 characters."""
_MAX_ROWS: Final = 24
"""Metrics in a column where the user has chosen none."""
_FIRST: Final = ("loss", "val_acc", "val_loss", "train_acc")
"""Metrics that come first in a line, each of one hook: several may report the evaluation."""
_WIDTH: Final = 9
"""Characters of a number: ``-0.001234``, ``-1.23e-05``."""
_ROWS: Final = 30
"""Lines under one row of names: as many as a screen shows together."""


# -- values -------------------------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """Return ``value`` in few characters: ``.6f``, or ``.4e`` below 0.001 and over 10,000, 0 as 0; a list as its mean.

    Recipe: ``format_value([1.0, 2.0])`` is ``"1.500000 (n=2)"``.
    """
    if isinstance(value, float):
        return _format_float(value)
    if value is None:
        return "–"
    if isinstance(value, bool | int):
        return _shorten(str(value))
    if isinstance(value, Mapping):
        return _shorten(", ".join(f"{key}: {format_value(item)}" for key, item in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        middle = typical(value)
        return f"(n={len(value)})" if middle is None else f"{_format_float(float(middle))} (n={len(value)})"
    return _shorten(" ".join(str(value).split()))


def _format_short(value: Any) -> str:
    """Return ``value`` for a column: four significant digits; a list as its mean, what is no number as text."""
    number = typical(value)
    if number is None:
        return format_value(value)
    if isinstance(number, int):
        return _shorten(str(number))
    if 0 < abs(number) < 0.001:
        return f"{number:.2e}"  # as wide as 0.001234
    return "0" if number == 0 else f"{number:.4g}"


def _format_float(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.4e}" if abs(value) < 0.001 or abs(value) > 10_000 else f"{value:.6f}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def typical(value: Any) -> float | int | None:
    """Return the number that represents ``value``: itself, the mean of a list (with its NaN), or None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [item for item in value if isinstance(item, int | float)]
        try:
            # Not `math.fsum`, which raises for infinities of different sign.
            return sum(numbers) / len(numbers) if numbers else None
        except OverflowError:  # integers that no float can hold
            return math.inf
    return None


def has_nonfinite(value: Any) -> bool:
    """Return whether ``value`` holds a NaN or an infinity."""
    if isinstance(value, Mapping):
        return any(map(has_nonfinite, value.values()))
    middle = typical(value)
    return isinstance(middle, float) and not math.isfinite(middle)


def trend(values: Sequence[float]) -> str:
    """Return ▲, ▼ or ━ by the first and the last of ``values``; nothing for a single one."""
    if len(values) < 2 or math.isnan(values[-1] - values[0]):
        return ""
    before, change = values[0], values[-1] - values[0]
    is_flat = change == 0 if before == 0 else abs(change) / abs(before) < _LEAST_CHANGE
    return "━" if is_flat else "▲" if change > 0 else "▼"


def split_key(key: str) -> tuple[str, str]:
    """Return hook and metric of ``"hook/metric"``."""
    hook, slash, metric = key.partition("/")
    return (hook, metric) if slash else ("–", key)


# -- which metrics, in which columns ------------------------------------------------------------------------------


class MetricChoice:
    """Chooses a few of many metrics.

    Recipe: ``MetricChoice(["val_acc", "norms/*"]).columns({"eval/val_acc": 0.9, "norms/total_norm": 1.5})`` is both.

    Args:
        asked: What the user wants to see: ``"hook/metric"``, the metric's name alone, or a pattern with ``*``. If it is
            empty: loss and accuracies, then what is declared, then the first number of every other hook; eight at most.
        declared: The metrics that the experiment declares: ``{group: {label: "hook/metric"}}``.
    """

    def __init__(self, asked: Sequence[str] = (), declared: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._asked = tuple(asked)
        self._declared = dict(declared or {})

    def columns(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the names of the metrics of a line, in the order of showing."""
        if self._asked:
            return self._matching(metrics)
        numbers = [key for key, value in metrics.items() if key.count("/") <= 1 and typical(value) is not None]
        names: dict[str, str] = {}
        for key in numbers:
            names.setdefault(split_key(key)[1], key)
        declared = [key for labels in self._declared.values() for key in labels.values() if key in numbers]
        chosen = dict.fromkeys([*(names[name] for name in _FIRST if name in names), *declared])
        hooks = {split_key(key)[0] for key in chosen}
        for key in numbers:
            hook, metric = split_key(key)
            if hook not in hooks and metric not in _FIRST:
                hooks.add(hook)
                chosen[key] = None
        return list(chosen)[:_MAX_NUMBERS]

    def groups(self, metrics: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return the metrics of a column: by group, the labels of those that have come, each with its key."""
        if self._declared and not self._asked:
            found = {
                group: {label: key for label, key in labels.items() if key in metrics}
                for group, labels in self._declared.items()
            }
            return {group: labels for group, labels in found.items() if labels}
        keys = [key for key in metrics if key.count("/") == 1][:_MAX_ROWS]
        by_hook: dict[str, dict[str, str]] = {}
        for key in self._matching(metrics) if self._asked else keys:
            hook, metric = split_key(key)
            by_hook.setdefault(hook, {})[metric] = key
        return by_hook

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return what was asked for and matches none of ``names``."""
        return [pattern for pattern in self._asked if not any(_matches(name, pattern) for name in names)]

    def _matching(self, metrics: Mapping[str, Any]) -> list[str]:
        found: dict[str, str] = {}
        for key in (key for pattern in self._asked for key in metrics if _matches(key, pattern)):
            metric = split_key(key)[1]
            found.setdefault(metric if metric in _FIRST else key, key)
        return list(found.values())


def _matches(key: str, pattern: str) -> bool:
    return fnmatchcase(key, pattern) or fnmatchcase(split_key(key)[1], pattern)


class SnapshotLines:
    """One line per snapshot: numbers in columns, under their names when these change."""

    def __init__(self, choice: MetricChoice) -> None:
        self._choice = choice
        self._columns: tuple[str, ...] = ()
        self._num_rows = 0

    def lines(self, metrics: Mapping[str, Any], record: Record) -> list[str]:
        """Return the line of a snapshot, after the names of its columns if they have changed."""
        chosen = self._choice.columns(metrics)
        if not chosen:
            return []
        places = _places(record)
        columns = self._columns if {*places, *chosen} <= {*self._columns} else (*places, *chosen)
        is_new = columns != self._columns or self._num_rows >= _ROWS
        self._columns, self._num_rows = columns, 1 if is_new else self._num_rows + 1
        values = {key: _format_short(metrics.get(key)) for key in columns} | places
        names = {key: _column_title(key, columns) for key in columns}
        widths = {key: max(len(names[key]), len(key) if key in places else _WIDTH) for key in columns}
        rows = [names, values] if is_new else [values]
        return ["  ".join(row[key].rjust(widths[key]) for key in columns) for row in rows]


def _places(record: Record) -> dict[str, str]:
    """Return the epoch and step of ``record``; in a run that counts steps, the step alone."""
    if record.epoch is None:
        return {" step": format_value(record.step)}
    return {"epoch": str(record.epoch)} | ({} if record.step is None else {" step": str(record.step)})


def _column_title(key: str, columns: tuple[str, ...]) -> str:
    """Return the metric's own name; the whole key where two hooks have a metric of that name."""
    name = split_key(key)[1]
    return name if sum(split_key(other)[1] == name for other in columns) == 1 else key
