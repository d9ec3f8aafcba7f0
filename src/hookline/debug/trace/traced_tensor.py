"""Say what kind of tensor passes a site: how it lies on a mesh, or why its numbers cannot be read.

`TraceRecorder` calls this for tensors that are not plain ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.debug.trace.trace_record import MeshPlacement
from hookline.distributed.shards import placed

__all__ = ["in_words", "mesh_placement", "unreadable"]


def in_words(site: str, kind: str, leaf: str) -> str:
    """Return what passes a site as messages name it."""
    return f"{site or '(model)'} {kind}{f' {leaf}' if leaf else ''}"


def unreadable(tensor: Tensor) -> str:
    """Return what a tensor is that no fingerprint can be made of."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.device.type == "meta":
        return "a tensor without memory, on the meta device,"
    return "a tensor without numbers that can be read"


def mesh_placement(tensor: Any) -> MeshPlacement | None:
    """Return how a distributed tensor lies on its mesh; None if it is none."""
    where = placed(tensor)
    if where is None:
        return None
    mesh, own = where.mesh, where.mesh.get_coordinate()
    return MeshPlacement(
        placements=tuple(_placement_words(each) for each in where.placements),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        mesh_shape=tuple(mesh.mesh.shape),
        coordinate=tuple(own or ()),
        full_shape=tuple(tensor.shape),
    )


def _placement_words(placement: Any) -> str:
    """Return a placement in the words of the format, the same in all versions of torch; of an unknown one, its own."""
    factor = getattr(placement, "split_factor", None)  # FSDP2 over tensor parallelism; no shard by is_shard()
    if factor is not None:
        return f"StridedShard({placement.dim}, {factor})"
    if placement.is_shard():
        return f"Shard({placement.dim})"
    if placement.is_replicate():
        return "Replicate()"
    return f"Partial({placement.reduce_op})" if type(placement).__name__ == "Partial" else repr(placement)
