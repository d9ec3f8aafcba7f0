"""Say which statistics a watch keeps, merge rows of them, and turn rows into metrics and a table.

`Watch`, `StatsEngine` and the reducers ask a `Layout` for the columns; ``activation_stats`` and ``nan_alarm`` do, too.

A row holds one float64 number per column. The first columns are added up, of the others the largest number is kept (so
a minimum is kept negated): blocks of a tensor, calls, devices and ranks are all merged by these two rules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hookline.errors import OptionError
from hookline.messages import suggest
from hookline.tables import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BAD",
    "COUNT",
    "DEFAULT_STATS",
    "FIRES",
    "INF",
    "NAN",
    "SQUARES",
    "SUM",
    "Layout",
    "as_metrics",
    "merge",
    "merge_into",
    "metrics_of",
    "table_of",
]

DEFAULT_STATS: Final = ("mean", "std", "norm", "rms", "min", "max", "absmax", "zero_fraction", "nonfinite")
_MOMENTS: Final = frozenset({"mean", "std", "norm", "rms"})
_EXTREMES: Final = frozenset({"min", "max", "absmax"})
_DETAILS: Final = frozenset({"nan", "inf", "finite_min", "finite_max"})
_BY_UNIT: Final = frozenset({"dead_fraction", "histogram"})
_NAMES: Final = (*DEFAULT_STATS, *sorted(_DETAILS), *sorted(_BY_UNIT))
_OVER: Final = "over:"
_ADDED: Final = ("fires", "count", "sum", "squares", "zeros", "bad", "nan", "inf")
FIRES, COUNT, SUM, SQUARES, _ZEROS, BAD, NAN, INF = range(len(_ADDED))
"""The first columns: firings, numbers, their sum, that of their squares, zeros, firings with something that is not
finite, NaN, infinities."""
_KEPT: Final = ("-min", "max", "-finite_min", "finite_max")


@dataclass(frozen=True)
class Layout:
    """The statistics that are wanted, and the columns they need.

    Recipe: ``Layout.of(["norm", "zero_fraction", "over:6"])``.
    """

    stats: tuple[str, ...]
    """The statistics by name, in the order they are reported."""
    thresholds: tuple[float, ...] = ()
    """Count the numbers whose magnitude is over each of these."""
    moments: bool = True
    """Whether sums and sums of squares are needed."""
    extremes: bool = True
    """Whether minima and maxima are needed."""
    zeros: bool = True
    """Whether zeros are counted."""
    details: bool = False
    """Whether NaN, Inf and finite-only extremes are counted from the start; else from the first that is seen."""

    @classmethod
    def of(cls, stats: str | Sequence[str] | None) -> Layout:
        """Return the layout for ``stats`` as a user names them; None means the default set."""
        names = DEFAULT_STATS if stats is None else (stats,) if isinstance(stats, str) else tuple(stats)
        if not names:
            raise OptionError(f"stats= is empty; leave it out for the default set ({', '.join(DEFAULT_STATS)}).")
        thresholds = tuple(sorted({_threshold(name) for name in names if _is_over(name)}))
        wanted = {name for name in names if not _is_over(name)}
        for name in wanted:
            if name not in _NAMES:
                known = f"There are {', '.join(_NAMES)}, and 'over:6' for any number."
                raise OptionError(f"Unknown statistic {name!r}{suggest(name, _NAMES) or '.'} {known}")
        return cls(
            stats=tuple(dict.fromkeys(_over_name(_threshold(name)) if _is_over(name) else name for name in names)),
            thresholds=thresholds,
            moments=not wanted.isdisjoint(_MOMENTS),
            extremes=not wanted.isdisjoint(_EXTREMES | {"nonfinite"} | _DETAILS),
            zeros="zero_fraction" in wanted,
            details=not wanted.isdisjoint(_DETAILS),
        )

    @cached_property
    def with_details(self) -> Layout:
        """The same layout, with NaN and Inf counted from the start."""
        return dataclasses.replace(self, details=True, extremes=True)

    @cached_property
    def added(self) -> tuple[str, ...]:
        """The columns that are added up."""
        return (*_ADDED, *self.over)

    @cached_property
    def over(self) -> tuple[str, ...]:
        """The columns for thresholds."""
        return tuple(map(_over_name, self.thresholds))

    @property
    def fits_one_read(self) -> bool:
        """Whether a compiled graph on a GPU finds all columns that are asked for."""
        return not self.details and not self.thresholds

    @cached_property
    def empty(self) -> tuple[float, ...]:
        """The row of nothing."""
        return (0.0,) * len(self.added) + (-math.inf,) * len(_KEPT)

    @property
    def kept(self) -> tuple[str, ...]:
        """The columns of which the largest number is kept."""
        return _KEPT

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return self.added + _KEPT

    @cached_property
    def width(self) -> int:
        """The number of columns."""
        return len(self.names)

    @cached_property
    def by_unit(self) -> tuple[str, ...]:
        """The statistics that are kept per unit or bin, beside the row."""
        return tuple(name for name in self.stats if name in _BY_UNIT)


def _is_over(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_OVER)


def _threshold(name: str) -> float:
    try:
        value = float(name.removeprefix(_OVER))
    except ValueError:
        raise OptionError(f"{name!r}: write the threshold as a number, 'over:6' for instance.") from None
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(f"{name!r}: the threshold is for magnitudes, so it must be a finite number of at least 0.")
    return value


def _over_name(threshold: float) -> str:
    """Return one name for each threshold, however the user wrote it."""
    short = f"{threshold:g}"
    return f"{_OVER}{short if float(short) == threshold else repr(threshold)}"


# -- metrics -------------------------------------------------------------------------------------------------

_NOISE: Final = 1e-14
"""A variance below this share of the squared mean is rounding in float64, not spread."""
_AFTER_NONFINITE: Final = ("nonfinite", "nan", "inf", "finite_min", "finite_max")


def as_metrics(cells: Mapping[str, float], layout: Layout) -> dict[str, float]:
    """Return the statistics of one row, given by the names of its columns; nothing if nothing was counted."""
    return metrics_of(np.array([[cells[name] for name in layout.names]]), layout, [""])


def metrics_of(rows: NDArray[np.float64], layout: Layout, prefixes: Sequence[str]) -> dict[str, float]:
    """Return the statistics of every row that has counted something, by its prefix and their name.

    Once something was not finite, its counts and the extremes of the rest are reported whether asked for or not.
    """
    count, bad = rows[:, COUNT], rows[:, BAD]
    names = [name for name in layout.stats if name not in layout.by_unit]
    more = [name for name in _AFTER_NONFINITE if name not in names] if bad.any() else []
    is_there = np.repeat((count > 0)[:, None], len(names) + len(more), axis=1)
    # On a GPU, compiled code counts NaN and Inf once its graph is made anew; until then there is none to report.
    is_counted = rows[:, NAN] + rows[:, INF] > 0
    for column, name in enumerate(more, len(names)):
        is_there[:, column] &= (bad > 0) & (is_counted | (name == "nonfinite"))
    with np.errstate(all="ignore"):
        found = [_values(name, dict(zip(layout.names, rows.T, strict=True))) for name in (*names, *more)]
    for column, name in enumerate((*names, *more)):
        if name in ("finite_min", "finite_max"):
            is_there[:, column] &= np.isfinite(found[column])  # else no finite number was seen
    keys = [prefix + name for prefix in prefixes for name in (*names, *more)]
    values = np.stack(found, axis=1).reshape(-1).tolist() if found else []
    return {key: value for key, value, there in zip(keys, values, is_there.reshape(-1).tolist(), strict=True) if there}


def _values(name: str, cells: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return one statistic of every row, given the columns."""
    count = cells["count"]
    match name:
        case "mean":
            return cells["sum"] / count
        case "std":
            mean = cells["sum"] / count
            variance = cells["squares"] / count - mean * mean
            spread = np.where(variance > _NOISE * mean * mean, np.sqrt(variance), 0.0)
            return np.where(np.isnan(variance), np.nan, spread)
        case "rms":
            return np.sqrt(cells["squares"] / count)
        case "norm":
            return np.sqrt(cells["squares"] / cells["fires"])
        case "min" | "finite_min":
            return -cells[f"-{name}"]
        case "absmax":
            return np.maximum(cells["-min"], cells["max"]) + 0.0
        case "zero_fraction":
            return cells["zeros"] / count
        case "nonfinite":
            return cells["bad"]
        case "max" | "finite_max" | "nan" | "inf":
            return cells[name]
        case _:
            return cells[name] / count  # over a threshold


