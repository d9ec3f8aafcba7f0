"""Say which statistics a watch keeps, find the row of a tensor, merge rows, and turn them into metrics and a table.

A row holds one float64 number per column: those of one firing (one tensor), or of many at one place (`WatchedPlace` of
engine.py). The first columns are added up. Of the others the largest number is kept, so a minimum is kept negated.
Blocks of a tensor, calls, devices and ranks are all merged by these two rules.

engine.py, ranks.py, watch.py and the ready hooks of ``factories`` make metrics and tables of rows (`metrics_of`,
`as_metrics`, `table_of`); engine.py merges those of devices by `merge_into`. `Layout.of` is called by watch.py, the
ready hooks of ``factories`` and ``debug.first_bad``; analyses/layers.py calls it only to check names. engine.py finds
rows by `reduce`, `reduce_on_device` and `row_of_parts`; bad_operation.py of ``debug.first_bad`` calls `reduce` too.
kernel.py uses `flat_view`, and fingerprint.py of ``debug.compare`` `extremes`.

The order of the columns (`_ADDED`, thresholds, `_KEPT`) is written down again in `_of_block`, `reduce_on_device`,
`row_of_parts`, `_row_of_nothing`, triton_programs.py (as numbers), and `reference` of
tests/observe/watch/helpers_columns.py: change all together. Checkpoints hold rows by position
(`StatsEngine.state_dict`), so rows of another order and the same width would be read wrongly. Columns are read by
number in engine.py, hooks.py, monitor.py, ranks.py, watch.py, ``debug.first_bad`` and factories/streaming_stats.py.
They are read by name in factories/streaming_stats.py, factories/probing.py and bad_operation.py.

A new statistic that columns of today can tell needs its name in `DEFAULT_STATS` or `_NAMES`, a case in `_values`, and
its name at what it needs in `Layout.of`; in `_MEANINGS`, if the name does not say it all. Add it to the lists for
users: the docstring of `watch` (watch.py), docs/factories.md, and docs/tour.md if it is not a default. Add it to
`reference` of tests/observe/watch/helpers_stats.py and `ALL` of test_numbers.py there. Two files go by the names of
statistics: report/anomalies.py (`_SIZES`, `_ZERO_SHARE`), and analyses/layers.py (``reduce``: how ranks are joined).
For one that is kept per unit, see the head of engine.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.messages import suggest
from hookline.tables import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_STATS: Final = ("mean", "std", "norm", "rms", "min", "max", "absmax", "zero_fraction", "nonfinite")
_DETAILS: Final = frozenset({"nan", "inf", "finite_min", "finite_max"})
_BY_UNIT: Final = frozenset({"dead_fraction", "histogram"})
"""Statistics kept beside the row: the keys of `BY_UNIT` in engine.py, which says what a new one needs."""
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
    squares: bool = True
    """Whether sums of squares are needed."""
    sums: bool = True
    """Whether sums are needed."""
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
            # A mean too: squares show `_moments` that it is so far from 0 that sums are to be taken about it again.
            squares=bool(wanted & {"mean", "std", "norm", "rms"}),
            sums=bool(wanted & {"mean", "std"}),
            extremes=bool(wanted & {"min", "max", "absmax", "nonfinite", *_DETAILS}),
            zeros="zero_fraction" in wanted,
            details=bool(wanted & _DETAILS),
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

    @cached_property
    def empty(self) -> tuple[float, ...]:
        """The row of nothing."""
        return (0.0,) * len(self.added) + (-math.inf,) * len(_KEPT)

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
    """Return the statistics of every row that has counted something, by its prefix and the name of the statistic.

    Once something was not finite, `_AFTER_NONFINITE` are reported whether asked for or not.
    """
    is_seen, is_bad = rows[:, COUNT] > 0, rows[:, BAD] > 0
    # On a GPU, compiled code counts NaN and Inf once its graph is made anew; until then there is none to report.
    is_counted = is_bad & (rows[:, NAN] + rows[:, INF] > 0)
    names = [name for name in layout.stats if name not in layout.by_unit]
    more = [name for name in _AFTER_NONFINITE if name not in names] if is_bad.any() else []
    cells = dict(zip(layout.names, rows.T, strict=True))
    found: list[tuple[str, list[float], list[bool]]] = []
    for name in (*names, *more):
        with np.errstate(all="ignore"):
            values = _values(name, cells)
        is_there = is_seen
        if name in more:
            is_there = is_seen & (is_bad if name == "nonfinite" else is_counted)
        if name in ("finite_min", "finite_max"):
            is_there = is_there & np.isfinite(values)  # else no finite number was seen
        found.append((name, values.tolist(), is_there.tolist()))
    return {
        prefix + name: values[row] for row, prefix in enumerate(prefixes) for name, values, there in found if there[row]
    }


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
    more = f"; {hidden} more without numbers yet, report()['silent'] says why" if hidden else ""
    return counts + more, "; ".join([_SINCE, *(f"{name} {_MEANINGS[name]}" for name in names if name in _MEANINGS)])


# -- finding the row of a tensor -------------------------------------------------------------------------------------

# On a CPU a tensor is read in blocks that fit the cache: five reductions of torch read each block five times, but only
# the first time from memory (4 Mi float32 on one core: 2.4 ms, against 4.3 in one go and 1.4 for a copy). Sums of
# blocks are added up in float64. torch counts zeros four times slower than it adds; numpy compares as fast as it adds.
_BLOCK: Final = 1 << 18
"""Numbers per block: 1 MiB of float32. Of 2^14 to 2^18, the largest was the fastest."""
_FEW: Final = 1 << 12
"""Below this many numbers, torch counts zeros faster than numpy, whose calls take longer."""
_FAR: Final = 9.0
"""Where the squared mean is this many times the variance (their ratio 3), both are taken about the mean. Sums of
float32 have an error of 1e-7, of squares of rounded bfloat16 one of 1e-5; the variance sees it multiplied by this."""
_TINY: Final = 1e-30
"""Sums of squares below this may have lost numbers that are too small to be squared in float32. The same number stands
in triton_programs.py; fingerprints (``debug.compare``) have it twice more."""
_WIDE: Final = torch.float64


def reduce(tensor: Tensor, layout: Layout, factor: float = 1.0) -> list[float]:
    """Return the row of a tensor that is on the CPU, its numbers multiplied by a positive ``factor``."""
    tensor, times = _once(tensor.detach())
    flat = flat_view(tensor)
    if not flat.numel():
        return [1.0, *layout.empty[1:]]
    num_added = len(layout.added)
    blocks = [flat] if flat.numel() <= _BLOCK else torch.split(flat, _BLOCK)
    found, *others = [_of_block(_as_float(block), layout, 1.0 / factor) for block in blocks]
    if others:
        rows = np.array([found, *others])
        with np.errstate(all="ignore"):
            found = [*rows[:, :num_added].sum(0).tolist(), *rows[:, num_added:].max(0).tolist()]
    if times > 1:
        found[:num_added] = [times * value for value in found[:num_added]]
    if factor != 1.0:
        found[SUM], found[SQUARES] = found[SUM] * factor, found[SQUARES] * factor * factor
        found[num_added:] = [value * factor for value in found[num_added:]]
    found[FIRES], found[BAD] = 1.0, float(found[BAD] > 0)  # one firing, however many of its blocks
    return found


def _once(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor without the repetitions of an expanded one (the gradient of a sum is one), and their number."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return tensor, times


def _of_block(block: Tensor, layout: Layout, unit: float) -> list[float]:
    """Return the row of a block, by columns of `Layout.names`; thresholds are in multiples of ``unit``."""
    count = block.numel()
    low, high = extremes(block) if layout.extremes else (math.inf, -math.inf)
    total, squares = _moments(block, layout, low, high) if layout.squares else (0.0, 0.0)
    ends = (low, high) if layout.extremes else (total, squares)
    is_odd = not (math.isfinite(ends[0]) and math.isfinite(ends[1]))  # squares of float64 may be too large, too
    nan, inf, finite_low, finite_high = _details(block) if is_odd else (0, 0, low, high)
    if not layout.extremes:
        finite_low, finite_high = low, high
    zeros = _zeros(block) if layout.zeros else 0
    over = [int(np.count_nonzero(np.abs(block.numpy()) > threshold * unit)) for threshold in layout.thresholds]
    return [0, count, total, squares, zeros, nan + inf > 0, nan, inf, *over, -low, high, -finite_low, finite_high]


def extremes(block: Tensor) -> tuple[float, float]:
    """Return the least and the largest number; NaN if there is one."""
    low, high = torch.aminmax(block)  # one call takes 0.6 of the time of two
    return low.item(), high.item()


def _moments(block: Tensor, layout: Layout, low: float, high: float) -> tuple[float, float]:
    """Return the sum (0 where it is not needed) and the sum of squares.

    ``low`` and ``high`` are the extremes; where they are not known, ``low`` is above ``high``.
    """
    count = block.numel()
    if low == high:  # all the same
        return count * low, count * low * low
    total, squares = block.sum().item() if layout.sums else 0.0, torch.dot(block, block).item()
    may_be_finite = low > high or (math.isfinite(low) and math.isfinite(high))
    if squares < _TINY or (may_be_finite and not (math.isfinite(total) and math.isfinite(squares))):
        if block.dtype is _WIDE:
            return total, squares
        return _moments(block.double(), layout, low, high)  # too small, or too large, for float32
    mean = total / count
    if mean * mean > _FAR * (squares / count - mean * mean) and math.isfinite(mean):
        about = block - mean
        rest, spread = about.sum().item(), torch.dot(about, about).item()
        centre = mean if block.dtype is _WIDE else float(np.float32(mean))  # what torch has subtracted
        return rest + count * centre, spread + 2 * centre * rest + count * centre * centre
    return total, squares


def _zeros(block: Tensor) -> int:
    count = block.numel()
    return count - int(torch.count_nonzero(block)) if count < _FEW else int(np.count_nonzero(block.numpy() == 0))


def _details(block: Tensor) -> tuple[int, int, float, float]:
    """Return the counts of NaN and Inf, and the extremes of the rest."""
    finite = block[block.isfinite()]
    nan = int(block.isnan().sum())
    rest = finite.numel()
    low, high = extremes(finite) if rest else (math.inf, -math.inf)
    return nan, block.numel() - rest - nan, low, high


def reduce_on_device(tensor: Tensor, layout: Layout, scale: Any = None) -> Tensor:
    """Return the row of a tensor on its own device, its numbers divided by ``scale``; nothing waits."""
    numbers = _as_float(tensor.detach())
    if scale is not None:
        numbers = numbers / torch.as_tensor(scale, device=tensor.device)
    count = numbers.numel()
    one = torch.ones((), dtype=_WIDE, device=tensor.device)
    if not count:
        return _row_of_nothing(layout, tensor.device)
    finite, nan = numbers.isfinite(), numbers.isnan().sum()
    bad = count - finite.sum()
    total, squares = numbers.sum(dtype=_WIDE), torch.linalg.vector_norm(numbers, dtype=_WIDE).square()
    over = [(numbers.abs() > threshold).sum() for threshold in layout.thresholds]
    added = [one, one * count, total, squares, (numbers == 0).sum(), bad > 0, nan, bad - nan, *over]
    low, high = torch.where(finite, numbers, math.inf).amin(), torch.where(finite, numbers, -math.inf).amax()
    return torch.stack([each.to(_WIDE) for each in (*added, -numbers.amin(), numbers.amax(), -low, high)])


def row_of_parts(found: list[Tensor], each: int, layout: Layout, scale: Any = None) -> Tensor:
    """Return the row of a tensor from what compiled code has found in its slices of ``each`` numbers.

    ``found`` is what `_by_row` of graph.py makes, in its order and with its `_TYPES`. Columns of thresholds and details
    stay 0: a layout with these never comes this way, as `find_in` there hands over the whole tensor.
    """
    sums, squares, lows, highs, zeros = (part.to(_WIDE) for part in found)
    if not sums.numel():
        return _row_of_nothing(layout, sums.device)
    one = torch.ones((), dtype=_WIDE, device=sums.device)
    factor = one if scale is None else one / torch.as_tensor(scale, device=sums.device)
    least, most = -lows.amin(), highs.amax()
    bad = ~(least.isfinite() & most.isfinite())
    # Of a place with something else than numbers, the rest was not looked at.
    finite = [torch.where(end.isfinite(), end, -math.inf) for end in (least + 0 * most, most + 0 * least)]
    added = [one, one * sums.numel() * each, sums.sum() * factor, squares.sum() * factor**2, zeros.sum(), bad]
    added += [one * 0] * (len(layout.added) - len(added))
    return torch.stack([*(end.to(_WIDE) for end in added), *(end * factor for end in (least, most, *finite))])


def _row_of_nothing(layout: Layout, device: torch.device) -> Tensor:
    # By operations of the device: a copy from the host would wait, and cannot be recorded as a CUDA graph.
    row = torch.full((layout.width,), -math.inf, dtype=_WIDE, device=device)
    row[: len(layout.added)] = 0.0
    row[0] = 1.0
    return row


def factor_of(scale: Any) -> float:
    """Return the factor that divides by ``scale``; 1 for none, and for zero, which has left nothing to see."""
    return 1.0 / float(scale) if scale is not None and float(scale) else 1.0


def _as_float(flat: Tensor) -> Tensor:
    dtype = flat.dtype
    if dtype is torch.float32 or dtype is _WIDE:
        return flat
    if dtype.is_floating_point:
        return flat.float()
    return flat.abs().double() if dtype.is_complex else flat.double()


def flat_view(tensor: Tensor) -> Tensor:
    """Return all numbers in one dimension, in the order they have in memory."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)
    in_memory = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return in_memory.view(-1) if in_memory.is_contiguous() else tensor.reshape(-1)
