"""Find the experiment that a run names: its class or function, its options, its strategies, its groups of hooks.

`read` calls `find_experiment` with a name, a file or a module, and makes flags of its options; `Run` checks them. The
experiment itself is made later, by `session`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hookline.errors import ConfigError, OptionError
from hookline.load import load_object
from hookline.messages import unknown_name_text
from hookline.runs.values import declared

__all__ = ["ALWAYS", "EMBEDDED", "FoundExperiment", "find_experiment"]

ALWAYS: Final = "training_metrics"
"""The hook that every run has: loss, accuracy and learning rate."""
EMBEDDED: Final = {
    "mod_arithmetic": "hookline.training.mod_arithmetic:ModArithmetic",
    "digits": "hookline.training.digits:Digits",
}
"""The experiments that come with hookline, each one short file to read and to begin from, by name."""

_LAUNCHERS: Final = ("python", "torchrun", "accelerate", "deepspeed")
"""Programs that start scripts, also where they are not on the PATH."""


@dataclass(frozen=True)
class FoundExperiment:
    """Hold what is known of an experiment before it is made, and how to make it."""

    name: str
    """Name of its run folder."""
    path: str
    """What the user wrote."""
    make: Callable[[Any, str], Any]
    """Takes a configuration and a strategy; returns an `Experiment`, an object like one, or a `TrainTool`."""
    loop: str | None = None
    """``"epoch"`` or ``"step"``; None if only the experiment itself knows."""
    config_class: type | None = None
    strategies: Sequence[str] = ()
    hook_sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hook_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    live_metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def chosen(self, strategy: str | None) -> list[str]:
        """Return the strategies to run, one after the other."""
        known = list(self.strategies) or ["default"]
        if strategy is None:
            return known[:1]
        if strategy == "all":
            return known
        if strategy not in known:
            raise OptionError(
                f"{self.name} has no strategy {strategy!r}.{unknown_name_text(strategy, [*known, 'all'])}"
            )
        return [strategy]

    @property
    def options(self) -> dict[str, dataclasses.Field[Any]]:
        """The fields of its configuration, by name."""
        if self.config_class is None:
            return {}
        if not dataclasses.is_dataclass(self.config_class):
            raise OptionError(f"config_class is a dataclass, whose fields become flags; got {self.config_class!r}.")
        return {one.name: one for one in dataclasses.fields(self.config_class) if one.init}

    @property
    def types(self) -> dict[str, Any]:
        """The types of these fields."""
        return {} if self.config_class is None else typing.get_type_hints(self.config_class, include_extras=True)

    def option(self, name: str, value: Any) -> Any:
        """Return the value of an option as it is declared; raise if there is none of that name."""
        if self.config_class is None:
            raise ConfigError(f"{self.name} takes no options of its own.")
        if name not in self.options:
            known = unknown_name_text(name, list(self.options))
            raise ConfigError(f"{self.config_class.__qualname__} has no {name!r}.{known}")
        return declared(value, self.types[name])

    def make_config(self, values: Mapping[str, Any]) -> Any:
        """Return its configuration with these values, and its own defaults for the others; None if it has none."""
        if self.config_class is None:
            return None
        missing = [
            name
            for name, one in self.options.items()
            if one.default is one.default_factory and name not in values  # both MISSING
        ]
        if missing:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise OptionError(f"{self.name} needs {flags}; or under config, in a run file.")
        return self.config_class(**values)


def find_experiment(path: str) -> FoundExperiment:
    """Return the experiment of a name, in a file or a module. Imports it, and torch with it."""
    if path in EMBEDDED:
        return replace(_found(load_object(EMBEDDED[path], wanted="an experiment"), path), name=path)
    if ":" not in path and "." not in path and "/" not in path:
        if path in _LAUNCHERS or shutil.which(path):
            raise OptionError(f"{path} is a program, which stands behind --: hookline run -- {path} train.py.")
        raise OptionError(
            f"Unknown experiment {path!r}.{unknown_name_text(path, list(EMBEDDED))} One of your own: "
            "path/file.py:Class. EXPERIMENT comes before its flags."
        )
    if path.endswith(".py") and Path(path).is_file() and not _defines_experiment(Path(path)):
        raise OptionError(
            f"{path} defines no Experiment. Next, for a script: hookline run -- python {path}; for something "
            f"else in it: {path}:NAME."
        )
    return _found(load_object(path, wanted="an experiment", pick=_experiments_of), path)


def _defines_experiment(file: Path) -> bool:
    """Return whether a class of the file is one by its name for its base. Read, as a script would train when run."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return True  # Python says where, when it is imported
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return any("Experiment" in ast.unparse(base) for one in classes for base in one.bases)


