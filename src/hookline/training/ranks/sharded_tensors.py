"""Take sharded tensors apart and put them together again: each rank's part of a `DTensor`.

Checkpoints of several ranks call it. A model that is sharded by `fully_shard` has parameters, gradients and optimizer
states of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ResumeError

__all__ = ["is_sharded", "local_part", "place_again", "same_layout"]


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is laid out over ranks."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not laid out over ranks."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part.detach()


def same_layout(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of the layout, device and shape of another one."""
    return torch.empty_like(like.detach(), dtype=dtype)


def place_again(part: Tensor, shape: Sequence[int], known: Sequence[Any]) -> Tensor:
    """Return the sharded tensor of which `part` is this rank's, laid out like one of `known` that has its shape."""
    from torch.distributed.tensor import DTensor

    for like in known:
        if tuple(like.shape) == tuple(shape) and tuple(like.to_local().shape) == tuple(part.shape):
            return DTensor.from_local(
                part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
    raise ResumeError(
        f"A sharded tensor of shape {tuple(shape)} was saved, and the model has none of that shape and layout here. "
        "Next: shard the model as it was, or begin a run in another folder."
    )
