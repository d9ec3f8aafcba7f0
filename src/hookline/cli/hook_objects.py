"""The hooks of a run as objects: those by name with their schedules, and trackers on some modules.

Takes what flags and a run file say, checked before anything is trained; hands fresh objects to `session` and `dry_run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookline.cli.chosen_hooks import known_name
from hookline.cli.hook_config import file_argument
from hookline.errors import ConfigError, NoMatchError

if TYPE_CHECKING:
    from hookline.config.mistakes import Mistakes, Path
    from hookline.lifecycle.schedule import StepSchedule
    from hookline.training.training_hook import TrainingHook

__all__ = ["HookObjects", "TrackerChoice", "checked_schedules", "checked_trackers"]


@dataclass(frozen=True)
class TrackerChoice:
    """A tracker on some modules."""

    name: str
    """What its sums are reported by."""
    tracker: str
    targets: tuple[str, ...]
    """Patterns; none stands for the layers of its kind."""
    exclude: tuple[str, ...]
    options: dict[str, Any]
    place: str
    """Where the file says so."""

    def make(self) -> TrainingHook:
        """The tracker as a hook that reports it."""
        from hookline.training.registry import HookRegistry

        where = {"targets": ",".join(self.targets) or None, "exclude": list(self.exclude) or None}
        (hook,) = HookRegistry.create([self.tracker], {self.tracker: self.options | where})
        hook.name = self.name
        return hook

    def check(self, model: Any) -> list[str]:
        """The names of the modules it would be on; an error says where the file asks for them."""
        from hookline.cli.find_command import in_shell
        from hookline.sites.targets import select

        try:
            chosen = select(model, list(self.targets), exclude=list(self.exclude) or None) if self.targets else []
        except NoMatchError as error:
            raise ConfigError(f"{self.place}: {in_shell(error)}") from None
        return [name for name, *_ in chosen]


@dataclass(frozen=True)
class HookObjects:
    """What makes the hooks of a run."""

    names: list[str]
    config: dict[str, dict[str, Any]]
    """Arguments by name; and, beside them, where reference weights are."""
    schedules: dict[str, StepSchedule] = field(default_factory=dict)
    trackers: list[TrackerChoice] = field(default_factory=list)

    @property
    def reference(self) -> dict[str, dict[str, Any]]:
        """What a `HookManager` is still to be told once the hooks are made."""
        return {name: options for name, options in self.config.items() if name not in self.names}

    def make(self) -> list[TrainingHook]:
        """Make them; random numbers that they draw do not count."""
        from hookline.guard.rng import kept_rng
        from hookline.training.registry import HookRegistry

        own = {name: options for name, options in self.config.items() if name in self.names}
        with kept_rng():
            made = HookRegistry.create(self.names, own)
            for hook in made:
                if hook.name in self.schedules:
                    hook.step_schedule = self.schedules[hook.name]
            return made + [tracker.make() for tracker in self.trackers]


# -- schedules -------------------------------------------------------------------------------------------------


def checked_schedules(
    given: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None, mistakes: Mistakes
) -> dict[str, StepSchedule]:
    """Return schedules by hook; one that would have no effect is an error. `names` is None if they are not known."""
    from hookline.lifecycle.schedule import StepSchedule

    found = {}
    for name, arguments in given.items():
        with mistakes.at("hooks", "schedules", name):
            reason = _no_effect(name, names)
            if reason:
                raise ConfigError(f"this schedule would have no effect: {reason}")
            found[name] = StepSchedule(**arguments)
    return found


def _no_effect(name: str, names: Sequence[str] | None) -> str:
    from hookline.lifecycle.points import HookPoint
    from hookline.training.registry import HookRegistry

    if names is not None and name not in names:
        return f"{name} is not among the hooks of this run ({', '.join(names) or 'none'})."
    hook = HookRegistry.get(name)
    declared = [hook.hook_points or (), *(hook.loop_points or {}).values()]
    points = {HookPoint.of(point) for some in declared for point in some}
    if points and not any(point.is_step for point in points):
        listed = ", ".join(sorted(point.name for point in points))
        return f"{name} fires at {listed}, and a schedule is about steps."
    return ""


# -- trackers --------------------------------------------------------------------------------------------------


def checked_trackers(
    given: Sequence[Mapping[str, Any]], names: Sequence[str], mistakes: Mistakes
) -> list[TrackerChoice]:
    """Return the trackers of a run file, but for those that something is wrong with."""
    found: list[TrackerChoice] = []
    taken = list(names)
    for number, entry in enumerate(given):
        tracker = _checked_tracker(entry, taken, mistakes, ("trackers", number))
        if tracker is not None:
            found.append(tracker)
            taken.append(tracker.name)
    return found


def _checked_tracker(
    entry: Mapping[str, Any], taken: Sequence[str], mistakes: Mistakes, here: Path
) -> TrackerChoice | None:
    before = len(mistakes)
    with mistakes.at(*here, "tracker"):
        tracker = _known_tracker(str(entry["tracker"]))
    if len(mistakes) > before:
        return None
    name = entry.get("name") or tracker
    with mistakes.at(*here):
        if name in taken:
            raise ConfigError(f"two hooks of this run are called {name!r}; give this one a name of its own.")
    options = {}
    for key, value in (entry.get("options") or {}).items():
        with mistakes.at(*here, "options", key):
            if key in ("targets", "exclude"):
                raise ConfigError("modules are named by target_modules and exclude.")
            options[key] = file_argument(tracker, key, value)
    patterns = {}
    for key in ("target_modules", "exclude"):
        with mistakes.at(*here, key):
            patterns[key] = _patterns(entry.get(key))
    if len(mistakes) > before:
        return None
    place = mistakes.place((*here, "target_modules"))
    return TrackerChoice(name, tracker, patterns["target_modules"], patterns["exclude"], options, place)


def _known_tracker(name: str) -> str:
    from hookline.training.registry import HookRegistry

    tracker = known_name(name)
    if not {"targets", "exclude"} <= set(inspect.signature(HookRegistry.get(tracker)).parameters):
        raise ConfigError(f"{tracker} is no tracker of modules; it goes into hooks: names.")
    return tracker


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value or ())
    for pattern in patterns:
        if "," in pattern:
            raise ConfigError(f"a pattern of a tracker has no comma, got {pattern!r}; write a list.")
    return patterns
