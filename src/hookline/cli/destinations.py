"""Make the sinks of a run from its flags.

`run_command` calls `destinations`, and `run_session` makes new sinks by it for each strategy. A missing package is an
error before training begins, with the line that installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any, Final

import hookline.sinks
from hookline.cli.load_object import load_object, nearest_text
from hookline.config.run_options import SinkOptions
from hookline.errors import OptionError
from hookline.specs.copy_config import own_copy

__all__ = ["BUILT_IN", "ENTRY_POINTS", "FILES", "destinations", "sink_class", "sink_files"]

ENTRY_POINTS: Final = "hookline.sinks"
BUILT_IN: Final = ("csv", "jsonl", "parquet", "tensorboard", "mlflow", "wandb", "prometheus")
"""The sinks that have flags. Every class of ``hookline.sinks`` is known by such a name: ``CSVSink`` is "csv"."""
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


At = Callable[[Sequence[str | int]], AbstractContextManager[None]]
"""Collects the error about what stands at a path of a file; one about a flag it lets through."""


def destinations(
    options: SinkOptions, others: Iterable[tuple[str, dict[str, Any]]], at: At = lambda path: nullcontext()
) -> Callable[[], list[Any]]:
    """Return what makes the sinks, anew for each strategy; raise now if one cannot be imported."""
    made: list[tuple[Any, dict[str, Any]]] = []
    for name in BUILT_IN:
        chosen = getattr(options, f"hook_{name}")
        if chosen is not None and chosen is not False:
            with at(["sinks", name]):
                _check_port(options.hook_prometheus)
                made.append((_available(sink_class(name)), _arguments(name, chosen)))
    made += [(_available(sink_class(path)), {}) for path in options.hook_sink]
    for number, (path, arguments) in enumerate(others):
        with at(["sinks", "others", number]):
            made.append((_available(sink_class(path)), arguments))
    return lambda: [_make(cls, arguments) for cls, arguments in made]


def _available(cls: Any) -> Any:
    """Return `cls`; raise if a package that it needs is missing."""
    if hasattr(cls, "check"):
        cls.check()
    return cls


def _check_port(port: int | None) -> None:
    if port is not None and not 0 <= port <= _LAST_PORT:
        raise OptionError(f"--hook-prometheus takes a port from 0 (one that is free) to {_LAST_PORT}, got {port}.")


def _arguments(name: str, chosen: Any) -> dict[str, Any]:
    return {"wandb": {"project": chosen}, "prometheus": {"port": chosen}}.get(name, {})


def sink_class(name: str) -> Any:
    """Return the class of a sink: one of ``hookline.sinks`` by its name, one by an entry point, or one by its path."""
    own = {public.removesuffix("Sink").lower(): public for public in hookline.sinks.__all__ if public.endswith("Sink")}
    if name in own:
        return getattr(hookline.sinks, own[name])
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in found:
        return found[name].load()
    if ":" not in name and "." not in name:
        raise OptionError(
            f"Unknown sink {name!r}.{nearest_text(name, [*BUILT_IN, *found])} One of your own: package.module:Class."
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
