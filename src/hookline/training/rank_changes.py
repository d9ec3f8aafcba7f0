"""Make a checkpoint fit another number of ranks: keep what is the same on all ranks, drop what belongs to one.

`Saving` calls it before anything is loaded, and tells the user what was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["adapt_to_ranks"]


def adapt_to_ranks(
    saved: dict[str, Any], before: int, now: int, differing: list[str], streams: Mapping[str, Any]
) -> str:
    """Change the tree of rank 0 of `before` ranks into one for `now` ranks; return what was lost, in a sentence.

    Args:
        saved: The tree; changed in place.
        before: How many ranks saved it.
        now: How many go on with it.
        differing: Hooks whose state was not the same on all ranks.
        streams: The random streams as they are now, which stay.
    """
    run, core = saved["run"], saved["core"]
    core["streams"] = dict(streams)
    core["model"].pop("gradients", None)  # of another part of the data, and perhaps in other shards
    lost = ["random streams"]
    if run["within"]:
        lost.append(f"the place in the data (pass {run['epoch']} over them begins anew)")
        run |= {"within": False, "done": 0, "losses": (None, 0), "accuracies": (None, 0)}
    saved["loader"] = {"fixed": saved["loader"]["fixed"]}
    saved["before_epoch"] = saved["demand"] = None
    if saved["manager"] is not None and differing:
        hooks = saved["manager"]["hooks"]
        saved["manager"]["hooks"] = {name: state for name, state in hooks.items() if name not in differing}
        lost.append(f"the state of {', '.join(differing)}, which was not the same on all ranks")
    return (
        f"The run was saved by {_processes(before)} and goes on with {_processes(now)}: model, optimizer, scheduler "
        f"and hooks go on where they were. What does not carry over: {'; '.join(lost)}."
    )


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"
