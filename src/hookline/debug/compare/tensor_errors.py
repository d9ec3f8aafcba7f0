"""Measure how far two tensors are apart, block by block, without copies of whole tensors.

`compare_values` calls `tensor_errors` for every pair, and `first_difference` for those that are worth a place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

__all__ = ["TensorErrors", "exceeds_tolerance", "first_difference", "tensor_errors"]

_BLOCK: Final = 1 << 17
"""Entries at a time: two blocks and their difference are 1.5 MB in float32, near the cache of a core (3.3 GB/s; with
blocks of a quarter of that, 2.0 GB/s, since the time goes into calls)."""
_SAFE_NARROW: Final = 1e-25
"""Sums of squares below this are computed again in float64: in float32, squares of less than 1e-38 are zero."""
_SAFE_WIDE: Final = 1e-280
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorErrors:
    """How far tensor ``b`` is from tensor ``a``, which is the reference."""

    count: int
    """How many entries were compared."""
    max_abs: float = 0.0
    mean_abs: float = 0.0
    rel_l2: float = 0.0
    """The norm of the difference over the norm of ``a``."""
    rel_diff: float = 0.0
    """One minus 2·Σab / Σ(a²+b²): 0 for equal tensors, 1 for orthogonal ones, 2 for opposite ones."""
    norm_a: float = 0.0
    norm_b: float = 0.0
    bad_a: int = 0
    """How many entries of ``a`` are NaN or infinite."""
    bad_b: int = 0
    mismatched: int = 0
    """How many entries are NaN or infinite in one tensor, and something else in the other."""
    is_equal: bool = False
    """Whether the two are the same to the last bit."""
    is_estimate: bool = False
    """Whether the figures come from fingerprints, not from the tensors."""
    is_blind: bool = False
    """Whether fingerprints cannot say if it is the same: NaN or infinity is in both, and the hashes differ."""
    part_rel: float = 0.0
    """The largest relative error of one row or channel; 0 where it was not measured."""
    part_abs: float = 0.0
    """The largest norm of the difference in one row or channel."""

    @property
    def rms_a(self) -> float:
        """The root of the mean square of ``a``."""
        return self.norm_a / math.sqrt(self.count) if self.count else 0.0


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


def tensor_errors(a: Tensor, b: Tensor) -> TensorErrors:
    """Return the errors of ``b`` against ``a``, which has the same shape.

    Recipe: ``tensor_errors(reference, other).rel_l2``.

    Entries that are NaN in both, or the same infinity in both, count as equal.
    """
    flat_a, flat_b = _flat(a), _flat(b)
    count = flat_a.numel()
    if _is_same_bits(flat_a, flat_b):
        return _equal(flat_a, count)
    if not any(one.is_floating_point() for one in (flat_a, flat_b)):
        return _from_sums(_whole_sums(flat_a, flat_b), count)
    sums = _Sums()
    for x, y in _blocks(flat_a, flat_b):
        _add_block(sums, x, y)
    if sums.max_abs and not all(_SAFE_WIDE < one < math.inf for one in (sums.square_d, sums.square_a)):
        return _scaled_errors(flat_a, flat_b, count)
    return _from_sums(sums, count)


def _scaled_errors(a: Tensor, b: Tensor, count: int) -> TensorErrors:
    """Return the errors of numbers whose squares not even float64 can hold: those of the numbers over the largest."""
    a, b = a.double(), b.double().to(a.device)
    finite = torch.cat([a[torch.isfinite(a)], b[torch.isfinite(b)]])
    size = float(finite.abs().max())
    sums = _Sums()
    for x, y in _blocks(a / size, b / size):
        _add_block(sums, x, y)
    found = _from_sums(sums, count)
    absolute = ("max_abs", "mean_abs", "norm_a", "norm_b")
    return replace(found, **{name: getattr(found, name) * size for name in absolute})


def _whole_sums(a: Tensor, b: Tensor) -> _Sums:
    """Return the sums of whole numbers, whose differences are exact: beyond 2^53 float64 does not hold the numbers."""
    sums = _Sums()
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b.to(a.device), _BLOCK), strict=True):
        wide_x, wide_y = x.double(), y.double()
        rough = (wide_x - wide_y).abs()
        exact = (x.to(torch.int64) - y.to(torch.int64)).double().abs()
        difference = torch.where(rough < 2.0**60, exact, rough)  # int64 holds no larger ones
        sums.square_d += float(difference.square().sum())
        sums.square_a += float(wide_x.square().sum())
        sums.square_b += float(wide_y.square().sum())
        sums.abs_sum += float(difference.sum())
        sums.max_abs = max(sums.max_abs, float(difference.max()) if difference.numel() else 0.0)
    return sums


def _from_sums(sums: _Sums, count: int) -> TensorErrors:
    both = sums.square_a + sums.square_b
    rel_l2 = math.sqrt(sums.square_d / sums.square_a) if sums.square_a else (math.inf if sums.square_d else 0.0)
    # By algebra 1 - 2Σab/Σ(a²+b²) = Σ(a-b)²/Σ(a²+b²), which does not cancel where the two are close.
    rel_diff = sums.square_d / both if both else 0.0
    mean_abs = sums.abs_sum / count if count else 0.0
    if sums.mismatched:
        return TensorErrors(
            count, math.inf, math.inf, math.inf, math.inf, math.sqrt(sums.square_a), math.sqrt(sums.square_b),
            sums.bad_a, sums.bad_b, sums.mismatched,
        )  # fmt: skip
    return TensorErrors(
        count, sums.max_abs, mean_abs, rel_l2, rel_diff, math.sqrt(sums.square_a), math.sqrt(sums.square_b),
        sums.bad_a, sums.bad_b, 0,
    )  # fmt: skip


def _equal(flat: Tensor, count: int) -> TensorErrors:
    sums = _Sums()
    for x, _ in _blocks(flat, flat):
        square = float(torch.dot(x, x))
        if math.isfinite(square):
            sums.square_a += square
        else:
            wide = x.double()
            good = torch.isfinite(wide)
            sums.square_a += float(wide[good].square().sum())
            sums.bad_a += count_bad(good)
    norm = math.sqrt(sums.square_a)
    return TensorErrors(count, norm_a=norm, norm_b=norm, bad_a=sums.bad_a, bad_b=sums.bad_a, is_equal=True)


def count_bad(good: Tensor) -> int:
    """Return how many entries of a mask are not set."""
    return good.numel() - int(good.sum())


def _add_block(sums: _Sums, x: Tensor, y: Tensor) -> None:
    difference = x - y
    square_d, square_a, square_b = (float(torch.dot(one, one)) for one in (difference, x, y))
    is_lost = not math.isfinite(square_d + square_a + square_b)
    if is_lost or (min(square_d, square_a) < _SAFE_NARROW and not torch.equal(x, y)):
        _add_bad_block(sums, x, y)
        return
    sums.square_d += square_d
    sums.square_a += square_a
    sums.square_b += square_b
    # In place, then sum and largest: together a third of the time that vector_norm takes for the two.
    difference.abs_()
    sums.abs_sum += float(difference.sum())
    sums.max_abs = max(sums.max_abs, float(difference.amax()))


def _add_bad_block(sums: _Sums, x: Tensor, y: Tensor) -> None:
    """Add a block with entries that are not finite, or whose squares float32 cannot hold."""
    x, y = x.double(), y.double()
    good_x, good_y = torch.isfinite(x), torch.isfinite(y)
    both = good_x & good_y
    alike = (~good_x & ~good_y) & ((x == y) | (torch.isnan(x) & torch.isnan(y)))
    sums.bad_a += count_bad(good_x)
    sums.bad_b += count_bad(good_y)
    sums.mismatched += count_bad(both | alike)
    x, y = x[both], y[both]
    difference = (x - y).abs()
    sums.square_d += float(difference.square().sum())
    sums.square_a += float(x.square().sum())
    sums.square_b += float(y.square().sum())
    sums.abs_sum += float(difference.sum())
    sums.max_abs = max(sums.max_abs, float(difference.max()) if difference.numel() else 0.0)


def exceeds_tolerance(a: Tensor, b: Tensor, atol: float, rtol: float) -> bool:
    """Return whether some entry of ``b`` is further from ``a`` than ``atol + rtol * |a|``."""
    blocks = _blocks(_flat(a), _flat(b))
    return any(not torch.allclose(y, x, rtol=rtol, atol=atol, equal_nan=True) for x, y in blocks)


def first_difference(a: Tensor, b: Tensor, limit: float) -> tuple[int, ...] | None:
    """Return the index of the first entry that differs by more than ``limit``; None if there is none."""
    start = 0
    for x, y in _blocks(_flat(a), _flat(b)):
        differs = ~((x - y).abs() <= limit) & ~((x == y) | (torch.isnan(x) & torch.isnan(y)))
        found = differs.nonzero()
        if found.numel():
            return _unravel(start + int(found[0]), tuple(a.shape))
        start += x.numel()
    return None


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


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
    """Yield pairs of blocks in one dtype: float32, or float64 for anything that float32 cannot hold."""
    narrow = all(one.is_floating_point() and one.element_size() <= 4 for one in (a, b))
    dtype = torch.float32 if narrow else torch.float64
    same = a is b
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True):
        first = x.to(dtype)
        yield first, first if same else y.to(device=x.device, dtype=dtype)
