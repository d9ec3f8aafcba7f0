"""Say how much of a tensor is left once its mean is taken away: less means that rounding is amplified by a norm.

`judge_errors` asks for the inputs of a module whose output is off by more than rounding.
"""

from __future__ import annotations

import math

import torch

from hookline.debug.compare.match_calls import ValuePair

__all__ = ["left_by_cancellation"]


def left_by_cancellation(pair: ValuePair) -> float:
    """Return the norm of A's tensor without its mean, over its norm: 1 for numbers around zero, near 0 with an offset.

    The mean is that of each row, as LayerNorm takes it, or of each channel, as BatchNorm does; the least counts.
    """
    if pair.a.read is None:
        return _left_by_fingerprint(pair)
    tensor = pair.a.read().detach()
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


def _left_by_fingerprint(pair: ValuePair) -> float:
    """Return the same by the mean of all numbers, which is all that a fingerprint has."""
    found = pair.a.fingerprint
    if found is None or not found.norm:
        return 1.0
    return math.sqrt(max(0.0, 1 - found.count * found.mean**2 / found.norm**2))
