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
from hookline.lifecycle.states import map_tensors

__all__ = [
    "is_sharded",
    "local_parts",
    "map_dicts",
    "place_parts",
    "same_layout",
    "spread",
]

_LOCAL: Final = "\x1flocal"
"""The key of a part of a sharded tensor in the state of its rank."""
_Missing: Final = object()
"""Stands for a part that cannot be placed."""


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is laid out over ranks."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not laid out over ranks."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part.detach()


def same_layout(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of the layout, device and shape of another one."""
    return torch.empty_like(like.detach(), dtype=dtype)


def _place_again(part: Tensor, shape: Sequence[int], known: Sequence[Any]) -> Tensor:
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


def place_parts(tree: Any, like: Iterable[Tensor], *, same_ranks: bool = True) -> Any:
    """Return what ``local_parts`` was given, with sharded tensors laid out as those of ``like``.

    Parts of another number of ranks make no tensor, and None is in their place; the one part of a single process is
    the whole, of which every rank takes its part.
    """
    sharded = [tensor for tensor in like if is_sharded(tensor)]

    def place(one: dict[Any, Any]) -> Any:
        if _LOCAL not in one:
            return None
        part, shape = one[_LOCAL], one["shape"]
        if tuple(part.shape) == tuple(shape):
            return spread(part, next((tensor for tensor in sharded if tuple(tensor.shape) == tuple(shape)), part))
        return _place_again(part, shape, sharded) if same_ranks else _Missing

    return map_dicts(tree, place)


def spread(whole: Tensor, like: Any) -> Tensor:
    """Return a whole tensor laid out like another one of its shape; itself if that is not sharded, or this is."""
    if not is_sharded(like) or is_sharded(whole) or tuple(whole.shape) != tuple(like.shape):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole, so nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _packed(tensor: Tensor) -> dict[str, Any]:
    return {_LOCAL: _local_part(tensor), "shape": list(tensor.shape)}


def map_dicts(value: Any, change: Callable[[dict[Any, Any]], Any]) -> Any:
    """Return the same structure with what `change` makes of a dictionary in its place; None leaves it as it is."""
    if type(value) is dict:
        changed = change(value)
        if changed is _Missing:
            return None
        return {key: map_dicts(item, change) for key, item in value.items()} if changed is None else changed
    if type(value) in (list, tuple):
        return type(value)(map_dicts(item, change) for item in value)
    return value
