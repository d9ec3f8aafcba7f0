"""Say which rank of a distributed run this is, and gather objects of all ranks.

Everything that differs by rank asks here. The variables of ``torchrun`` and the process group of torch tell; there is
nothing to configure. `channels` does the communication.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from hookline.distributed import _torch_distributed
from hookline.distributed.channels import ConnectionsInUse, connections
from hookline.errors import RankError

__all__ = ["first_of_ranks", "gather_objects", "is_distributed", "rank_count", "this_rank"]


def this_rank() -> int:
    """Return the rank of this process; before ``init_process_group`` as ``torchrun`` says it, and 0 without either."""
    kept = ConnectionsInUse.kept
    if kept is not None:
        return kept.rank
    return dist.get_rank() if has_group() else _from_environment("RANK", 0)


def rank_count() -> int:
    """Return the number of ranks; before ``init_process_group`` as ``torchrun`` says it, and 1 without either."""
    kept = ConnectionsInUse.kept
    if kept is not None:
        return kept.size
    return dist.get_world_size() if has_group() else _from_environment("WORLD_SIZE", 1)


def is_distributed() -> bool:
    """Return whether ranks can exchange something: there is a process group, and more than one rank in it."""
    return ConnectionsInUse.kept is not None or (has_group() and dist.get_world_size() > 1)


def gather_objects(value: Any, *, what: str) -> list[Any]:
    """Return the ``value`` of every rank, in the order of the ranks, on every rank; all ranks have to call it.

    Recipe: ``gather_objects(sorted(names), what="names of hooks")``.

    Args:
        value: Anything that can be pickled.
        what: A few words for errors: what this rank is doing. Ranks that meet with different words raise `RankError`.
    """
    if not is_distributed():
        return [value]
    found = connections().gather((what, value), what)
    doing = [each for each, _ in found]
    if len(set(doing)) > 1:
        others = tuple(rank for rank, each in enumerate(doing) if each != doing[0])
        raise RankError(
            f"Ranks are at different places: {in_words(doing)}. Every rank has to make the same calls in the same "
            f"order; look for a call that only some ranks make.",
            ranks=others,
        )
    return [each for _, each in found]


def first_of_ranks(key: str, value: str) -> str:
    """Return the ``value`` of the rank that asked first for ``key``; no rank waits for another, and none has to ask.

    Recipe: ``folder = first_of_ranks("folder of my log", datetime.now().strftime("%H%M%S"))``.
    Without a process group, or where its store has gone, it is this rank's own.
    """
    store = _torch_distributed.default_store() if has_group() else None
    if store is None or not value:
        return value
    try:
        return bytes(store.compare_set(f"hookline/first/{key}", "", value)).decode() or value
    except (RuntimeError, OSError, NotImplementedError, TypeError):  # the rank that holds it is gone, or a fake store
        return value


def in_words(by_rank: list[Any]) -> str:
    """Return "rank 0: a; ranks 1, 2: b" for one value per rank."""
    same: dict[str, list[int]] = {}
    for rank, value in enumerate(by_rank):
        same.setdefault(str(value), []).append(rank)
    return "; ".join(f"{rank_names(ranks)}: {value}" for value, ranks in same.items())


def rank_names(ranks: list[int] | tuple[int, ...]) -> str:
    """Return "rank 1" or "ranks 1, 2"; of more than eight, the first eight and how many more."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def has_group() -> bool:
    """Return whether ``init_process_group`` has been called, and the group not been destroyed since."""
    return dist.is_available() and dist.is_initialized()


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
