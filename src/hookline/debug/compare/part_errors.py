"""Measure the largest error of one row, and of one channel: in the norm of a large tensor both are lost.

`compare_values` calls `add_part_errors` for values of the forward; `judge_errors` looks at what it finds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hookline.debug.compare.tensor_errors import TensorErrors

__all__ = ["add_part_errors"]

_BLOCK: Final = 1 << 17
"""Entries at a time, as many as `tensor_errors` takes."""


def add_part_errors(errors: TensorErrors, a: Tensor, b: Tensor) -> TensorErrors:
    """Return ``errors`` with the largest error of a row (all but the last dimension) and of a channel (the last).

    Each is the norm of the difference over the norm of that row of ``a``, or over that of the typical row where this
    is more: rows that are nearly zero keep nothing but rounding. The typical row is the median of those that are not
    zero, so that one outlier does not hide the others.
    """
    is_measured = not errors.is_equal and not errors.mismatched and a.dim() >= 2 and a.numel() > 0
    if not is_measured or not (a.is_floating_point() and b.is_floating_point()):
        return errors
    found = [_largest(*norms) for norms in _part_norms(a, b, is_finite=not errors.bad_a + errors.bad_b)]
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


def _largest(difference: Tensor, size: Tensor) -> tuple[float, float]:
    """Return the largest relative error of a part, and the largest absolute one."""
    there = size[size > 0]
    largest = float(difference.max())
    if not there.numel():
        return 0.0, largest
    return float((difference / size.clamp(min=float(there.median()))).max()), largest
