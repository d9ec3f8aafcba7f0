"""Measure how far the values of pairs are apart: from tensors, block by block in float64, or from fingerprints.

`compare` calls `measure`; `judge` asks for the first difference of a pair, and for what cancellation leaves of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hookline.debug.compare.key import BACKWARD, Fingerprint, Pair, TensorErrors, Value
from hookline.errors import TraceError

_BLOCK: Final = 1 << 17
"""Entries at a time: two blocks and their difference are 3 MB in float64, near the cache of a core."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MEAN_OF_NORMAL: Final = math.sqrt(2 / math.pi)
"""The mean of |x| of normal numbers whose mean square is one."""


def measure(pairs: Sequence[Pair], problems: list[str]) -> None:
    """Set the errors of each pair that has both values, or why it cannot be compared.

    Tensors that cannot be read are told in ``problems``; their fingerprints are compared.
    """
    lost = []
    for pair in pairs:
        if pair.a is None or pair.b is None or pair.why:
            continue
        try:
            if pair.has_tensors:
                _measure_tensors(pair, pair.a.tensor(), pair.b.tensor())
                continue
            why = _why_unreadable(pair)
        except TraceError as error:
            why = str(error)
            lost.append(why)
            pair.a, pair.b = replace(pair.a, read=None), replace(pair.b, read=None)
        if pair.a.fingerprint is None or pair.b.fingerprint is None:
            pair.why, pair.is_same = why, False
        else:
            is_same_dtype = pair.a.dtype == pair.b.dtype
            pair.errors = sketch_errors(pair.a.fingerprint, pair.b.fingerprint, same_dtype=is_same_dtype)
    if lost:
        problems.append(f"{len(lost)} tensors cannot be read; their fingerprints are compared. The first: {lost[0]}")


