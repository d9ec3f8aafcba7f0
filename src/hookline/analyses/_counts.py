"""What a tracker has counted, as plain tensors and numbers, for checkpoints and for keeping on the CPU.

Takes the trackers of the hooks of this folder, hands dictionaries to ``state_dict``, and puts them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.observe.trackers.counting import CountingTracker, _Counts
from hookline.observe.trackers.fisher import FisherInformationState
from hookline.observe.trackers.gradient_flow import GradientFlowState

__all__ = ["load_counts", "saved_counts"]


def saved_counts(tracker: Any) -> dict[str, Any]:
    """By component; nothing of one that nothing was counted of."""
    if isinstance(tracker, FisherInformationState):
        return {name: dict(means) for name, means in tracker._means.items()}
    if isinstance(tracker, GradientFlowState):
        return dict(tracker._sizes)
    assert isinstance(tracker, CountingTracker)
    return {
        name: {
            "hits": list(counts.hits.values()),
            "samples": {str(width): number for width, number in counts.samples.items()},
        }
        for name, counts in tracker._counts.items()
    }


def load_counts(tracker: Any, state: Mapping[str, Any]) -> None:
    """Go on from what ``saved_counts`` gave."""
    tracker.reset()
    for name, kept in state.items():
        tracker._options(name)  # makes it known: it may not have been found yet
        if isinstance(tracker, FisherInformationState):
            tracker._means[name] = dict(kept)
        elif isinstance(tracker, GradientFlowState):
            tracker._sizes[name] = kept
        else:
            tracker._counts[name] = _counts(kept)


def _counts(kept: Mapping[str, Any]) -> _Counts:
    counts = _Counts()
    for hits in kept["hits"]:
        counts.add(hits.clone(), 0)  # what was on several devices may be on one by now
    counts.samples = {int(width): number for width, number in kept["samples"].items()}
    return counts
