"""Choose the hooks of a manager: by name, as objects or classes, and trackers and watches made into hooks.

`HookManager` calls it with what the user gave; it calls `HookRegistry` for names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineWarning, HookNameError, OptionError
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.registry import HookRegistry, check_hook, make_hook
from hookline.messages import caller_stacklevel, type_name
from hookline.observe.watch.watch import Watch
from hookline.when import HookPoint

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.context import RunDataContext

__all__ = [
    "TrackerHook",
    "checked_interval",
    "choose_hooks",
    "find_excluded",
    "record_decisions",
    "split_config",
    "tell_reports",
    "tell_scaler",
    "tell_watches",
]

Config = Mapping[str, Mapping[str, Any]]


def split_config(config: Config | None) -> tuple[Config, Any]:
    """Return the arguments of hooks, and the path of the reference weights, which is configured beside them."""
    config = dict(config or {})
    for name, options in config.items():
        if not isinstance(options, Mapping):
            raise OptionError(f"hook_config for {name!r} is a dictionary of its arguments; got {options!r}.")
    return config, config.pop("reference_weights", {}).get("path")


def choose_hooks(names: Iterable[str] | str | None, given: Iterable[Any] | None, config: Config) -> dict[str, Any]:
    """Return all hooks, by name."""
    if isinstance(given, type):
        raise OptionError(f"hooks= takes a list of hooks; got {type_name(given)}: write hooks=[{given.__name__}()].")
    if isinstance(given, TrainingHook) or is_tracker(given):
        raise OptionError(f"hooks= takes a list of hooks; put {type_name(given)} into one.")
    names = HookRegistry.resolve(names or ())
    found: dict[str, TrainingHook] = {}
    unused = {name: dict(options) for name, options in config.items()}
    for hook in HookRegistry.create(names, {name: unused.pop(name) for name in names if name in unused}):
        found[hook.name] = hook
    for thing in given or ():
        _add(found, _as_hook(thing, unused))
    _check_config(unused, found)
    return found


def _add(found: dict[str, TrainingHook], hook: TrainingHook) -> None:
    check_hook(hook)
    if hook.name in found:
        raise HookNameError(
            f"Two hooks are called {hook.name!r} ({type(found[hook.name]).__name__} and {type(hook).__name__}), so "
            "their metrics could not be told apart; set .name of one of them."
        )
    found[hook.name] = hook


def _as_hook(thing: Any, unused: dict[str, dict[str, Any]]) -> TrainingHook:
    if isinstance(thing, type) and issubclass(thing, TrainingHook):
        return make_hook(thing, unused.pop(thing.name, {}))
    if isinstance(thing, TrainingHook):
        return thing
    if is_tracker(thing) and not isinstance(thing, type):
        return TrackerHook(thing)
    raise OptionError(
        f"hooks= takes TrainingHook objects or classes, trackers and watches; got {type_name(thing)}{_remedy(thing)}."
    )


def _remedy(thing: Any) -> str:
    """Return what to write instead of something that is no hook."""
    if isinstance(thing, str):
        return f" ({thing!r}); hooks by name go into hook_names="
    if isinstance(thing, type) and is_tracker(thing):
        return f": call it, hooks=[{thing.__name__}()]"
    if isinstance(thing, type):
        return f", which does not derive from TrainingHook: write class {thing.__name__}(hookline.TrainingHook)"
    return ""


def _check_config(unused: Mapping[str, Any], hooks: Mapping[str, Any]) -> None:
    for name in unused:
        if name in hooks:
            raise OptionError(
                f"hook_config for {name!r}: it was given as an object; give its arguments when making it."
            )
        if name not in HookRegistry.known():
            available = ", ".join([*hooks, *HookRegistry.list_all()])
            raise HookNameError(f"hook_config: Unknown hook: {name!r}. Available: {available or 'none'}.")
        warnings.warn(
            f"hook_config for {name!r} has no effect: that hook is not selected.",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


def find_excluded(hooks: Mapping[str, TrainingHook], capabilities: Iterable[str] | None) -> dict[str, str]:
    """Return the hooks that require what the run cannot do, each with the reason; warn of each."""
    if capabilities is None:
        return {}
    there = {capabilities} if isinstance(capabilities, str) else set(capabilities)
    missing = {name: sorted(set(hook.requires) - there) for name, hook in hooks.items()}
    reasons = {name: f"requires {', '.join(what)}, which is not here" for name, what in missing.items() if what}
    for name, reason in reasons.items():
        warnings.warn(f"Hook {name!r} excluded: {reason}", HooklineWarning, stacklevel=caller_stacklevel())
    return reasons


# -- trackers -------------------------------------------------------------------------------------------------


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
        record_decisions(self, tracker)

    def start(self, model: nn.Module) -> None:
        """Warn of a watch that is on another model than the one that is trained."""
        self._knows_model = True
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
    for hook in hooks if optimizers else ():
        _call(hook.tracker if isinstance(hook, TrackerHook) else hook, "count_steps_of", optimizers)


def tell_scaler(hooks: Iterable[TrainingHook], scaler: Any) -> None:
    """Let hooks that read scaled gradients know by what; None for no scaler."""
    for hook in hooks:
        _call(hook, "take_scaler", scaler)


def tell_reports(hooks: Iterable[TrainingHook], reports: Any) -> None:
    """Let hooks that look at some steps know which are reported: those for which ``reports.is_due(step)``."""
    for hook in hooks:
        _call(hook, "look_at_reports", reports)


def _call(owner: Any, name: str, given: Any) -> None:
    """Call a method, if ``owner`` has it."""
    if hasattr(owner, name):
        getattr(owner, name)(given)


def _warn_of_other_model(name: str, watched: nn.Module, model: nn.Module) -> None:
    """Warn if the ``watched`` model has no module of ``model``, which is trained."""
    if {id(module) for module in model.modules()}.isdisjoint(map(id, watched.modules())):
        warnings.warn(
            f"The watch {name!r} is on a {type(watched).__name__} that has no module of the {type(model).__name__} "
            "that is trained: its numbers say nothing of this run, and it may never fire. Next: hookline.watch(model) "
            "with the model that is trained; a teacher or a copy may be meant.",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )


def record_decisions(hook: TrainingHook, watched: Any) -> None:
    """Make every decision about the budget of a watch a record of the run, ``budget/NAME/every`` and others."""
    if getattr(watched, "budget", None) is not None:
        watched.budget.tell = partial(_record, hook)


def _record(hook: TrainingHook, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if hook.manager is not None:
            hook.manager.take_record(f"budget/{hook.name}/{name}", value)


def is_tracker(thing: Any) -> bool:
    """Return whether it has ``to_metrics`` and ``reset``."""
    return all(callable(getattr(thing, method, None)) for method in ("to_metrics", "reset"))


def checked_interval(steps: int | None) -> int | None:
    """Return ``flush_every=``, if it is one."""
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1):
        return steps
    raise OptionError(f"flush_every= is a number of steps, 1 or more, or None; got {steps!r}.")
