"""Make the sinks of a run from its flags and its run file, and look up sinks by name.

The command line and the run files of adapters call `sink_maker`, so that a name means the same in both; ``replay``
calls `sink_class`. A missing package is an error before training begins, with the line that installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any, Final

import hookline.sinks
from hookline.errors import OptionError
from hookline.load import load_object
from hookline.messages import unknown_name_text
from hookline.plain import own_copy
from hookline.runs.run_options import SinkOptions

__all__ = [
    "ENTRY_POINTS", "FILES", "WITH_FLAG", "check_package", "sink_class", "sink_files", "sink_maker", "sink_names",
]  # fmt: skip

ENTRY_POINTS: Final = "hookline.sinks"
WITH_FLAG: Final = ("csv", "jsonl", "parquet", "tensorboard", "mlflow", "wandb", "prometheus")
"""The sinks with a flag ``--hook-NAME`` of their own; `sink_names` has all."""
FILES: Final = {
    "csv": "{strategy}.csv",
    "jsonl": "{strategy}.jsonl",
    "parquet": "{strategy}.parquet",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow.db",
    "wandb": "wandb",
}
"""The file that each leaves in the folder of the run."""
_LAST_PORT: Final = 65535


ErrorCollector = Callable[[Sequence[str | int]], AbstractContextManager[None]]
"""Takes the path of a value in the run file, and returns a context. The context collects errors about values from the
run file, and raises errors about flags."""


def sink_maker(
    flags: Mapping[str, Any],
    others: Iterable[tuple[str, dict[str, Any]]],
    collect_errors_at: ErrorCollector = lambda path: nullcontext(),
) -> Callable[[], list[Any]]:
    """Return a function that makes the sinks of flags, by name, and of ``others``, new ones at each call.

    Raise now if a sink is unknown, or if its package is missing.
    """
    made: list[tuple[Any, dict[str, Any]]] = []
    for name in WITH_FLAG:
        chosen = flags[f"hook_{name}"]
        if chosen is not None and chosen is not False:
            with collect_errors_at(["sinks", name]):
                made.append((check_package(sink_class(name)), _arguments(name, chosen)))
    made += [(check_package(sink_class(path)), {}) for path in flags.get("hook_sink", ())]
    for number, (path, arguments) in enumerate(others):
        with collect_errors_at(["sinks", "others", number]):
            made.append((check_package(sink_class(path)), arguments))
    return lambda: [_make(cls, arguments) for cls, arguments in made]


def check_package(cls: Any) -> Any:
    """Return the sink class ``cls``; raise if a package that it needs is missing."""
    if hasattr(cls, "check"):
        cls.check()
    return cls


def _check_port(port: int) -> None:
    if not 0 <= port <= _LAST_PORT:
        raise OptionError(f"--hook-prometheus takes a port from 0 (one that is free) to {_LAST_PORT}, got {port}.")


def _arguments(name: str, chosen: Any) -> dict[str, Any]:
    """Return the arguments of the sink ``name``, made from the value of its flag."""
    if name == "prometheus":
        _check_port(chosen)
        return {"port": chosen}
    return {"project": chosen} if name == "wandb" else {}


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


def _make(cls: Any, arguments: dict[str, Any]) -> Any:
    try:
        return cls(**own_copy(arguments))  # each strategy has sinks of its own
    except TypeError as error:
        raise OptionError(
            f"The sink {cls.__name__} cannot be made of {arguments or 'no arguments'}: {error}. Arguments are given in "
            "a run file: sinks: {others: [{sink: PATH, options: {...}}]}."
        ) from error


def sink_files(options: SinkOptions, strategy: str) -> dict[str, str]:
    """Return the files that the chosen sinks write into the folder of the run, by sink."""
    return {name: text.format(strategy=strategy) for name, text in FILES.items() if getattr(options, f"hook_{name}")}
