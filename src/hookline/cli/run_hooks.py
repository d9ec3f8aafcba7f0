"""Find the hooks of a run: a group of the experiment, hooks by name and from files, trackers, and specs for modules.

`run_request` calls it with what flags and a run file say, and checks all of it before training; `run_session` and
`dry_run` make the hook objects by `HookObjects`. `training_metrics` is always among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hookline.cli.hook_config import file_argument
from hookline.cli.shell_hints import shell_text
from hookline.error_policy import error_text
from hookline.errors import ConfigError, HooklineError, HookNameError, NoMatchError, OptionError
from hookline.load import add_current_folder_to_path
from hookline.messages import close_names, type_name, unknown_name_text
from hookline.runs.named_hooks import ALWAYS, known_name, make_tracker

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.runs.mistakes import Mistakes
    from hookline.runs.read import KeyPath
    from hookline.specs.hook_spec import HookSpec
    from hookline.when import StepSchedule

__all__ = [
    "HookObjects",
    "check_factories",
    "check_specs",
    "choose_hooks",
    "specs_of_file",
    "valid_schedules",
    "valid_trackers",
]

_NONE: Final = "none"
"""The group of no hooks: every experiment has it."""
_WHERE_AND_HOW: Final = ("name", "target_modules", "exclude", "hook_factory", "config", "on", "observe")
"""The fields of a spec that can be looked up."""
PlacedSpec = tuple[str, Mapping[str, Any]]
"""Where a spec stands, for errors; and the spec."""


def choose_hooks(
    group: str | None,
    names: Sequence[str] | None,
    hook_sets: Mapping[str, Sequence[str]] | None,
    experiment: str,
    at: Callable[[Sequence[str | int]], AbstractContextManager[None]] = lambda path: nullcontext(),
) -> list[str]:
    """Return the names of the hooks, each once, `training_metrics` first and always; none if that is asked for.

    Args:
        group: What ``--with-hooks`` says.
        names: What ``--hooks`` says; None if it is not given, empty if it is given bare; ``none`` is the group.
        hook_sets: The groups of the experiment; None if it is not known which experiment that is.
        experiment: Its name, for messages.
        at: Collects the error about what stands at a path of a file (``["hooks", "names", 2]``); one about a flag it
            lets through.
    """
    from hookline.lifecycle.registry import HookRegistry

    if names is not None and list(names) == [_NONE]:
        group, names = group or _NONE, None
    found: list[str] = []
    if group is not None and hook_sets is not None:
        with at(["hooks", "with_hooks"]):
            found += _of_group(group, hook_sets, experiment)
    for place, name in enumerate(names or ()):
        with at(["hooks", "names", place]):
            found += HookRegistry.resolve([known_name(name)])
    if not found and names is None and group is not None:
        return []
    return list(dict.fromkeys([ALWAYS, *found]))


def _of_group(group: str, hook_sets: Mapping[str, Sequence[str]], experiment: str) -> list[str]:
    from hookline.lifecycle.registry import HookRegistry

    if group == _NONE and _NONE not in hook_sets:
        return []
    if not hook_sets:
        raise HookNameError(
            f"--with-hooks {group}: {experiment} names no groups of hooks (hook_sets); choose hooks with --hooks NAME."
        )
    if group not in hook_sets:
        raise HookNameError(f"Unknown group of hooks: {group!r}.{unknown_name_text(group, list(hook_sets), 'Groups')}")
    return [name for name in HookRegistry.resolve(hook_sets[group]) if not HookRegistry.get(name).debug]


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
        """Return the tracker as a hook that reports it."""
        return make_tracker(self.name, self.tracker, self.targets, self.exclude, self.options)

    def check(self, model: Any) -> list[str]:
        """Return the names of the modules it would be on; an error says where the file asks for them."""
        from hookline.sites.targets import select

        try:
            chosen = select(model, list(self.targets), exclude=list(self.exclude) or None) if self.targets else []
        except NoMatchError as error:
            raise ConfigError(f"{self.place}: {shell_text(error, 'EXPERIMENT')}") from None
        return [name for name, *_ in chosen]


@dataclass(frozen=True)
class HookObjects:
    """Make the hooks of a run."""

    names: list[str]
    config: dict[str, dict[str, Any]]
    """Arguments by name; and, beside them, where reference weights are."""
    schedules: dict[str, StepSchedule] = field(default_factory=dict)
    trackers: list[TrackerChoice] = field(default_factory=list)

    def make(self) -> list[TrainingHook]:
        """Make them; the random streams of the run stay where they are."""
        from hookline.guard.rng import kept_rng
        from hookline.lifecycle.registry import HookRegistry

        own = {name: options for name, options in self.config.items() if name in self.names}
        with kept_rng():
            made = HookRegistry.create(self.names, own)
            for hook in made:
                if hook.name in self.schedules:
                    hook.step_schedule = self.schedules[hook.name]
            return made + [tracker.make() for tracker in self.trackers]

    def check_arguments(self) -> None:
        """Make the hooks that were given arguments, and drop them, so that a wrong value is an error now.

        For a run that begins in another process, where nobody would see it in time. Others are not made: a constructor
        of the user's may do anything.
        """
        for name in self.names:
            if self.config.get(name):
                _make_or_name(name, HookObjects([name], {name: self.config[name]}).make)
        for tracker in self.trackers:
            _make_or_name(tracker.name, tracker.make)


def _make_or_name(name: str, make: Callable[[], Any]) -> None:
    try:
        make()
    except Exception as error:
        said = str(error) if isinstance(error, HooklineError) else error_text(error)
        raise OptionError(f"The hook {name} does not take its arguments: {said}") from error


# -- schedules -------------------------------------------------------------------------------------------------


def valid_schedules(
    given: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None, mistakes: Mistakes
) -> dict[str, StepSchedule]:
    """Return schedules by hook; one that would have no effect is an error. `names` is None if they are not known."""
    from hookline.when import StepSchedule

    found = {}
    for name, arguments in given.items():
        with mistakes.at("hooks", "schedules", name):
            reason = _no_effect(name, names)
            if reason:
                raise ConfigError(f"this schedule would have no effect: {reason}")
            found[name] = StepSchedule(**arguments)
    return found


def _no_effect(name: str, names: Sequence[str] | None) -> str:
    from hookline.lifecycle.registry import HookRegistry
    from hookline.when import HookPoint

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


def valid_trackers(given: Sequence[Mapping[str, Any]], names: Sequence[str], mistakes: Mistakes) -> list[TrackerChoice]:
    """Return the trackers of a run file, but for those that something is wrong with."""
    found: list[TrackerChoice] = []
    taken = list(names)
    for number, entry in enumerate(given):
        tracker = _valid_tracker(entry, taken, mistakes, ("trackers", number))
        if tracker is not None:
            found.append(tracker)
            taken.append(tracker.name)
    return found


def _valid_tracker(
    entry: Mapping[str, Any], taken: Sequence[str], mistakes: Mistakes, here: KeyPath
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
    from hookline.lifecycle.registry import HookRegistry

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


# -- hooks on modules ------------------------------------------------------------------------------------------


def specs_of_file(file: str) -> list[PlacedSpec]:
    """Return the specs of a file that is there for them: a list, the settings of a server, a run file."""
    from hookline.runs.read import read_document
    from hookline.runs.run_file import placed_specs

    document = read_document(file)
    return [(document.place(path), spec) for path, spec in placed_specs(document)]


def check_factories(specs: Sequence[PlacedSpec]) -> list[dict[str, Any]]:
    """Return the specs; if a factory is not there, an error tells of all that are not."""
    add_current_folder_to_path()
    wrong = [f"{place}: {text}" for place, spec in specs if (text := _wrong_factory(spec))]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return [dict(spec) for _, spec in specs]


def check_specs(
    specs: Sequence[Any], path: KeyPath, mistakes: Mistakes, no_match: Callable[[HookSpec], str] = lambda spec: ""
) -> None:
    """Add to `mistakes` why nothing would come of some of `specs`, a list of a file that `path` leads to.

    What is wrong with the specs as such is among `mistakes` already; of those, the fields that are right are looked at.
    `no_match` returns why the patterns of a spec match nothing, empty if they do.
    """
    from hookline.specs.hook_spec import HookSpec, spec_faults

    add_current_folder_to_path()
    for number, entry in enumerate(specs):
        if not isinstance(entry, Mapping) or entry.get("enabled") is False:
            continue
        here = (*path, number)
        who = f"Hook {mistakes.original(here)[-1]} ({entry.get('name') or 'without a name'})"
        faults = spec_faults(entry)
        lacking = [key for key in ("target_modules", "hook_factory") if entry.get(key) in (None, [], ())]
        if lacking and not faults:
            mistakes.add(here, f"{who} has no {' and no '.join(lacking)}.")
            continue
        right = _right_fields(entry, {keys[0] for keys, _ in faults if keys})
        if text := _wrong_factory(right):
            mistakes.add((*here, "hook_factory"), f"{who}: {text}")
        elif text := _wrong_config(right):
            mistakes.add((*here, "config"), f"{who}: {text}")
        if right.get("target_modules") and (text := no_match(HookSpec.from_dict(right))):
            mistakes.add((*here, "target_modules"), f"{who}: {text}")


def _right_fields(entry: Mapping[str, Any], wrong: Collection[Any]) -> dict[str, Any]:
    """Return the fields of a spec that say where its hook goes and how it is made, without those that are `wrong`.

    A kind that there is not is taken for the nearest, as its patterns may be of modules, parameters or functions.
    """
    from hookline.specs.hook_spec import KINDS

    right = {key: entry[key] for key in _WHERE_AND_HOW if key in entry and key not in wrong}
    if "on" in wrong:
        near = close_names(str(entry["on"]), KINDS, 1)
        if near:
            right["on"] = near[0]
        else:
            right.pop("target_modules", None)
    return right


def _wrong_config(spec: Mapping[str, Any]) -> str:
    """Return why the factory of a spec would refuse its config, or the hook its place; empty if it would not.

    Only a factory that says how to try a config is asked (``check_config``): another one may do anything when called.
    """
    from hookline.factories.factory_hook import CHECK, FactoryHook
    from hookline.sites.signature import check_hook, check_observe
    from hookline.specs.hook_spec import HookSpec, resolve_callable

    if not spec.get("hook_factory"):
        return ""
    checked = HookSpec.from_dict(spec)
    check = getattr(resolve_callable(str(checked.hook_factory)), CHECK, None)
    if not callable(check):
        return ""
    try:
        made = check(checked.config)
        kind, site_type = checked.kind_and_site_type
        if isinstance(made, FactoryHook):
            check_hook(made, kind, site_type=site_type)
            check_observe(made, checked.observe)
    except HooklineError as error:
        return str(error)
    return ""


def _wrong_factory(spec: Mapping[str, Any]) -> str:
    """Return why the factory of a spec cannot be imported; empty if it can, or if the spec is switched off."""
    from hookline.specs.hook_spec import resolve_callable

    path = spec.get("hook_factory")
    if path is None or spec.get("enabled") is False:
        return ""
    try:
        factory = resolve_callable(path)
    except ImportError as error:
        return f"{error} (from hook path '{path}')."
    except (AttributeError, ValueError) as error:
        said = " ".join(getattr(error, "__notes__", ()))
        return f"{str(error).removesuffix('.')}. {said}".rstrip()
    return "" if callable(factory) else f"Hook factory '{path}' is called with a config, and is {type_name(factory)}."
