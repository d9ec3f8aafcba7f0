"""From the columns of a row to the statistics a user asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.observe.watch.columns import Layout

__all__ = ["as_metrics"]

_Cells = Mapping[str, float]
_NOISE: Final = 1e-14
"""A variance below this share of the squared mean is rounding in float64, not spread."""


def as_metrics(cells: _Cells, layout: Layout) -> dict[str, float]:
    """The statistics of one row; none, if nothing was counted.

    Once something was not finite, its counts and the extremes of the rest are told whether asked for or not.
    """
    if not cells["count"]:
        return {}
    names = [name for name in layout.stats if name not in layout.by_unit]
    if cells["bad"]:
        # In compiled code the graph does not look closer before it is made anew; then there is nothing to tell yet.
        looked = cells["nan"] + cells["inf"] > 0
        names += [name for name in _ON_ALARM if name not in names and (looked or name == "nonfinite")]
    found = {name: _statistic(name, cells) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _statistic(name: str, cells: _Cells) -> float | None:
    if name in _FORMULAS:
        return _FORMULAS[name](cells)
    return cells[name] / cells["count"]  # over:…


def _mean(cells: _Cells) -> float:
    return cells["sum"] / cells["count"]


def _std(cells: _Cells) -> float:
    mean = _mean(cells)
    variance = cells["squares"] / cells["count"] - mean * mean
    if variance != variance:
        return math.nan
    return math.sqrt(variance) if variance > _NOISE * mean * mean else 0.0


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # nothing was seen that is


_FORMULAS: Final[dict[str, Callable[[_Cells], float | None]]] = {
    "mean": _mean,
    "std": _std,
    "rms": lambda cells: _root(cells["squares"] / cells["count"]),
    "norm": lambda cells: _root(cells["squares"] / cells["fires"]),
    "min": lambda cells: -cells["-min"],
    "max": lambda cells: cells["max"],
    "absmax": lambda cells: max(cells["-min"], cells["max"]) + 0.0 if cells["max"] == cells["max"] else math.nan,
    "zero_fraction": lambda cells: cells["zeros"] / cells["count"],
    "nonfinite": lambda cells: cells["bad"],
    "nan": lambda cells: cells["nan"],
    "inf": lambda cells: cells["inf"],
    "finite_min": lambda cells: _finite(-cells["-finite_min"]),
    "finite_max": lambda cells: _finite(cells["finite_max"]),
}
_ON_ALARM: Final = ("nonfinite", "nan", "inf", "finite_min", "finite_max")
