"""Call what torch.distributed does not document, each with the versions it was checked on.

`channels` alone calls it. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["default_store", "new_gloo_group"]


def default_store() -> Any:
    """Return the store that ``init_process_group`` made, or None where torch does not give it out.

    It is used when a rank did not come, to say who did. Without it an error cannot name the missing ranks.
    """
    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError):
        return None


def new_gloo_group(name: str, timeout: timedelta) -> Any:
    """Return a group of all ranks over gloo that only ranks which ask for the same ``name`` connect to.

    ``torch.distributed.new_group`` numbers groups by the order of the calls. Ranks that ask for different groups at
    the same moment would be connected to each other, and gloo ends the process when sizes do not match.
    Where torch has no such constructor, fall back to ``new_group``.
    """
    store = default_store()
    if store is None or not hasattr(dist, "ProcessGroupGloo"):
        return dist.new_group(backend="gloo", timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    own: Any = distributed_c10d.PrefixStore(f"hookline/{name}", store)
    gloo = dist.ProcessGroupGloo(own, rank, size, timeout)
    group = dist.ProcessGroup(own, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
