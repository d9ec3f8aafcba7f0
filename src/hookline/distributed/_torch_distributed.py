"""Call what torch.distributed does not document, each with the versions it was checked on.

`ranks` and `shards` call it. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d


def default_store() -> Any:
    """Return the store that ``init_process_group`` made, or None where torch does not give it out.

    It is used when a rank did not come, to say who did. Without it an error cannot name the missing ranks.
    """
    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError):
        return None


def new_gloo_group(timeout: timedelta, store: Any, rank: int, size: int) -> Any:
    """Return a group of all ranks over gloo that only ranks which ask for hookline's connect to.

    ``torch.distributed.new_group`` numbers groups by the order of the calls. Ranks that ask for different groups at
    the same moment would be connected to each other, and gloo ends the process when sizes do not match.
    It is not among the groups that ``destroy_process_group`` takes down, and is freed when nobody refers to it.
    Where torch has no such constructor, fall back to ``new_group``, which has neither quality.
    """
    if store is None or not hasattr(dist, "ProcessGroupGloo"):
        return dist.new_group(backend="gloo", timeout=timeout)
    own: Any = distributed_c10d.PrefixStore("hookline", store)
    gloo = dist.ProcessGroupGloo(own, rank, size, timeout)
    group = dist.ProcessGroup(own, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def fsdp_dimensions(model: nn.Module) -> set[tuple[str | None, tuple[int, ...]]]:
    """Return the mesh dimensions over which FSDP2 shards or replicates: the name of each, and the ranks of its mesh.

    Without them, every mesh dimension counts as tensor parallel; whether ranks hold the same is then told by their
    numbers alone.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    found: set[tuple[str | None, tuple[int, ...]]] = set()
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return found
    for module in model.modules():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        try:
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            meshes = [group.mesh_info.mesh for group in groups if group is not None]
        except (AttributeError, AssertionError):
            continue
        for mesh in meshes:
            ranks = tuple(mesh.mesh.reshape(-1).tolist())
            found |= {(name, ranks) for name in mesh.mesh_dim_names or (None,)}
    return found
