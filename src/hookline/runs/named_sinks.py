"""Look up sinks by name, and tell which files they leave.

`Run` looks up the sinks it names, `build` makes them, ``replay`` calls `sink_class`. A missing package is an error
before training begins, with the line that installs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

import hookline.sinks
from hookline.errors import OptionError
from hookline.load import load_object
from hookline.messages import unknown_name_text
from hookline.plain import own_copy

__all__ = [
    "ENTRY_POINTS",
    "FILES",
    "check_package",
    "known_sink",
    "make_sinks",
    "sink_class",
    "sink_files",
    "sink_names",
]

ENTRY_POINTS: Final = "hookline.sinks"
FILES: Final = {
    "csv": "{strategy}.csv",
    "jsonl": "{strategy}.jsonl",
    "parquet": "{strategy}.parquet",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow.db",
    "wandb": "wandb",
}
"""The file that each leaves in the folder of the run."""
_ARGUMENTS: Final = {"prometheus": "port", "wandb": "project"}
"""The argument that a sink gets the value of its flag by."""


def make_sinks(chosen: Mapping[str, Any], others: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """Make sinks: those that are chosen by a flag of their own, with its value, and others with their arguments."""
    named = [(name, {_ARGUMENTS[name]: value} if name in _ARGUMENTS else {}) for name, value in chosen.items()]
    return [_make(sink_class(name), arguments) for name, arguments in [*named, *others]]


def known_sink(name: str) -> None:
    """Raise if there is no sink of that name or path, or if a package that it needs is missing."""
    check_package(sink_class(name))


def check_package(cls: Any) -> Any:
    """Return the sink class ``cls``; raise if a package that it needs is missing."""
    if hasattr(cls, "check"):
        cls.check()
    return cls


def sink_names() -> list[str]:
    """Return the names of all sinks: the classes of ``hookline.sinks`` (``CSVSink`` is "csv") and the entry points."""
    return [*_own_classes(), *(point.name for point in entry_points(group=ENTRY_POINTS))]


def _own_classes() -> dict[str, str]:
    """Return the names of the sink classes of ``hookline.sinks``, by their name on the command line."""
    ending = "Sink"
    classes = (name for name in hookline.sinks.__all__ if name.endswith(ending) and name != "MetricSink")
    return {name.removesuffix(ending).lower(): name for name in classes}


def sink_class(name: str) -> Any:
    """Return the class of a sink: one of ``hookline.sinks`` by its name, one by an entry point, or one by its path."""
    own = _own_classes()
    if name in own:
        return getattr(hookline.sinks, own[name])
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in found:
        return found[name].load()
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


def _make(cls: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return cls(**own_copy(dict(arguments)))  # each strategy has sinks of its own
    except TypeError as error:
        raise OptionError(
            f"The sink {cls.__name__} cannot be made of {arguments or 'no arguments'}: {error}. Arguments are given in "
            "a run file: sinks: {others: [{sink: PATH, options: {...}}]}."
        ) from error


def sink_files(chosen: Collection[str], strategy: str) -> dict[str, str]:
    """Return the files that the chosen sinks write into the folder of the run, by sink."""
    return {name: text.format(strategy=strategy) for name, text in FILES.items() if name in chosen}
