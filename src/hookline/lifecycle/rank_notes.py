"""Leave a note for the other ranks when this one ends, and read why others ended.

`RankSync` calls it when a run ends by an error that not all ranks know of. Notes are keys of the store
that all ranks connect to; nothing is written while a run goes well, and nobody waits for a rank that may be gone.
"""

from __future__ import annotations

import re
import time
from typing import Any, Final

from hookline.distributed._torch_distributed import default_store
from hookline.distributed.ranks import rank_count, this_rank

__all__ = ["is_lost_connection", "leave_note", "read_notes"]

_WAIT: Final = 3.0
"""Seconds for which the notes of other ranks are waited for; ranks that lose one of them end within milliseconds."""
_LOST: Final = re.compile(r"gloo|nccl|connection|process ?group|socket|peer|pipe|timed? ?out", re.IGNORECASE)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error says that another rank could not be reached."""
    return isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None


def leave_note(text: str) -> None:
    """Tell the other ranks why this one ends; without a store, nobody is told."""
    store: Any = default_store()
    if store is not None:
        try:
            store.set(_key(this_rank()), text[:1000])
        except (RuntimeError, OSError):  # the process that holds the store is gone
            return


def read_notes() -> tuple[dict[int, str], list[int]]:
    """Return the notes of other ranks that ended, and the ranks that left none: killed, or still waiting."""
    store: Any = default_store()
    waiting = [rank for rank in range(rank_count()) if rank != this_rank()]
    found: dict[int, str] = {}
    deadline = time.monotonic() + _WAIT
    while store is not None and waiting and time.monotonic() < deadline:
        try:
            for rank in [one for one in waiting if store.check([_key(one)])]:
                found[rank] = store.get(_key(rank)).decode(errors="replace")
                waiting.remove(rank)
        except (RuntimeError, OSError):
            break
        if waiting:
            time.sleep(0.05)
    return found, waiting


def _key(rank: int) -> str:
    return f"hookline/note/{rank}"
