"""Which trackers of a run cannot be saved in the middle of an epoch.

Takes the hooks of a manager and the components of a `Trainer`, hands names to `Saving`, which says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookline.hooks.components import ComponentContext

if TYPE_CHECKING:
    from hookline.dispatch.manager import HookManager

__all__ = ["uncountable"]


def uncountable(manager: HookManager | None, experiment: Any) -> list[str]:
    """Those that cannot tell what they have counted so far."""
    hooks = {} if manager is None else manager.hooks
    trackers = {name: getattr(hook, "tracker", None) for name, hook in hooks.items()}
    context = getattr(experiment, "context", None)
    if isinstance(context, ComponentContext):
        trackers |= context.model_metrics
    return [name for name, tracker in trackers.items() if tracker is not None and not hasattr(tracker, "state_dict")]
