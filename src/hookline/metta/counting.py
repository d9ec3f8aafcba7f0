"""Counting by unit: how often each unit of a component did something, of how many times it was looked at.

What `ReLUActivationState`, `SaturatedActivationState` and `ReLUGradientFlowState` share. Takes tensors, keeps whole
numbers on their device, hands fractions out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.metta.tracked_components import LOCK, ComponentTracker, OptionsT
from hookline.observe.host_values import fetch, outside_inference

__all__ = ["CountingTracker", "UnitCount"]


class UnitCount(NamedTuple):
    """What became of one component."""

    component: str
    hits: list[int]
    """By unit: how often it happened."""
    totals: list[int]
    """By unit: how many samples there were."""


class _Counts:
    """The counters of one component; they grow when a wider tensor comes, a narrower one counts for its units alone."""

    __slots__ = ("hits", "samples")

    def __init__(self) -> None:
        self.hits: dict[torch.device, Tensor] = {}
        """Whole numbers, so that they stay exact past 2^24; one row per device, as a replica counts where it is."""
        self.samples: dict[int, int] = {}
        """How many samples had that many units; shapes are known without asking the device."""

    def add(self, hits: Tensor, samples: int) -> None:
        """The counts of one tensor; they are nobody else's."""
        width = hits.numel()
        self.samples[width] = self.samples.get(width, 0) + samples
        so_far = self.hits.get(hits.device)
        if so_far is None:
            self.hits[hits.device] = hits
        elif so_far.numel() < width:
            hits[: so_far.numel()] += so_far
            self.hits[hits.device] = hits
        else:
            so_far[:width] += hits

    def totals(self) -> list[int]:
        """How many samples each unit was in."""
        width = max(self.samples, default=0)
        return [sum(n for wide, n in self.samples.items() if wide > unit) for unit in range(width)]


class CountingTracker(ComponentTracker[OptionsT]):
    """A tracker that counts, by unit, how often what `_marks` asks for was true."""

    def __init__(self, defaults: OptionsT) -> None:
        super().__init__(defaults)
        self._counts: dict[str, _Counts] = {}

    def update(self, component: str, tensor: Tensor) -> None:
        """Count one tensor; what cannot be counted is passed over (see ``countable``)."""
        found = self._readable(component, tensor)
        if found is None:
            return
        seen, axis, options = found
        others = [dim for dim in range(seen.dim()) if dim != axis]
        with LOCK, outside_inference():
            marks = self._marks(seen, options)
            hits = _summed(marks, others).long() if others else marks.long()
            self._counts.setdefault(component, _Counts()).add(hits, seen.numel() // seen.shape[axis])

    def reset(self) -> None:
        """Start counting at zero; components and their options stay."""
        with LOCK:
            self._counts.clear()

    def counted(self) -> dict[str, Any]:
        """What was counted so far, by component, as plain tensors and numbers."""
        with LOCK:
            return {
                name: {
                    "hits": list(counts.hits.values()),
                    "samples": {str(width): number for width, number in counts.samples.items()},
                }
                for name, counts in self._counts.items()
            }

    def load_counted(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``counted`` gave."""
        self.reset()
        for name, kept in state.items():
            self._options(name)  # makes it known: it may not have been found yet
            counts = _Counts()
            for hits in kept["hits"]:
                counts.add(hits.clone(), 0)  # what was on several devices may be on one by now
            counts.samples = {int(width): number for width, number in kept["samples"].items()}
            self._counts[name] = counts

    def _marks(self, tensor: Tensor, options: OptionsT) -> Tensor:
        """True where there is something to count."""
        raise NotImplementedError

    def _drop(self, component: str) -> None:
        self._counts.pop(component, None)

    def _has_begun(self, component: str) -> bool:
        return component in self._counts

    def _results(self) -> Iterator[UnitCount]:
        """Every component that was counted; one transfer for all of them."""
        with LOCK:
            names = self._in_order(self._counts)
            rows = [(name, hits) for name in names for hits in self._counts[name].hits.values()]
            numbers = fetch(hits for _, hits in rows)
            totals = {name: self._counts[name].totals() for name in names}
        summed = {name: [0] * len(total) for name, total in totals.items()}
        for (name, _), part in zip(rows, numbers, strict=True):
            for unit, hits in enumerate(part):
                summed[name][unit] += hits
        return (UnitCount(name, summed[name], totals[name]) for name in totals)


def _summed(marks: Tensor, dims: list[int]) -> Tensor:
    # In 32 bits, where they suffice, a sum on the CPU takes three quarters of the time.
    return marks.sum(dim=dims, dtype=torch.int32 if marks.numel() < 2**31 else torch.int64)