def _measure_tensors(pair: Pair, a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype and a.is_floating_point() and b.is_floating_point():
        a, b = _with_infinities(a), _with_infinities(b)
    errors = tensor_errors(a, b)
    pair.errors = errors if pair.kind in BACKWARD else _with_part_errors(errors, a, b)


def _with_infinities(tensor: Tensor) -> Tensor:
    """Return the tensor with infinities for the ends of its dtype: masks are filled with these.

    Not of 8-bit dtypes: their numbers are cut off at the ends, so that these are ordinary values.
    """
    if tensor.element_size() == 1:
        return tensor
    ends = torch.finfo(tensor.dtype)
    wide = tensor.masked_fill(tensor == ends.min, -math.inf)
    return wide.masked_fill_(tensor == ends.max, math.inf)


def _why_unreadable(pair: Pair) -> str:
    if pair.how:
        return f"{pair.how}, and for that its tensors have to be in both traces: trace with tensors="
    return "one run has only its fingerprint, the other only its tensor: trace both with tensors="


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    max_abs: float = 0.0
    abs_sum: float = 0.0
    square_d: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0
    bad_a: int = 0
    bad_b: int = 0
    mismatched: int = 0

    def add(self, x: Tensor, y: Tensor, difference: Tensor) -> None:
        """Add a block of numbers; what is not finite in it is counted, and left out of the sums."""
        squares = [float(torch.dot(one, one)) for one in (difference, x, y)]
        if not math.isfinite(sum(squares)):
            x, y, difference = _finite_part(self, x, y, difference)
            squares = [float(torch.dot(one, one)) for one in (difference, x, y)]
        self.square_d += squares[0]
        self.square_a += squares[1]
        self.square_b += squares[2]
        size = difference.abs_()
        self.abs_sum += float(size.sum())
        self.max_abs = max(self.max_abs, float(size.amax()) if size.numel() else 0.0)


def tensor_errors(a: Tensor, b: Tensor) -> TensorErrors:
    """Return the errors of ``b`` against ``a``, which has the same shape.

    Recipe: ``tensor_errors(reference, other).rel_l2``.

    Entries that are NaN in both, or the same infinity in both, count as equal.
    """
    flat_a, flat_b = _flat(a), _flat(b)
    is_equal = _is_same_bits(flat_a, flat_b)
    scale, sums = _scale(flat_a, flat_b), _Sums()
    for block_a, block_b in _blocks(flat_a, flat_b):
        x, y = (one.double() if scale == 1.0 else one.double() / scale for one in (block_a, block_b))
        sums.add(x, y, _difference(block_a, block_b, x, y))
    return _errors_of(sums, scale, flat_a.numel(), is_equal=is_equal)


def _scale(a: Tensor, b: Tensor) -> float:
    """Return what numbers are divided by: 1, or a power of two near the largest if float64 cannot hold its square."""
    if torch.float64 not in (a.dtype, b.dtype) or not a.numel():
        return 1.0
    size = max(float(torch.nan_to_num(one.double(), 0.0, 0.0, 0.0).abs().max()) for one in (a, b))
    return 1.0 if 1e-100 < size < 1e100 or not size else 2.0 ** (math.frexp(size)[1] - 1)


def _difference(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the difference of ``x`` and ``y``; of whole numbers an exact one, as float64 ends at 2^53 for them."""
    if a.is_floating_point() or b.is_floating_point():
        return x - y
    exact = (a.to(torch.int64) - b.to(torch.int64)).double()
    return torch.where((x - y).abs() < 2.0**60, exact, x - y)  # int64 holds no larger ones


def _finite_part(sums: _Sums, x: Tensor, y: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count what is not finite, and return the rest."""
    good_x, good_y = torch.isfinite(x), torch.isfinite(y)
    both = good_x & good_y
    alike = (~good_x & ~good_y) & ((x == y) | (torch.isnan(x) & torch.isnan(y)))
    sums.bad_a += int((~good_x).sum())
    sums.bad_b += int((~good_y).sum())
    sums.mismatched += int((~(both | alike)).sum())
    return x[both], y[both], difference[both]


def _errors_of(sums: _Sums, scale: float, count: int, *, is_equal: bool) -> TensorErrors:
    norm_a, norm_b = math.sqrt(sums.square_a) * scale, math.sqrt(sums.square_b) * scale
    both = sums.square_a + sums.square_b
    rel_l2 = math.sqrt(sums.square_d / sums.square_a) if sums.square_a else (math.inf if sums.square_d else 0.0)
    found = TensorErrors(
        count,
        max_abs=sums.max_abs * scale,
        mean_abs=sums.abs_sum * scale / count if count else 0.0,
        rel_l2=rel_l2,
        # By algebra 1 - 2Σab/Σ(a²+b²) = Σ(a-b)²/Σ(a²+b²), which does not cancel where the two are close.
        rel_diff=sums.square_d / both if both else 0.0,
        norm_a=norm_a,
        norm_b=norm_b,
        bad_a=sums.bad_a,
        bad_b=sums.bad_b,
        mismatched=sums.mismatched,
        is_equal=is_equal,
    )
    if not sums.mismatched:
        return found
    return replace(found, max_abs=math.inf, mean_abs=math.inf, rel_l2=math.inf, rel_diff=math.inf)


def exceeds_tolerance(a: Tensor, b: Tensor, atol: float, rtol: float) -> bool:
    """Return whether some entry of ``b`` is further from ``a`` than ``atol + rtol * |a|``."""
    blocks = _blocks(_flat(a), _flat(b))
    return any(not torch.allclose(y.double(), x.double(), rtol=rtol, atol=atol, equal_nan=True) for x, y in blocks)


def first_difference(a: Tensor, b: Tensor, limit: float) -> tuple[int, ...] | None:
    """Return the index of the first entry that differs by more than ``limit``; None if there is none."""
    start = 0
    for block_a, block_b in _blocks(_flat(a), _flat(b)):
        x, y = block_a.double(), block_b.double()
        differs = ~((x - y).abs() <= limit) & ~((x == y) | (torch.isnan(x) & torch.isnan(y)))
        found = differs.nonzero()
        if found.numel():
            return tuple(map(int, np.unravel_index(start + int(found[0]), tuple(a.shape))))
        start += x.numel()
    return None


def _flat(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.reshape(-1)


def _is_same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two flat tensors of one dtype are the same to the bit; ``torch.equal`` stops at a difference."""
    if a.dtype != b.dtype or a.device != b.device:
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of blocks, on the device of ``a``."""
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True):
        yield x, y.to(x.device)


# -- one row, one channel ------------------------------------------------------------------------------------------


def _with_part_errors(errors: TensorErrors, a: Tensor, b: Tensor) -> TensorErrors:
    """Return ``errors`` with the largest error of a row (all but the last dimension) and of a channel (the last).

    In the norm of a large tensor both are lost. Each is the norm of the difference over the norm of that row of ``a``,
    or over that of the typical row where this is more: rows that are nearly zero keep nothing but rounding. The typical
    row is the median of those that are not zero, so that one outlier does not hide the others.
    """
    is_measured = not errors.is_equal and not errors.mismatched and a.dim() >= 2 and a.numel() > 0
    if not is_measured or not (a.is_floating_point() and b.is_floating_point()):
        return errors
    found = [_largest_part(*norms) for norms in _part_norms(a, b, is_finite=not errors.bad_a + errors.bad_b)]
    return replace(errors, part_rel=max(rel for rel, _ in found), part_abs=max(size for _, size in found))


def _part_norms(a: Tensor, b: Tensor, *, is_finite: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the norms of the rows of the difference and of ``a``, then those of the channels."""
    width = a.shape[-1]
    dtype = torch.float32 if max(a.element_size(), b.element_size()) <= 4 else torch.float64
    count = max(1, _BLOCK // width)
    rows: tuple[list[Tensor], list[Tensor]] = [], []
    channels = torch.zeros(2, width, dtype=torch.float64, device=a.device)
    blocks = (torch.split(one.detach().reshape(-1, width), count) for one in (a, b))
    for x, y in zip(*blocks, strict=True):
        x = x.to(dtype)
        difference = x - y.to(device=x.device, dtype=dtype)
        if not is_finite:
            good = torch.isfinite(difference)
            difference, x = (torch.where(good, one, 0.0) for one in (difference, x))
        for place, one in enumerate((difference, x)):
            squares = one.square()
            rows[place].append(squares.sum(1).sqrt_())
            channels[place] += squares.sum(0)
    return [(torch.cat(rows[0]), torch.cat(rows[1])), (channels[0].sqrt(), channels[1].sqrt())]


def _largest_part(difference: Tensor, size: Tensor) -> tuple[float, float]:
    """Return the largest relative error of a part, and the largest absolute one."""
    there = size[size > 0]
    largest = float(difference.max())
    if not there.numel():
        return 0.0, largest
    return float((difference / size.clamp(min=float(there.median()))).max()), largest


def left_by_cancellation(value: Value) -> float:
    """Return the norm of a tensor without its mean, over its norm: 1 for numbers around zero, near 0 with an offset.

    Where it is less, a norm amplifies rounding. The mean is that of each row, as LayerNorm takes it, or of each
    channel, as BatchNorm does; the least counts. A fingerprint has only the mean of all numbers.
    """
    if value.read is None:
        found = value.fingerprint
        if found is None or not found.norm:
            return 1.0
        return math.sqrt(max(0.0, 1 - found.count * found.mean**2 / found.norm**2))
    tensor = value.read().detach()
    if not tensor.is_floating_point() or tensor.dim() == 0 or not tensor.numel():
        return 1.0
    wide = torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)
    norm = float(wide.norm())
    if not norm:
        return 1.0
    ways: list[tuple[int, ...]] = [(tensor.dim() - 1,)]
    if tensor.dim() >= 2:
        ways.append(tuple(dim for dim in range(tensor.dim()) if dim != 1))
    return min(float((wide - wide.mean(dim, keepdim=True)).norm()) for dim in ways) / norm


# -- fingerprints --------------------------------------------------------------------------------------------------


def sketch_errors(a: Fingerprint, b: Fingerprint, *, same_dtype: bool) -> TensorErrors:
    """Return estimates: the norm of the difference from sketches; ``max_abs`` is no more than a lower bound.

    Hashes are of bits, and so can be compared if both have the ``same_dtype``.
    """
    mismatched = abs(a.nan - b.nan) + abs(a.inf - b.inf)
    if same_dtype and a.hash == b.hash and not mismatched:
        bad = a.nan + a.inf
        return TensorErrors(
            a.count, norm_a=a.norm, norm_b=b.norm, bad_a=bad, bad_b=bad, is_equal=True, is_estimate=True
        )
    distance = a.distance(b)
    is_unknown = math.isnan(distance)  # sums were too large for a sketch: norms alone say that something differs
    if is_unknown:
        distance = math.hypot(a.norm - b.norm, (a.mean - b.mean) * math.sqrt(a.count))
    squares = a.norm**2 + b.norm**2
    scale = distance / math.sqrt(a.count) if a.count else 0.0
    found = TensorErrors(
        a.count,
        max_abs=max(abs(a.absmax - b.absmax), scale),
        mean_abs=_MEAN_OF_NORMAL * scale,
        rel_l2=distance / a.norm if a.norm else (math.inf if distance else 0.0),
        rel_diff=distance**2 / squares if squares else 0.0,
        norm_a=a.norm,
        norm_b=b.norm,
        bad_a=a.nan + a.inf,
        bad_b=b.nan + b.inf,
        mismatched=mismatched,
        is_estimate=True,
        is_blind=is_unknown or (same_dtype and a.nan + a.inf > 0),
    )
    return found
