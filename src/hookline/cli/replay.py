"""Feed the records of a run to another sink: ``hookline replay``.

`main` calls `replay`, which finds the folder of the run, makes the sink and calls `hookline.records.replay`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from hookline.cli.main import DONE
from hookline.cli.screen import tell
from hookline.errors import OptionError
from hookline.runs.flags import Show, parse
from hookline.runs.folder import LOG, read_run_json, run_folder
from hookline.runs.run import Sinks

__all__ = ["ReplayOptions", "replay"]

_PATHS: Final = ("filepath", "path", "log_dir", "dir", "tracking_uri")
"""The arguments of sinks that say where they write."""


@dataclass
class ReplayOptions:
    """Feed the records of a run to another sink, after the run or while it lasts.

    Examples:
      hookline replay runs/mod_arithmetic/random --to tensorboard
      hookline replay runs/mod_arithmetic/random --to csv --into metrics.csv
      hookline replay runs/mod_arithmetic/random --to wandb --project grokking
    """

    run: Annotated[str, Show("RUN", is_word=True)]
    """The folder of a run, or its records.jsonl."""
    to: Annotated[str, Show("SINK|PKG.MOD:CLASS")]
    """The sink that gets the records: csv, jsonl, parquet, tensorboard, mlflow, wandb, prometheus, console, memory,
    or one of your own."""
    into: Annotated[str | None, Show("PATH")] = None
    """The file or folder; in the run's folder if left out."""
    project: Annotated[str | None, Show("PROJECT")] = None
    """The project, for wandb; the experiment's name if left out."""


def replay(arguments: Sequence[str]) -> int:
    """Feed the records of the run to the sink, and print where they went."""
    options = parse(ReplayOptions, arguments, "replay")
    folder = run_folder(options.run)
    if not (folder / LOG).exists():
        raise OptionError(f"{folder} has no {LOG}: a run without hooks has no records to replay.")
    from hookline.records.readers import replay as replay_log
    from hookline.runs.build import known_sink

    cls = known_sink(options.to)
    sink = cls(**_arguments(cls, options, folder))

    # The contexts of the log name the folder in which the run was made; it may have been moved or copied since.
    replay_log(folder / LOG, sink, context={"run_dir": str(folder)})
    into = _written(sink) or options.into or _usual_place(options.to, folder)
    tell(f"{folder / LOG} is replayed to {options.to}{f', into {into}' if into else ''}.")
    return DONE


def _written(sink: Any) -> str:
    """Return the files of a sink that tells them: one that was there already is not written over."""
    return ", ".join(map(str, getattr(sink, "files", ())))


def _usual_place(to: str, folder: Path) -> Path | None:
    """Return the file of ``folder`` that the sink ``to`` has written without ``--into``; None if there is none."""
    name = Sinks.FILES.get(to, "").format(strategy=read_run_json(folder).get("strategy", folder.name))
    return folder / name if name and (folder / name).exists() else None


def _arguments(cls: Any, options: ReplayOptions, folder: Path) -> dict[str, Any]:
    """Return the arguments that make a sink of class ``cls``."""
    takes = inspect.signature(cls).parameters
    found: dict[str, Any] = {}
    if options.into is not None:
        name = next((name for name in _PATHS if name in takes), None)
        if name is None:
            raise OptionError(f"--into: {cls.__name__} does not write to a path; leave it out.")
        found[name] = _store(options.into) if name == "tracking_uri" else options.into
    if "project" in takes:
        found["project"] = options.project or read_run_json(folder).get("experiment", "hookline")
    elif options.project is not None:
        raise OptionError(f"--project goes with --to wandb, not with {options.to}.")
    return found


def _store(into: str) -> str:
    """Return the MLflow store for ``--into``: for a folder, the database in it, as newer versions of MLflow need."""
    if "://" in into or into.endswith(".db"):
        return into
    Path(into).mkdir(parents=True, exist_ok=True)
    return str(Path(into) / "mlflow.db")
