"""What is counted: the columns of a row of state, and the statistics a user asks for by name.

A row holds one float64 number per column. Columns of the first kind are added up, those of the second keep the largest
(so an extreme at the low end is kept negated); both are the same whether the numbers come from a CPU loop, a kernel or
a compiled graph, and rows of several processes merge by the same two rules.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Final

from hookline.errors import OptionError

__all__ = ["DEFAULT_STATS", "Layout"]

DEFAULT_STATS: Final = ("mean", "std", "norm", "rms", "min", "max", "absmax", "zero_fraction", "nonfinite")
_MOMENTS: Final = frozenset({"mean", "std", "norm", "rms"})
_EXTREMES: Final = frozenset({"min", "max", "absmax"})
_DETAILS: Final = frozenset({"nan", "inf", "finite_min", "finite_max"})
_BY_UNIT: Final = frozenset({"dead_fraction", "histogram"})
_NAMES: Final = (*DEFAULT_STATS, *sorted(_DETAILS), *sorted(_BY_UNIT))
_OVER: Final = "over:"
_ADDED: Final = ("fires", "count", "sum", "squares", "zeros", "bad", "nan", "inf")
_KEPT: Final = ("-min", "max", "-finite_min", "finite_max")


@dataclass(frozen=True)
class Layout:
    """Which statistics are wanted, and the columns that takes.

    Recipe: ``Layout.of(["norm", "zero_fraction", "over:6"])``.
    """

    stats: tuple[str, ...]
    """The statistics by name, in the order they are reported."""
    thresholds: tuple[float, ...] = ()
    """Shares of numbers whose magnitude is over each of these are counted."""
    moments: bool = True
    """Whether sums and sums of squares are needed."""
    extremes: bool = True
    zeros: bool = True
    details: bool = False
    """Whether NaN, Inf and finite-only extremes are counted from the start; else from the first that is seen."""

    @classmethod
    def of(cls, stats: str | list[str] | tuple[str, ...] | None) -> Layout:
        """The layout for statistics named by a user; None for the default set."""
        names = DEFAULT_STATS if stats is None else (stats,) if isinstance(stats, str) else tuple(stats)
        if not names:
            raise OptionError(f"stats= is empty; leave it out for the default set ({', '.join(DEFAULT_STATS)}).")
        thresholds = tuple(sorted({_threshold(name) for name in names if _is_over(name)}))
        wanted = {name for name in names if not _is_over(name)}
        for name in wanted:
            _check_name(name)
        return cls(
            stats=tuple(dict.fromkeys(_named(_threshold(name)) if _is_over(name) else name for name in names)),
            thresholds=thresholds,
            moments=not wanted.isdisjoint(_MOMENTS),
            extremes=not wanted.isdisjoint(_EXTREMES | {"nonfinite"} | _DETAILS),
            zeros="zero_fraction" in wanted,
            details=not wanted.isdisjoint(_DETAILS),
        )

    @cached_property
    def closer(self) -> Layout:
        """The same, with NaN and Inf counted from the start."""
        return dataclasses.replace(self, details=True, extremes=True)

    @cached_property
    def added(self) -> tuple[str, ...]:
        """Names of the columns that are added up."""
        return (*_ADDED, *self.over)

    @cached_property
    def over(self) -> tuple[str, ...]:
        """Names of the columns for thresholds."""
        return tuple(map(_named, self.thresholds))

    @cached_property
    def found(self) -> tuple[str, ...]:
        """What `vector` has to find in a tensor, from which the columns follow."""
        return (
            "size",
            *(("sum", "squares") if self.moments else ()),
            *(("low", "high") if self.extremes else ()),
            *(("zeros",) if self.zeros else ()),
            *(("nan", "finite", "finite_low", "finite_high") if self.details else ()),
            *self.over,
        )

    @property
    def by_row(self) -> bool:
        """Whether a compiled graph on a GPU may find it by row: the rest is counted where a tensor is read again."""
        return (self.moments or self.extremes) and not self.details and not self.thresholds

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Names of the columns of which the largest is kept."""
        return _KEPT

    @cached_property
    def width(self) -> int:
        """How many columns there are."""
        return len(self.added) + len(self.kept)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return self.added + self.kept

    @cached_property
    def by_unit(self) -> tuple[str, ...]:
        """What is kept per unit or bin, beside the row."""
        return tuple(name for name in self.stats if name in _BY_UNIT)


def _is_over(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_OVER)


def _threshold(name: str) -> float:
    text = name.removeprefix(_OVER)
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"{name!r}: write the threshold as a number, 'over:6' for instance.") from None
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(f"{name!r}: the threshold is for magnitudes, so it must be a finite number of at least 0.")
    return value


def _named(threshold: float) -> str:
    """One name for each threshold, however it was written."""
    short = f"{threshold:g}"
    return f"{_OVER}{short if float(short) == threshold else repr(threshold)}"


def _check_name(name: object) -> None:
    if name in _NAMES:
        return
    near = get_close_matches(str(name), _NAMES, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    known = ", ".join(_NAMES)
    raise OptionError(f"Unknown statistic {name!r}.{meant} There are {known}, and 'over:6' for any number.")
