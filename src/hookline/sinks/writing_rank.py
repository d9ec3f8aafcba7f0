"""Say which process of a distributed run this is, and whether another one writes for it.

`FanOut` and `MetricOutput` ask. torch is not imported for it: a process that has not imported torch is in no group.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["has_ranks", "own_rank"]


def own_rank() -> int:
    """Return the rank of this process, as torch or ``torchrun`` says; 0 without either."""
    if has_ranks():
        return int(sys.modules["torch.distributed"].get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def has_ranks() -> bool:
    """Return whether this is one of several processes that can reach each other, so that one writes for all."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_in_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return bool(is_in_group and distributed.get_world_size() > 1)
