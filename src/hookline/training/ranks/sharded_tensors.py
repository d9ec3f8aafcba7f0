"""Take sharded tensors apart and put them together again: each rank's part of a `DTensor`.

Checkpoints of several ranks call it, also those of other trainers. A model that is sharded by `fully_shard` has
parameters, gradients and optimizer states of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hookline.errors import ResumeError
from hookline.training.hook_state import map_tensors

__all__ = ["is_sharded", "local_part", "local_parts", "map_dicts", "place_again", "place_parts", "same_layout"]

_LOCAL: Final = "\x1flocal"
"""The key of a part of a sharded tensor in the state of its rank."""


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


def local_parts(tree: Any) -> Any:
    """Return the same structure with this rank's part of each sharded tensor, and the shape of the whole."""
    return map_tensors(tree, lambda tensor: _packed(tensor) if is_sharded(tensor) else tensor)


def place_parts(tree: Any, like: Iterable[Tensor]) -> Any:
    """Return what ``local_parts`` was given, with sharded tensors laid out as those of ``like``."""
    sharded = [tensor for tensor in like if is_sharded(tensor)]
    return map_dicts(tree, lambda one: place_again(one[_LOCAL], one["shape"], sharded) if _LOCAL in one else None)


def _packed(tensor: Tensor) -> dict[str, Any]:
    return {_LOCAL: local_part(tensor), "shape": list(tensor.shape)}


def map_dicts(value: Any, change: Callable[[dict[Any, Any]], Any]) -> Any:
    """Return the same structure with what `change` makes of a dictionary in its place; None leaves it."""
    if type(value) is dict:
        changed = change(value)
        return {key: map_dicts(item, change) for key, item in value.items()} if changed is None else changed
    if type(value) in (list, tuple):
        return type(value)(map_dicts(item, change) for item in value)
    return value
