"""Look up what a run names, and make its hooks, specs, sinks and manager: the only place that does.

The validators of `Run` call the look-ups, so that a wrong name, or a package that is missing, is an error before
anything is trained, with its place in the run file. ``hookline run``, ``--dry-run``, ``audit``, ``check``, followed
scripts and the adapters of trainers call `build`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

import hookline.sinks
from hookline.errors import ConfigError, HookNameError, OptionError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.registry import HookRegistry
from hookline.load import add_current_folder_to_path, load_object
from hookline.messages import type_name, unknown_name_text
from hookline.plain import own_copy
from hookline.runs.documents import collected, specs_for_run
from hookline.runs.flags import FlagText, declared, guessed
from hookline.specs.hook_spec import HookSpec, resolve_callable

if TYPE_CHECKING:
    from hookline.runs.find import FoundExperiment, RunExperiment
    from hookline.runs.run import Run

ALWAYS: Final = "training_metrics"
"""The hook that every run has: loss, accuracy and learning rate."""
REFERENCE: Final = "reference_weights"
"""Not a hook, but the weights that hooks compare with: the manager gets its ``path``."""
_ENTRY_POINTS: Final = "hookline.sinks"
_NONE: Final = "none"
"""The group of no hooks: every experiment has it."""
_ARGUMENTS: Final = {"prometheus": "port", "wandb": "project"}
"""The argument that a sink gets the value of its flag by."""


@dataclass(frozen=True)
class Built:
    """What a run is made of; of one that names nothing, nothing."""

    hooks: list[TrainingHook] = field(default_factory=list)
    specs: list[HookSpec] = field(default_factory=list)
    """Hooks on modules, as data."""
    sinks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Each by its name, with its arguments."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the run says to its `HookManager`."""

    def make_sinks(self) -> list[Any]:
        """Make the sinks, new ones for each strategy: some begin a run somewhere when they are made."""
        return [sink_class(name)(**own_copy(dict(arguments))) for name, arguments in self.sinks]

    def make_manager(self, hooks: Sequence[Any] | None = None, **others: Any) -> HookManager:
        """Return a manager of the hooks, or of `hooks`; `others` are options of it, and win."""
        return HookManager(hooks=self.hooks if hooks is None else hooks, **(self.options | others))

    @contextmanager
    def attached(self, made: RunExperiment) -> Iterator[None]:
        """Attach the hooks on modules to an experiment, while the block lasts."""
        if not self.specs:
            yield
            return
        from hookline.specs.apply_specs import close_hooks, hooks_of, register_hooks

        handles = register_hooks(made.experiment.model, self.specs)
        try:
            yield
        finally:
            handles.remove()
            close_hooks(hooks_of(handles))


def build(run: Run, found: FoundExperiment | None = None, *, only: Collection[str] | None = None) -> Built:
    """Make everything that a run names.

    Recipe::

        built = build(read_file("run.yaml"))
        manager = built.make_manager(sinks=built.make_sinks())

    The random streams of the run stay where they are.

    Args:
        run: The run.
        found: Its experiment, which has groups of hooks, and arguments that fit it.
        only: The hooks and specs to make, by name; None for all.
    """
    specs = _specs(run)
    chosen = [name for name in hook_names(run, found) if only is None or name in only]
    config = _arguments(run, found, chosen)
    with kept_rng():
        hooks = HookRegistry.create(chosen, config)
    kept = [spec for place, spec in enumerate(specs) if only is None or spec_name(spec, place) in only]
    options = {
        "offload_state": run.hooks.offload_state,
        "profile_hooks": run.hooks.profile,
        "on_error": run.hooks.on_error,
        "reference_weights": run.hooks.config.get(REFERENCE, {}).get("path"),
    }
    by_flag = {
        name: {_ARGUMENTS[name]: value} if name in _ARGUMENTS else {} for name, value in run.sinks.chosen().items()
    }
    sinks = [*by_flag.items(), *((other.sink, other.options) for other in run.sinks.others)]
    return Built(hooks, kept, sinks, options)