def _experiments_of(module: Any) -> list[str]:
    from hookline.training.experiment import Experiment

    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Experiment) and value.__module__ == module.__name__
    ]


def _found(thing: Any, path: str) -> FoundExperiment:
    if isinstance(thing, type):
        return _of_class(thing, path)
    if callable(thing) and not hasattr(thing, "model"):
        return _of_function(thing, path)
    if hasattr(thing, "model") or _is_tool(thing):
        # The object exists already: every strategy would train the same one.
        return replace(_of_class(type(thing), path), make=lambda config, strategy: thing, config_class=None)
    raise OptionError(
        f"{path} is {thing!r}, and hookline run takes an Experiment (its class, a function that makes one, or one that "
        "is made), or a TrainTool."
    )


def _of_class(cls: type, path: str) -> FoundExperiment:
    if not _is_experiment(cls):
        raise OptionError(
            f"{path} is the class {cls.__name__}, which is no Experiment and has no train_step or loss_fn; derive it "
            "from hookline.Experiment, or name a function that makes an experiment."
        )
    config_class = getattr(cls, "config_class", None)
    return FoundExperiment(
        name=_folder_name(getattr(cls, "name", "") or cls.__name__),
        path=path,
        make=lambda config, strategy: _call(cls, config, strategy),
        loop=getattr(cls, "loop", "epoch"),
        config_class=config_class,
        strategies=tuple(getattr(cls, "strategies", ())),
        hook_sets=dict(getattr(cls, "hook_sets", {})),
        hook_config=dict(getattr(cls, "hook_config", {})),
        live_metrics=dict(getattr(cls, "live_metrics", {})),
    )


def _of_function(function: Callable[..., Any], path: str) -> FoundExperiment:
    name = getattr(function, "__name__", "experiment")

    def make(config: Any, strategy: str) -> Any:
        return _call(function, config, strategy) if config is None else _call_with(function, vars(config), strategy)

    return FoundExperiment(
        _folder_name(name), path, make, config_class=_class_of_parameters(function, leave_out=("strategy",))
    )


def _call(make: Callable[..., Any], config: Any, strategy: str) -> Any:
    """Call ``make(config, strategy)``, or with as many of the two as it takes."""
    parameters = [
        one
        for one in inspect.signature(make).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return make(config, strategy)
    if len(parameters) == 1 and parameters[0].name == "strategy":
        return make(strategy)
    return make(*(config, strategy)[: len(parameters)])


def _call_with(function: Callable[..., Any], values: Mapping[str, Any], strategy: str) -> Any:
    takes = inspect.signature(function).parameters
    return function(**values, **({"strategy": strategy} if "strategy" in takes else {}))


def _is_experiment(cls: type) -> bool:
    from hookline.training.experiment import Experiment

    return issubclass(cls, Experiment) or any(hasattr(cls, name) for name in ("train_step", "loss_fn"))


def _is_tool(thing: Any) -> bool:
    from hookline.metta.train_tool import TrainTool

    return isinstance(thing, TrainTool)


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name).strip("._") or "experiment"


def _class_of_parameters(function: Callable[..., Any], leave_out: Collection[str] = ()) -> type | None:
    """Return a dataclass of a function's parameters; None if there are none that can be options."""
    hints = typing.get_type_hints(function)
    made: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in leave_out or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        hint = hints.get(name, str if default in (None, parameter.empty) else type(default))
        made.append((name, hint) if default is parameter.empty else (name, hint, _constant(default)))
    return dataclasses.make_dataclass(function.__name__, made, kw_only=True) if made else None


def _constant(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)
