"""Find statistics of a tensor on the CPU, as plain numbers, and add them to a row.

The engine calls it for every firing on a CPU; ``activation_stats`` calls it for small tensors.

A tensor is read in blocks that fit the cache: five reductions of torch read each block five times, but only the first
time from memory (4 Mi float32 on one core: 2.4 ms, against 4.3 in one go and 1.4 for a copy). Sums of blocks are added
up in float64. torch counts zeros four times slower than it adds; comparing in numpy is as fast as adding.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.observe.watch.stat_columns import Layout
    from hookline.observe.watch.stat_rows import StatRow

__all__ = ["Numbers", "add", "flat_view", "measure", "reduce"]

_BLOCK: Final = 1 << 18
"""Numbers per block: 1 MiB of float32. Of 2^14 to 2^18, the largest was the fastest."""
_FEW: Final = 1 << 12
"""Below this many numbers, torch counts zeros faster than numpy, whose calls take longer."""
_FAR: Final = 9.0
"""Where the squared mean is this many times the variance (their ratio 3), both are taken about the mean. Sums of
float32 have an error of 1e-7, of squares of rounded bfloat16 one of 1e-5; the variance sees it multiplied by this."""
_TINY: Final = 1e-30
"""Sums of squares below this may have lost numbers that are too small to be squared in float32."""
_FLOATS: Final = frozenset({torch.float32, torch.float64})
_HALVES: Final = frozenset({torch.bfloat16, torch.float16})
_LOCK: Final = threading.Lock()


class Numbers(NamedTuple):
    """The statistics of a tensor, or of a part of it."""

    size: int = 0
    sum: float = 0.0
    squares: float = 0.0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    bad: bool = False
    """Whether there are NaN or Inf."""
    nan: int = 0
    inf: int = 0
    finite_low: float = math.inf
    finite_high: float = -math.inf
    over: tuple[int, ...] = ()

    def repeated(self, times: int) -> Numbers:
        """Return the statistics of the same numbers, ``times`` over."""
        return self._replace(
            size=self.size * times,
            sum=self.sum * times,
            squares=self.squares * times,
            zeros=self.zeros * times,
            nan=self.nan * times,
            inf=self.inf * times,
            over=tuple(count * times for count in self.over),
        )

    def joined(self, other: Numbers) -> Numbers:
        """Return the statistics of both parts together."""
        return Numbers(
            self.size + other.size,
            self.sum + other.sum,
            self.squares + other.squares,
            self.zeros + other.zeros,
            _lower(self.low, other.low),
            -_lower(-self.high, -other.high),
            self.bad or other.bad,
            self.nan + other.nan,
            self.inf + other.inf,
            min(self.finite_low, other.finite_low),
            max(self.finite_high, other.finite_high),
            tuple(map(sum, zip(self.over, other.over, strict=True))) if self.over else other.over,
        )


def measure(tensor: Tensor, layout: Layout, row: StatRow, factor: float = 1.0) -> Numbers:
    """Add the statistics of ``tensor``, its numbers multiplied by a positive ``factor``, to a row on the CPU."""
    found = reduce(tensor, layout, 1.0 / factor)
    add(found, row, layout, factor)
    return found


def reduce(tensor: Tensor, layout: Layout, unit: float = 1.0) -> Numbers:
    """Return the statistics of a tensor that is on the CPU; thresholds are in multiples of ``unit``."""
    tensor, times = _once(tensor.detach())
    found = _reduce(flat_view(tensor), layout, unit)
    return found if times == 1 else found.repeated(times)


def _once(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor that repeats itself, as the gradient of a sum does, without repetitions, and their number."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return tensor, times


def _reduce(flat: Tensor, layout: Layout, unit: float) -> Numbers:
    count = flat.numel()
    if count <= _BLOCK:
        return _of_block(_as_float(flat), layout, unit) if count else Numbers()
    found = Numbers()
    for block in torch.split(flat, _BLOCK):
        found = found.joined(_of_block(_as_float(block), layout, unit))
    return found


def _of_block(block: Tensor, layout: Layout, unit: float) -> Numbers:
    count = block.numel()
    low = high = 0.0
    bad = False
    if layout.extremes:
        low, high = block.amin().item(), block.amax().item()
        bad = not (math.isfinite(low) and math.isfinite(high))
    total, squares = _moments(block, count, low, high, layout.extremes) if layout.moments else (0.0, 0.0)
    if not layout.extremes and layout.moments:
        low, high, bad = math.inf, -math.inf, not (math.isfinite(total) and math.isfinite(squares))
    zeros = _zeros(block) if layout.zeros else 0
    over = tuple(_count_over(block, threshold * unit) for threshold in layout.thresholds)
    if bad:
        return Numbers(count, total, squares, zeros, low, high, bad, *_details(block), over)
    return Numbers(count, total, squares, zeros, low, high, bad, 0, 0, low, high, over)


def _moments(block: Tensor, count: int, low: float, high: float, known: bool) -> tuple[float, float]:
    """Return sum and sum of squares."""
    if known and low == high:  # all the same
        return count * low, count * low * low
    total, squares = block.sum().item(), torch.dot(block, block).item()
    finite = math.isfinite(low) and math.isfinite(high)
    if squares < _TINY or (finite and not (math.isfinite(total) and math.isfinite(squares))):
        if block.dtype is torch.float64:
            return total, squares
        return _moments(block.double(), count, low, high, known)  # too small, or too large, for float32
    mean = total / count
    if mean * mean > _FAR * (squares / count - mean * mean) and math.isfinite(mean):
        about = block - mean
        rest, spread = about.sum().item(), torch.dot(about, about).item()
        centre = mean if block.dtype is torch.float64 else float(np.float32(mean))  # what torch has subtracted
        return rest + count * centre, spread + 2 * centre * rest + count * centre * centre
    return total, squares


def _zeros(block: Tensor) -> int:
    count = block.numel()
    if count < _FEW:
        return count - int(torch.count_nonzero(block))
    numbers: NDArray[np.floating] = block.numpy()
    return int(np.count_nonzero(np.equal(numbers, 0, out=_scratch(count))))


def _count_over(block: Tensor, threshold: float) -> int:
    numbers: NDArray[np.floating] = block.numpy()
    return int(np.count_nonzero(np.greater(np.abs(numbers), threshold, out=_scratch(block.numel()))))


def _details(block: Tensor) -> tuple[int, int, float, float]:
    """Return the counts of NaN and Inf, and the extremes of the rest."""
    finite = block[block.isfinite()]
    nan = int(block.isnan().sum())
    rest = finite.numel()
    low, high = (finite.amin().item(), finite.amax().item()) if rest else (math.inf, -math.inf)
    return nan, block.numel() - rest - nan, low, high


def add(found: Numbers, row: StatRow, layout: Layout, factor: float) -> None:
    """Add what was found to a row on the CPU."""
    cells, at = row.cells, row.start
    assert cells is not None
    with _LOCK:
        cells[at] += 1.0
        cells[at + 1] += found.size
        cells[at + 2] += found.sum * factor
        cells[at + 3] += found.squares * factor * factor
        cells[at + 4] += found.zeros
        if found.bad:
            row.bad_order.setdefault(row.number)
            cells[at + 5] += 1.0
            cells[at + 6] += found.nan
            cells[at + 7] += found.inf
        for place, over in enumerate(found.over, at + 8):
            cells[place] += over
        if layout.extremes and found.size:
            place = at + len(layout.added)
            _keep(cells, place, -found.low * factor)
            _keep(cells, place + 1, found.high * factor)
            _keep(cells, place + 2, -found.finite_low * factor)
            _keep(cells, place + 3, found.finite_high * factor)


def _keep(cells: memoryview[float], place: int, value: float) -> None:
    if not value <= cells[place] and cells[place] == cells[place]:  # NaN comes in, and stays
        cells[place] = value


def _lower(one: float, other: float) -> float:
    return one if one != one or one < other else other


def _as_float(flat: Tensor) -> Tensor:
    dtype = flat.dtype
    if dtype in _FLOATS:
        return flat
    if dtype in _HALVES or dtype.is_floating_point:
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


class _Scratch(threading.local):
    flags: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)


_SCRATCH: Final = _Scratch()


def _scratch(count: int) -> NDArray[np.bool_]:
    """Return an array of ``count`` flags; a new one for each block would mostly be page faults."""
    if _SCRATCH.flags.size < count:
        _SCRATCH.flags = np.empty(max(count, _BLOCK), dtype=np.bool_)
    return _SCRATCH.flags[:count]
