"""Say which shard of a tensor this rank holds, so that replicas count once.

`RankStats` asks, for parameters, gradients and activations. Placements and meshes of `DTensor` tell; of plain
activations, the tensor-parallel group of the model tells which ranks may hold the same.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from hookline.distributed import _torch_distributed
from hookline.distributed.ranks import this_rank

_PLAIN: Final = (Tensor, nn.Parameter)


class Placed(NamedTuple):
    """How a distributed tensor lies on its mesh."""

    mesh: Any
    placements: tuple[Any, ...]

    @property
    def is_partial(self) -> bool:
        """Whether each rank holds a summand, not a part."""
        return any(each.is_partial() for each in self.placements)


def placed(tensor: Tensor, before: Placed | None = None) -> Placed | None:
    """Return how ``tensor`` lies on its mesh, None for a plain one; ``before`` itself if nothing has changed."""
    # A plain tensor is not asked for an attribute that it has not: that takes 1 µs, for each parameter at each step.
    placements: Any = None if type(tensor) in _PLAIN else getattr(tensor, "placements", None)
    if placements is None:
        return None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    if before is not None and before.placements == placements and before.mesh is mesh:
        return before
    return Placed(mesh, tuple(placements))


def arrived(tensor: Tensor) -> Tensor:
    """Return the result of a collective that is under way (`AsyncCollectiveTensor`), once it is there; else itself."""
    wait: Any = getattr(type(tensor), "trigger_wait", None)
    found: Tensor = tensor if wait is None else wait(tensor)
    return found


def parameter_shard(where: Placed) -> Hashable:
    """Return the shard of a parameter or its gradient; ranks outside of its mesh hold replicas."""
    return ("shard", _coordinates(where))


def activation_shard(where: Placed) -> Hashable:
    """Return the shard of an activation; ranks outside of its mesh have another part of the batch."""
    return ("shard", tuple(where.mesh.mesh.reshape(-1).tolist()), _coordinates(where))


def _coordinates(where: Placed) -> Hashable:
    own = where.mesh.get_coordinate()
    if own is None:  # this rank is not on the mesh, and holds nothing
        return "outside"
    sharded = [dim for dim, each in enumerate(where.placements) if not (each.is_replicate() or each.is_partial())]
    return tuple([(dim, where.mesh.size(dim), own[dim]) for dim in sharded])


def tensor_parallel_ranks(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that share this rank's batch: its group along the mesh dimensions that are not FSDP2's.

    Empty if no parameter of ``model`` lies on such a dimension.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return ()
    data = _torch_distributed.fsdp_dimensions(model)
    for parameter in model.parameters():
        where = placed(parameter)
        own = None if where is None else where.mesh.get_coordinate()
        if where is None or own is None:
            continue
        names = where.mesh.mesh_dim_names or (None,) * where.mesh.ndim
        along = [dim for dim, name in enumerate(names) if not _is_data(name, where, data)]
        if along:
            index = tuple([slice(None) if dim in along else own[dim] for dim in range(where.mesh.ndim)])
            ranks = tuple(sorted(where.mesh.mesh[index].reshape(-1).tolist()))
            if len(ranks) > 1 and this_rank() in ranks:
                return ranks
    return ()


def _is_data(name: str | None, where: Placed, data: set[tuple[str | None, tuple[int, ...]]]) -> bool:
    """Return whether FSDP2 shards or replicates over that dimension; a mesh without names is told by its ranks."""
    if name is not None:
        return any(name == each for each, _ in data)
    return any(tuple(where.mesh.mesh.reshape(-1).tolist()) == ranks for _, ranks in data)
