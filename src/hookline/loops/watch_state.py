"""What the watches of a run have counted, as a checkpoint holds it.

Takes the `Watch` that a hook of the manager has (one that reports it, one that attached it), hands plain values to
`Saving`. Trackers that count by component and cannot tell their state are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hookline.hooks.components import ComponentContext
from hookline.observe.stats.steps import ByForward, ByHand
from hookline.observe.watch import Watch

if TYPE_CHECKING:
    from hookline.dispatch.manager import HookManager

__all__ = ["load_watches", "uncountable", "watches"]


def watches(manager: HookManager) -> dict[str, Any]:
    """The state of each watch, by hook and attribute."""
    return {name: _state_of(watch) for name, watch in _found(manager)}


def load_watches(manager: HookManager, saved: Mapping[str, Any]) -> None:
    """Have them go on counting from there."""
    for name, watch in _found(manager):
        if name in saved:
            _load(watch, saved[name])


def uncountable(manager: HookManager | None, experiment: Any) -> list[str]:
    """The trackers, of hooks and of a `Trainer`, that cannot tell what they have counted so far."""
    hooks = {} if manager is None else manager.hooks
    trackers = {name: getattr(hook, "tracker", None) for name, hook in hooks.items()}
    context = getattr(experiment, "context", None)
    if isinstance(context, ComponentContext):
        trackers |= context.model_metrics
    return [
        name
        for name, tracker in trackers.items()
        if tracker is not None and not isinstance(tracker, Watch) and not hasattr(tracker, "state_dict")
    ]


def _found(manager: HookManager) -> Iterator[tuple[str, Watch]]:
    for name, hook in manager.hooks.items():
        for attribute, value in sorted(vars(hook).items()):
            if isinstance(value, Watch) and not hasattr(value, "state_dict"):
                yield f"{name}.{attribute}", value


def _state_of(watch: Watch) -> dict[str, Any]:
    engine, steps = watch._engine, watch._steps
    engine.flush()
    places = [
        {
            "name": place.name,
            "kind": place.kind,
            "rows": {str(device): torch.cat([row.added, row.kept]) for device, row in place.rows.items()},
            "beside": [None if one.kept is None else one.kept.clone() for one in place.beside],
        }
        for place in engine.places.values()
    ]
    forward = [steps._begun, steps._trains] if isinstance(steps, ByForward) else None
    return {"places": places, "steps": steps.count, "forward": forward, "by_hand": isinstance(steps, ByHand)}


def _load(watch: Watch, saved: Mapping[str, Any]) -> None:
    if saved["by_hand"] and isinstance(watch._steps, ByForward):
        watch._count_by_hand()  # or the first step from now on would begin the count anew
    engine, steps = watch._engine, watch._steps
    watch.reset()
    for about in saved["places"]:
        place = engine.place(about["name"], about["kind"])
        for values in about["rows"].values():
            row = engine.row(place, values.device)
            count = row.added.numel()
            row.added.copy_(values[:count])
            row.kept.copy_(values[count:])
        for one, kept in zip(place.beside, about["beside"], strict=False):
            one.kept = kept
    steps.count = saved["steps"]
    steps.is_due = watch._schedule.is_active(steps.count)
    if saved["forward"] is not None and isinstance(steps, ByForward):
        steps._begun, steps._trains = saved["forward"]
    watch._turn(steps.is_due or steps.keeps_hooks())
