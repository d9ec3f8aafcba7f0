"""The experiment that ``hookline run`` was asked for, whatever form it has.

Takes a name from `request`, hands back a `Found`: what its flags, strategies and groups of hooks are, before it is
made, and how to make it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hookline.cli.config_flags import from_parameters
from hookline.cli.load_object import load_object, nearest_text
from hookline.errors import OptionError

__all__ = ["Found", "find_experiment"]


@dataclass(frozen=True)
class Found:
    """An experiment that is yet to be made."""

    name: str
    """What folders call it."""
    path: str
    """What the user wrote."""
    make: Callable[[Any, str], Any]
    """Makes it, of a configuration and a strategy: an `Experiment`, or something like one; or a `TrainTool`."""
    loop: str | None = None
    """``"epoch"`` or ``"step"``; None if only the experiment itself knows."""
    config_class: type | None = None
    strategies: Sequence[str] = ()
    hook_sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hook_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    live_metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def chosen(self, strategy: str | None) -> list[str]:
        """The strategies to run, one after the other."""
        known = list(self.strategies)
        if strategy is None:
            return known[:1] or ["default"]
        if strategy == "all":
            return known or ["default"]
        if strategy not in (known or ["default"]):
            raise OptionError(
                f"{self.name} has no strategy {strategy!r}.{nearest_text(strategy, [*(known or ['default']), 'all'])}"
            )
        return [strategy]


def find_experiment(path: str) -> Found:
    """Look an experiment up by its name, file or module. Imports it, and torch with it."""
    from hookline.experiments import EMBEDDED

    if path in EMBEDDED:
        return replace(_found(load_object(EMBEDDED[path], wanted="an experiment"), path), name=path)
    if ":" not in path and "." not in path and "/" not in path:
        raise OptionError(
            f"Unknown experiment {path!r}.{nearest_text(path, list(EMBEDDED))} One of your own: path/file.py:Class. "
            "EXPERIMENT comes before its flags."
        )
    return _found(load_object(path, wanted="an experiment", pick=_experiments_of), path)


def _experiments_of(module: Any) -> list[str]:
    from hookline.training.loops.experiment import Experiment

    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Experiment) and value.__module__ == module.__name__
    ]


def _found(thing: Any, path: str) -> Found:
    if isinstance(thing, type):
        return _of_class(thing, path)
    if callable(thing) and not hasattr(thing, "model"):
        return _of_function(thing, path)
    if hasattr(thing, "model") or _is_tool(thing):
        # An object is what it is: there is one, so it runs in one strategy and is not made anew.
        return replace(_of_class(type(thing), path), make=lambda config, strategy: thing, config_class=None)
    raise OptionError(
        f"{path} is {thing!r}, and hookline run takes an Experiment (its class, a function that makes one, or one that "
        "is made), or a TrainTool."
    )


def _of_class(cls: type, path: str) -> Found:
    if not _takes_part(cls):
        raise OptionError(
            f"{path} is the class {cls.__name__}, which is no Experiment and has no train_step or loss_fn; derive it "
            "from hookline.Experiment, or name a function that makes an experiment."
        )
    config_class = getattr(cls, "config_class", None)
    return Found(
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


def _of_function(function: Callable[..., Any], path: str) -> Found:
    name = getattr(function, "__name__", "experiment")

    def make(config: Any, strategy: str) -> Any:
        return _call(function, config, strategy) if config is None else _call_with(function, vars(config), strategy)

    return Found(_folder_name(name), path, make, config_class=from_parameters(function, leave_out=("strategy",)))


def _call(make: Callable[..., Any], config: Any, strategy: str) -> Any:
    """``make(config, strategy)``, or with as many of the two as it takes."""
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


def _takes_part(cls: type) -> bool:
    from hookline.training.loops.experiment import Experiment

    return issubclass(cls, Experiment) or any(hasattr(cls, name) for name in ("train_step", "loss_fn"))


def _is_tool(thing: Any) -> bool:
    from hookline.metta.train_tool import TrainTool

    return isinstance(thing, TrainTool)


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name).strip("._") or "experiment"
