"""Turn any tensor into numbers that the statistics kernel reads.

The engine calls `readable` for what it gives to `stat_kernel`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hookline.observe.watch.cpu_stats import flat_view

__all__ = ["HALVES", "READ", "factor_of", "readable"]


def readable(tensor: Tensor) -> Tensor:
    """Return the numbers of any tensor as one contiguous tensor of a dtype that is read; copy only if needed."""
    dtype = tensor.dtype
    if dtype in READ and tensor.is_contiguous() and not tensor.is_neg():
        return tensor  # where it lies and how many there are is all that counts
    # A kernel knows the first address alone: `sum` gives an expanded gradient, all of whose numbers are one in memory.
    flat = flat_view(tensor.detach()).contiguous()
    if dtype in READ:
        return flat
    if dtype is torch.bool:
        return flat.view(torch.uint8)
    if dtype.is_complex:
        return flat.abs()
    return flat.float() if dtype.is_floating_point else flat.double()


def factor_of(scale: Any) -> float:
    """Return the factor that divides by ``scale``; 1 for a scale of zero, which has left nothing to see."""
    return 1.0 / float(scale) if float(scale) else 1.0


HALVES: Final = frozenset({torch.bfloat16, torch.float16})
READ: Final = frozenset(
    {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)
