"""Find the row of a tensor by operations of torch: on the CPU in blocks, elsewhere in one go.

The engine calls `reduce` for every firing on a CPU, and ``activation_stats`` for small tensors. `reduce_on_device` is
for devices that have no kernel.

On a CPU a tensor is read in blocks that fit the cache: five reductions of torch read each block five times, but only
the first time from memory (4 Mi float32 on one core: 2.4 ms, against 4.3 in one go and 1.4 for a copy). Sums of blocks
are added up in float64. torch counts zeros four times slower than it adds; comparing in numpy is as fast as adding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.observe.watch.row import BAD, FIRES, SQUARES, SUM, merge

if TYPE_CHECKING:
    from hookline.observe.watch.row import Layout

__all__ = ["factor_of", "flat_view", "reduce", "reduce_on_device", "row_of_parts"]

_BLOCK: Final = 1 << 18
"""Numbers per block: 1 MiB of float32. Of 2^14 to 2^18, the largest was the fastest."""
_FEW: Final = 1 << 12
"""Below this many numbers, torch counts zeros faster than numpy, whose calls take longer."""
_FAR: Final = 9.0
"""Where the squared mean is this many times the variance (their ratio 3), both are taken about the mean. Sums of
float32 have an error of 1e-7, of squares of rounded bfloat16 one of 1e-5; the variance sees it multiplied by this."""
_TINY: Final = 1e-30
"""Sums of squares below this may have lost numbers that are too small to be squared in float32."""
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
    for row in others:
        found = merge(found, row, num_added)
    if times > 1:
        found[:num_added] = [times * value for value in found[:num_added]]
    if factor != 1.0:
        found[SUM], found[SQUARES] = found[SUM] * factor, found[SQUARES] * factor * factor
        found[num_added:] = [value * factor for value in found[num_added:]]
    found[FIRES], found[BAD] = 1.0, float(found[BAD] > 0)  # one firing, however many of its blocks
    return found


def _once(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor that repeats itself, as the gradient of a sum does, without repetitions, and their number."""
    times = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, times = tensor.narrow(dim, 0, 1), times * size
    return tensor, times


def _of_block(block: Tensor, layout: Layout, unit: float) -> list[float]:
    """Return the row of a block; thresholds are in multiples of ``unit``."""
    count = block.numel()
    low, high = (block.amin().item(), block.amax().item()) if layout.extremes else (math.inf, -math.inf)
    total, squares = _moments(block, count, low, high) if layout.moments else (0.0, 0.0)
    ends = (low, high) if layout.extremes else (total, squares)
    is_odd = not (math.isfinite(ends[0]) and math.isfinite(ends[1]))  # squares of float64 may be too large, too
    nan, inf, finite_low, finite_high = _details(block) if is_odd else (0, 0, low, high)
    if not layout.extremes:
        finite_low, finite_high = low, high
    zeros = _zeros(block) if layout.zeros else 0
    over = [_count_over(block, threshold * unit) for threshold in layout.thresholds]
    return [0, count, total, squares, zeros, nan + inf > 0, nan, inf, *over, -low, high, -finite_low, finite_high]


def _moments(block: Tensor, count: int, low: float, high: float) -> tuple[float, float]:
    """Return sum and sum of squares; ``low`` is above ``high`` where they are not known."""
    if low == high:  # all the same
        return count * low, count * low * low
    total, squares = block.sum().item(), torch.dot(block, block).item()
    may_be_finite = low > high or (math.isfinite(low) and math.isfinite(high))
    if squares < _TINY or (may_be_finite and not (math.isfinite(total) and math.isfinite(squares))):
        if block.dtype is _WIDE:
            return total, squares
        return _moments(block.double(), count, low, high)  # too small, or too large, for float32
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


def _count_over(block: Tensor, threshold: float) -> int:
    return int(np.count_nonzero(np.abs(block.numpy()) > threshold))


def _details(block: Tensor) -> tuple[int, int, float, float]:
    """Return the counts of NaN and Inf, and the extremes of the rest."""
    finite = block[block.isfinite()]
    nan = int(block.isnan().sum())
    rest = finite.numel()
    low, high = (finite.amin().item(), finite.amax().item()) if rest else (math.inf, -math.inf)
    return nan, block.numel() - rest - nan, low, high


def reduce_on_device(tensor: Tensor, layout: Layout, scale: Any = None) -> Tensor:
    """Return the row of a tensor on its own device, its numbers divided by ``scale``; nothing waits."""
    numbers = _as_float(tensor.detach())
    if scale is not None:
        numbers = numbers / torch.as_tensor(scale, device=tensor.device)
    count = numbers.numel()
    one = torch.ones((), dtype=_WIDE, device=tensor.device)
    if not count:
        return torch.tensor((1.0, *layout.empty[1:]), dtype=_WIDE, device=tensor.device)
    finite, nan = numbers.isfinite(), numbers.isnan().sum()
    bad = count - finite.sum()
    total, squares = numbers.sum(dtype=_WIDE), torch.linalg.vector_norm(numbers, dtype=_WIDE).square()
    over = [(numbers.abs() > threshold).sum() for threshold in layout.thresholds]
    added = [one, one * count, total, squares, (numbers == 0).sum(), bad > 0, nan, bad - nan, *over]
    low, high = torch.where(finite, numbers, math.inf).amin(), torch.where(finite, numbers, -math.inf).amax()
    return torch.stack([each.to(_WIDE) for each in (*added, -numbers.amin(), numbers.amax(), -low, high)])


def row_of_parts(found: list[Tensor], each: int, layout: Layout, scale: Any = None) -> Tensor:
    """Return the row of a tensor from what compiled code has found in its rows of ``each`` numbers."""
    sums, squares, lows, highs, zeros = (part.to(_WIDE) for part in found)
    one = torch.ones((), dtype=_WIDE, device=sums.device)
    factor = one if scale is None else one / torch.as_tensor(scale, device=sums.device)
    least, most = -one * math.inf, -one * math.inf
    if sums.numel():
        least, most = -lows.amin(), highs.amax()
    bad = ~(least.isfinite() & most.isfinite()) if sums.numel() else one * 0
    # Of a place with something else than numbers, the rest was not looked at.
    finite = [torch.where(end.isfinite(), end, -math.inf) for end in (least + 0 * most, most + 0 * least)]
    added = [one, one * sums.numel() * each, sums.sum() * factor, squares.sum() * factor**2, zeros.sum(), bad]
    added += [one * 0] * (len(layout.added) - len(added))
    return torch.stack([*(end.to(_WIDE) for end in added), *(end * factor for end in (least, most, *finite))])


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
