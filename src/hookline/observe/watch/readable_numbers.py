"""Turn any tensor into numbers that can be read: those of this rank, of a dtype that the statistics kernel knows.

The engine calls `numbers_of` for every tensor, and `readable` for what it gives to `stat_kernel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.distributed.shards import arrived, placed
from hookline.observe.watch.cpu_stats import flat_view
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.observe.watch.stats_engine import WatchedPlace

__all__ = ["HALVES", "READ", "factor_of", "numbers_of", "readable"]

_PLAIN: Final = (Tensor, torch.nn.Parameter)
_PARTIAL: Final = (
    "its DTensor is Partial: each rank has a summand, whose statistics mean nothing. Redistribute it to Replicate() or "
    "Shard(), or watch what comes after the reduction"
)


def numbers_of(tensor: Tensor, place: WatchedPlace) -> Tensor | None:
    """Return this rank's part of ``tensor``, or the values of a sparse or nested one; None if it has no numbers.

    Note at ``place`` how a distributed one lies on its mesh.
    """
    if tensor.is_nested:
        tensor = tensor.values()
    if type(tensor) not in _PLAIN:
        tensor = arrived(tensor)
        place.placed = placed(tensor, place.placed)
        if place.placed is not None and place.placed.is_partial and place.kind != "param_grad_local":
            place.silent = _PARTIAL
            return None
    local: Tensor | None = _torch.local_tensor(tensor)
    if local is not None and type(local) not in _PLAIN:
        local = arrived(local)
    if local is None or local.device.type == "meta" or _torch.is_wrapped(local):
        return None
    if local.layout is torch.strided:
        return local.dequantize() if local.is_quantized else local
    values: Tensor = (local.coalesce() if local.layout is torch.sparse_coo else local).values()
    return values


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
    return 1.0 if scale is None or not float(scale) else 1.0 / float(scale)


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
