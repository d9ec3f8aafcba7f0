"""Which trackers of a run cannot be saved in the middle of an epoch.

Takes the hooks of a manager and the components of a `Trainer`, hands names to `Saving`, which says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.training.manager import HookManager

__all__ = ["uncountable"]


def uncountable(manager: HookManager | None, experiment: Any) -> list[str]:
    """Those that cannot tell what they have counted so far."""
    hooks = {} if manager is None else manager.hooks
    trackers = {name: getattr(hook, "tracker", None) for name, hook in hooks.items()}
    context = getattr(experiment, "context", None)
    metrics = getattr(context, "model_metrics", None)  # of a `ComponentContext`, which lies above this folder
    if isinstance(metrics, Mapping):
        trackers |= metrics
    return [name for name, tracker in trackers.items() if tracker is not None and not hasattr(tracker, "state_dict")]
