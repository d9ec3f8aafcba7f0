"""Let trackers and watches be hooks, and tell hooks what the run knows: its optimizers, its scaler, its reports.

`HookManager` makes a `TrackerHook` of each tracker in ``hooks=``; the loops and the hosts call the functions that tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.error_policy import warn_user
from hookline.lifecycle.hook import TrainingHook
from hookline.when import HookPoint

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.context import RunDataContext

__all__ = ["TrackerHook", "is_tracker", "tell_reports", "tell_scaler", "tell_watches"]


class TrackerHook(TrainingHook):
    """Report what a tracker has counted, and reset it.

    Recipe: ``HookManager(hooks=[watch])``, or ``TrackerHook(watch, name="encoder")`` if there are several.

    It reports at the end of an epoch; in the step loop, at snapshots.
    """

    description = "reports a tracker or watch, then resets it"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.SNAPSHOT}}  # noqa: RUF012
    pure = True

    def __init__(self, tracker: Any, *, name: str = "") -> None:
        self.tracker = tracker
        self.name = name or getattr(tracker, "name", "") or type(tracker).__name__
        self._reported: tuple[Any, int, int] | None = None
        self._knows_model = False
        if getattr(tracker, "budget", None) is not None:  # every decision becomes a record of the run
            tracker.budget.tell = partial(_record, self)

    def start(self, model: nn.Module) -> None:
        """Warn of a watch that is on another model than the one that is trained."""
        self._knows_model = True
        from hookline.observe.watch.watch import Watch  # here: names of hooks are listed without importing torch

        if isinstance(self.tracker, Watch):
            _warn_of_other_model(self.name, self.tracker.model, model)

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return what was counted since the last time."""
        if not self._knows_model and ctx.model is not None:  # a loop that does not call start()
            self.start(ctx.model)
        step = -1 if self.manager is None else self.manager.global_step
        now = (ctx.hook_point, ctx.epoch, step)
        if self._reported is not None and self._reported[0] is not now[0] and self._reported[1:] == now[1:]:
            return None  # reported a moment ago, at the end of the same epoch: nothing has been counted since
        metrics: Mapping[str, Any] = self.tracker.to_metrics()
        self.tracker.reset()
        self._reported = now
        return metrics

    def reset(self) -> None:
        """Forget the last run."""
        self._reported = None
        self._knows_model = False
        self.tracker.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the tracker, if it has one."""
        return dict(self.tracker.state_dict()) if hasattr(self.tracker, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the tracker, if it can."""
        if state and hasattr(self.tracker, "load_state_dict"):
            self.tracker.load_state_dict(state)


def tell_watches(hooks: Iterable[TrainingHook], optimizers: Sequence[Any]) -> None:
    """Let every watch among ``hooks`` count steps of the run's optimizers; leave those that were given their own."""
    if optimizers:
        _call([hook.tracker if isinstance(hook, TrackerHook) else hook for hook in hooks], "count_steps_of", optimizers)


def tell_scaler(hooks: Iterable[TrainingHook], scaler: Any) -> None:
    """Let hooks that read scaled gradients know by what; None for no scaler."""
    _call(hooks, "take_scaler", scaler)


def tell_reports(hooks: Iterable[TrainingHook], reports: Any) -> None:
    """Let hooks that look at some steps know which are reported: those for which ``reports.is_due(step)``."""
    _call(hooks, "look_at_reports", reports)


def _call(owners: Iterable[Any], name: str, given: Any) -> None:
    for owner in owners:
        if hasattr(owner, name):
            getattr(owner, name)(given)


def _warn_of_other_model(name: str, watched: nn.Module, model: nn.Module) -> None:
    """Warn if the ``watched`` model has no module of ``model``, which is trained."""
    if {id(module) for module in model.modules()}.isdisjoint(map(id, watched.modules())):
        warn_user(
            f"The watch {name!r} is on a {type(watched).__name__} that has no module of the {type(model).__name__} "
            "that is trained: it may never fire. Next: hookline.watch(model) with the model that is trained."
        )


def _record(hook: TrainingHook, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if hook.manager is not None:
            hook.manager.take_record(f"budget/{hook.name}/{name}", value)


def is_tracker(thing: Any) -> bool:
    """Return whether it has ``to_metrics`` and ``reset``."""
    return all(callable(getattr(thing, method, None)) for method in ("to_metrics", "reset"))
