"""Hold what one followed step was given: its forwards and batches, each with its ids.

`FollowedSteps` fills a `FollowedBatch` and runs it again; `BadOperationFinder` has it described for a report. A step
that accumulates gradients has several batches, and the report names the one in which the operator ran.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch

from hookline.debug.first_bad.bad_operation import describe_batch

__all__ = ["FollowedBatch"]


class FollowedBatch:
    """The forwards, batches and ids of one step, and the autocast of its first forward."""

    def __init__(self) -> None:
        self.forwards: list[tuple[Any, Any]] = []
        self.batches: list[Any] = []
        self.ids: list[Any] = []
        """What names each batch; None for one without a name."""
        self.autocast: list[tuple[str, torch.dtype]] = []
        self.starts: list[int] = []
        """How many operators the second run had made when it began with each batch, or each forward."""

    def add(self, batch: Any, ids: Any) -> None:
        """Take the batch of the forward that follows."""
        self.batches.append(batch)
        self.ids.append(ids)

    def describe(self, number: int | None = None) -> str:
        """Return in words the batch in which the operator of that ``number`` ran; without a number, all of them."""
        shown = self.batches or [args for args, _ in self.forwards]
        ids = self.ids or [None] * len(shown)
        if number is not None and len(shown) > 1 and len(self.starts) == len(shown):
            at = max(bisect_right(self.starts, number) - 1, 0)
            return f"{describe_batch(shown[at], ids[at])}, micro-batch {at + 1} of {len(shown)}"
        if len(shown) == 1:
            return describe_batch(shown[0], ids[0])
        return describe_batch(tuple(shown), None if any(each is None for each in ids) else ids)