def hook_names(run: Run, found: FoundExperiment | None = None) -> list[str]:
    """Return the names of the lifecycle hooks of a run, without making them."""
    groups = {} if found is None else found.hook_sets
    return chosen_hooks(run.hooks.with_hooks, run.hooks.names, groups)


def spec_name(spec: HookSpec, place: int) -> str:
    """Return what a hook on modules is called."""
    return spec.name or f"specs[{place}]"


def _arguments(run: Run, found: FoundExperiment | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the arguments of hooks by name; those that an experiment has for them, under what the run says."""
    own = {} if found is None else found.hook_config
    given = {name: {**own.get(name, {}), **run.hooks.config.get(name, {})} for name in names}
    return {name: arguments for name, arguments in given.items() if arguments}


def _specs(run: Run) -> list[HookSpec]:
    return [*run.specs, *(() if run.hook_specs is None else specs_for_run(run.hook_specs))]


# -- hooks by name ---------------------------------------------------------------------------------------------


def known_hook(name: str) -> list[str]:
    """Return the hooks that a name or group stands for; one in a file or module (``file.py:Class``) is registered."""
    if "," in name:
        raise OptionError(f"{name}: names of hooks have blanks between them: {' '.join(name.split(','))}.")
    if name == _NONE:
        return []
    if ":" not in name:
        return HookRegistry.resolve([name])
    found = load_object(name, wanted="a hook")
    if not (isinstance(found, type) and issubclass(found, TrainingHook)):
        raise OptionError(f"{name} is {found!r}, and a hook is a class derived from TrainingHook.")
    if found.name not in HookRegistry.known() or HookRegistry.get(found.name) is not found:
        HookRegistry.register(found)
    return [found.name]


def chosen_hooks(group: str | None, names: Sequence[str] | None, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the hooks, each once, `training_metrics` first and always; none if that is asked for.

    Args:
        group: What ``--with-hooks`` says.
        names: What ``--hooks`` says; None if it is not given, empty if it is given bare; ``none`` is the group.
        groups: The groups of the experiment.
    """
    if names is not None and list(names) == [_NONE]:
        group, names = group or _NONE, None
    found = [] if group is None else hooks_of_group(group, groups)
    found += [hook for name in names or () for hook in known_hook(name)]
    if not found and names is None and group is not None:
        return []
    return list(dict.fromkeys([ALWAYS, *found]))


def hooks_of_group(group: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the hooks of a group, of the experiment or registered; those for debugging are left out."""
    known = {_NONE: (), **HookRegistry.groups, **groups}
    if group not in known:
        if not groups:
            raise HookNameError(
                f"There is no group of hooks {group!r}: groups are the hook_sets of an experiment, and there are none. "
                "Choose hooks by their names: --hooks NAME."
            )
        raise HookNameError(f"Unknown group of hooks: {group!r}.{unknown_name_text(group, list(groups), 'Groups')}")
    return [name for name in HookRegistry.resolve(known[group]) if not HookRegistry.get(name).debug]


def check_is_on(hook: str, hooks: Sequence[str] | None) -> None:
    """Raise unless the hook is known, and one of `hooks`, those of the run; None if these cannot be told."""
    if hook == REFERENCE:
        return
    known = HookRegistry.known()
    if hook not in known:
        raise HookNameError(f"Unknown hook: {hook!r}.{unknown_name_text(hook, known, 'Available')}")
    if hooks is not None and hook not in hooks:
        raise OptionError(
            f"this would have no effect: {hook} is not among the hooks of this run ({', '.join(hooks) or 'none'}); add "
            f"it: --hooks {hook}."
        )


# -- arguments of hooks ----------------------------------------------------------------------------------------


def hook_argument(hook: str, name: str, value: Any) -> Any:
    """Return `value` as the signature of the hook declares its argument `name`."""
    if hook == REFERENCE:
        if name != "path":
            raise ConfigError("reference weights have a path, and nothing else.")
        return str(value)
    cls = HookRegistry.get(hook)
    parameters = inspect.signature(cls).parameters
    takes = [one.name for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if name not in takes:
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return guessed(value) if isinstance(value, FlagText) else value
        raise OptionError(f"Hook {hook!r} takes no {name!r}.{unknown_name_text(name, takes, 'It takes')}")
    parameter = parameters[name]
    hint = _hints(cls).get(name, parameter.annotation)
    if hint is parameter.empty or isinstance(hint, str):
        hint = Any if parameter.default in (None, parameter.empty) else type(parameter.default)
        if not isinstance(value, FlagText):
            return value
    return declared(value, hint)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(vars(cls).get("__init__") or inspect.getattr_static(cls, "__init__"))
    except (NameError, TypeError, AttributeError):  # a name that only a type checker sees
        return {}


# -- factories of specs ----------------------------------------------------------------------------------------


def check_spec(spec: HookSpec) -> None:
    """Raise if nothing would come of a spec: it lacks something, or its factory is not there or refuses its config.

    Only a factory that says how to try a config is asked (``check_config``): another one may do anything when called.
    """
    from hookline.factories.factory_hook import CHECK, FactoryHook
    from hookline.sites.signature import check_hook, check_observe

    if not spec.enabled:
        return
    with collected() as faults:
        lacking = [key for key in ("target_modules", "hook_factory") if getattr(spec, key) in (None, ())]
        if lacking:
            faults.append(((), f"the hook {spec.name!r} has no {' and no '.join(lacking)}."))
            return
        check = None
        with faults.at("hook_factory"):
            check = getattr(_imported(str(spec.hook_factory)), CHECK, None)
        with faults.at("config"):
            if callable(check) and isinstance(made := check(spec.config), FactoryHook):
                kind, site_type = spec.kind_and_site_type
                check_hook(made, kind, site_type=site_type)
                check_observe(made, spec.observe)


def _imported(path: str) -> Any:
    add_current_folder_to_path()
    try:
        factory = resolve_callable(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{str(error).removesuffix('.')} (hook path '{path}').") from None
    if not callable(factory):
        raise ConfigError(f"Hook factory '{path}' is called with a config, and is {type_name(factory)}.")
    return factory


# -- sinks -----------------------------------------------------------------------------------------------------


def sink_class(name: str) -> Any:
    """Return the class of a sink; raise if there is none, or a package that it needs is missing.

    Args:
        name: That of a class of ``hookline.sinks`` (``CSVSink`` is "csv"), of an entry point, or a path.
    """
    classes = (each for each in hookline.sinks.__all__ if each.endswith("Sink") and each != "MetricSink")
    own = {each.removesuffix("Sink").lower(): each for each in classes}
    points = {} if name in own else {point.name: point for point in entry_points(group=_ENTRY_POINTS)}
    if name in own:
        cls = getattr(hookline.sinks, own[name])
    elif name in points:
        cls = points[name].load()
    elif ":" not in name and "." not in name:
        known = unknown_name_text(name, [*own, *points])
        raise OptionError(f"Unknown sink {name!r}.{known} Your own: package.module:Class.")
    else:
        path = name if ":" in name or name.endswith(".py") else ":".join(name.rsplit(".", 1))
        cls = load_object(path, wanted="a sink")
    if not callable(cls) or not hasattr(cls, "emit"):
        raise OptionError(f"{name} is {cls!r}, and a sink is a class with emit(metrics, epoch, hook_point).")
    getattr(cls, "check", bool)()
    return cls


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise if a sink does not take these arguments."""
    cls = sink_class(name)
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "no options"
        raise OptionError(f"The sink {cls.__name__} cannot be made of {given}: {error}.") from None
    except ValueError:  # a class without a signature
        return
