"""Look up what a run names: hooks, their arguments, their groups, sinks, factories of specs.

The validators of `Run` call it, so that a wrong name, or a package that is missing, is an error before anything is
trained, with its place in the run file; `build` calls it for what it makes, ``replay`` for sinks.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

import hookline.sinks
from hookline.errors import ConfigError, HookNameError, OptionError
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.registry import HookRegistry, points_in_any_loop
from hookline.load import add_current_folder_to_path, load_object
from hookline.messages import type_name, unknown_name_text
from hookline.plain import own_copy
from hookline.runs.documents import collected
from hookline.runs.flags import FlagText, declared, guessed
from hookline.specs.hook_spec import HookSpec, resolve_callable

ALWAYS: Final = "training_metrics"
"""The hook that every run has: loss, accuracy and learning rate."""
REFERENCE: Final = "reference_weights"
"""Not a hook, but the weights that hooks compare with: the manager gets its ``path``."""
_ENTRY_POINTS: Final = "hookline.sinks"
_NONE: Final = "none"
"""The group of no hooks: every experiment has it."""


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


def check_schedule(hook: str, hooks: Sequence[str] | None) -> None:
    """Raise if a schedule of steps has no effect on a hook."""
    check_is_on(hook, hooks)
    points = points_in_any_loop(HookRegistry.get(hook))
    if points and not any(point.is_step for point in points):
        listed = ", ".join(sorted(point.name for point in points))
        raise ConfigError(
            f"this schedule would have no effect: {hook} fires at {listed}, and a schedule is about steps."
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
    except ImportError as error:
        raise ConfigError(f"{error} (from hook path '{path}').") from None
    except (AttributeError, ValueError) as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        raise ConfigError(f"{str(error).removesuffix('.')}. {notes}".rstrip()) from None
    if not callable(factory):
        raise ConfigError(f"Hook factory '{path}' is called with a config, and is {type_name(factory)}.")
    return factory


# -- sinks -----------------------------------------------------------------------------------------------------


def known_sink(name: str) -> Any:
    """Return the class of a sink by its name or path; raise if a package that it needs is missing."""
    cls = sink_class(name)
    if hasattr(cls, "check"):
        cls.check()
    return cls


def sink_names() -> list[str]:
    """Return the names of all sinks: the classes of ``hookline.sinks`` (``CSVSink`` is "csv") and the entry points."""
    return [*_own_sinks(), *(point.name for point in entry_points(group=_ENTRY_POINTS))]


def _own_sinks() -> dict[str, str]:
    """Return the names of the sink classes of ``hookline.sinks``, by their name on the command line."""
    classes = (name for name in hookline.sinks.__all__ if name.endswith("Sink") and name != "MetricSink")
    return {name.removesuffix("Sink").lower(): name for name in classes}


def sink_class(name: str) -> Any:
    """Return the class of a sink: one of ``hookline.sinks`` by its name, one by an entry point, or one by its path."""
    if own := _own_sinks().get(name):
        return getattr(hookline.sinks, own)
    for point in entry_points(group=_ENTRY_POINTS):
        if point.name == name:
            return point.load()
    if ":" not in name and "." not in name:
        raise OptionError(
            f"Unknown sink {name!r}.{unknown_name_text(name, sink_names())} One of your own: package.module:Class."
        )
    if ":" not in name and not name.endswith(".py"):
        name = ":".join(name.rsplit(".", 1))
    cls = load_object(name, wanted="a sink")
    if not callable(cls) or not hasattr(cls, "emit"):
        raise OptionError(f"{name} is {cls!r}, and a sink is a class with emit(metrics, epoch, hook_point).")
    return cls


def make_sink(name: str, arguments: Mapping[str, Any]) -> Any:
    """Make a sink; each strategy has sinks of its own, with arguments of their own."""
    cls = sink_class(name)
    try:
        return cls(**own_copy(dict(arguments)))
    except TypeError as error:
        raise OptionError(
            f"The sink {cls.__name__} cannot be made of {arguments or 'no arguments'}: {error}. Arguments are given in "
            "a run file: sinks: {others: [{sink: PATH, options: {...}}]}."
        ) from error
