"""Hold a trace against the run that is being traced, so that tensors are stored only where both part.

`trace(against=...)` makes a `ReferenceTrace`; the `TraceRecorder` asks it for each fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from hookline.debug.trace.read_trace import TraceFolder, read_trace
from hookline.debug.trace.trace_record import Fingerprint
from hookline.errors import TraceError

__all__ = ["ReferenceKey", "ReferenceTrace"]

ReferenceKey: TypeAlias = tuple[str, str, str, int, int, bool]
"""Site, kind, leaf, step, call, and whether it is a recomputation."""


class ReferenceTrace:
    """The fingerprints of an earlier run.

    Args:
        source: The folder of the trace, or what ``read_trace`` gave.
        rank: Whose records; of a trace without that rank, those of its first one.
        seed: The seed of the sketches of this run, and so of the earlier one.
        groups: The size of these sketches.
        hash_step: What numbers are rounded to before they are hashed.
        apart: From which relative distance on two tensors are apart; with 0, from the first bit on.
    """

    def __init__(
        self, source: str | Path | TraceFolder, *, rank: int, seed: int, groups: int, hash_step: float, apart: float
    ) -> None:
        folder = source if isinstance(source, TraceFolder) else read_trace(source)
        for name, own in (("seed", seed), ("groups", groups), ("hash_step", hash_step)):
            if folder.head.get(name, own) != own:
                raise TraceError(
                    f"against={str(folder.path)!r} was written with {name}={folder.head[name]!r}, this trace has "
                    f"{own!r}: their fingerprints cannot be compared. Give the same {name}=."
                )
        whose = rank if rank in folder.ranks else min(folder.ranks, default=rank)
        self._apart = apart
        self._known: dict[ReferenceKey, Fingerprint] = {
            (each.site, each.kind, each.leaf, each.step, each.call, each.recompute): each.fingerprint
            for each in folder.records
            if each.rank == whose
        }

    def has(self, key: ReferenceKey) -> bool:
        """Return whether the earlier run has this tensor."""
        return key in self._known

    def is_apart(self, key: ReferenceKey, norm: float, hash_: int, sketch: Sequence[float]) -> bool:
        """Return whether a tensor is another than in the earlier run, which has it."""
        other = self._known[key]
        if not self._apart:
            return other.hash != hash_
        if len(sketch) != len(other.sketch):
            return True
        away = math.dist(sketch, other.sketch)
        return away > self._apart * max(norm, other.norm)