def merge(one: Sequence[float], other: Sequence[float], num_added: int) -> list[float]:
    """Return two rows as one."""
    both = list(zip(one, other, strict=True))
    return [a + b for a, b in both[:num_added]] + [_larger(a, b) for a, b in both[num_added:]]


def _larger(one: float, other: float) -> float:
    """Return the larger number; NaN if either is."""
    return one if one != one or one > other else other


def merge_into(rows: NDArray[np.float64], index: Any, found: NDArray[np.float64], num_added: int) -> None:
    """Merge rows into some of a table."""
    rows[index, :num_added] += found[:, :num_added]
    with np.errstate(invalid="ignore"):
        rows[index, num_added:] = np.maximum(rows[index, num_added:], found[:, num_added:])  # of NaN and a number, NaN


_SINCE: Final = "since the last reset, in the unit of the tensors"
_MEANINGS: Final = {
    "norm": "root mean square over firings",
    "zero_fraction": "from 0 to 1",
    "dead_fraction": "from 0 to 1",
    "nonfinite": "firings with NaN or Inf",
}


def table_of(metrics: Mapping[str, Any], places: Mapping[str, str] | None = None) -> Table:
    """Return one row per place and one column per statistic of ``metrics``; nested ones are left out.

    Args:
        metrics: By ``"place/statistic"``.
        places: The name of the site of each place, those without numbers among them, for two lines below the table.
    """
    rows: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        place, _, name = key.rpartition("/")
        if isinstance(value, int | float):
            rows.setdefault(place, {})[name] = f"{value:.4g}"
    if not rows:
        return Table(title="nothing watched yet")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[place, *(row.get(name, "") for name in names)] for place, row in rows.items()]
    foot = () if places is None else _legend(rows, names, places)
    return Table(["", *names], cells, numbers=range(1, len(names) + 1), foot=foot, rule=False, heat="column")


def _legend(rows: Mapping[str, Any], names: Sequence[str], places: Mapping[str, str]) -> tuple[str, str]:
    """Return how many sites and rows there are, and what the columns mean."""
    sites, hidden = len(set(places.values())), len(places.keys() - rows.keys())
    counts = f"{sites} site{'s' * (sites != 1)}, {len(rows)} row{'s' * (len(rows) != 1)}"
    more = f", {hidden} not shown: no numbers yet, report()['silent'] says why" if hidden else ""
    return counts + more, "; ".join([_SINCE, *(f"{name} {_MEANINGS[name]}" for name in names if name in _MEANINGS)])
