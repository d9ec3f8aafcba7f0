"""``hookline replay RUN --to DESTINATION``: the records of a run, fed to a sink it did not have.

Takes the folder of a run, hands its log to `hookline.sinks.replay_log`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from tyro.conf import Positional, arg

from hookline.cli.destinations import FILES, sink_class
from hookline.cli.error_messages import DONE
from hookline.cli.folder import LOG, read_run_file, run_folder
from hookline.cli.parse import parse
from hookline.cli.printing import tell
from hookline.errors import OptionError

__all__ = ["ReplayOptions", "command"]

_PATHS: Final = ("filepath", "path", "log_dir", "dir", "tracking_uri")
"""What sinks call the place they write to."""


@dataclass
class ReplayOptions:
    """Feed the records of a run to another destination, now that it is over or while it lasts.

    Examples:
      hookline replay runs/mod_arithmetic/random --to tensorboard
      hookline replay runs/mod_arithmetic/random --to csv --into metrics.csv
      hookline replay runs/mod_arithmetic/random --to wandb --project grokking
    """

    run: Annotated[Positional[str], arg(metavar="RUN", help_behavior_hint="")]
    """The folder of a run, or its records.jsonl."""
    to: Annotated[str, arg(metavar="csv|jsonl|parquet|tensorboard|mlflow|wandb|PKG.MOD:CLASS", help_behavior_hint="")]
    """Where to."""
    into: Annotated[str | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The file or folder; in the run's folder if left out."""
    project: Annotated[str | None, arg(metavar="PROJECT", help_behavior_hint="")] = None
    """The project, for wandb; the experiment's name if left out."""


def command(arguments: Sequence[str]) -> int:
    """Replay it."""
    options = parse(ReplayOptions, arguments, "replay")
    folder = run_folder(options.run)
    if not (folder / LOG).exists():
        raise OptionError(f"{folder} has no {LOG}: a run without hooks has no records to replay.")
    cls = sink_class(options.to)
    if hasattr(cls, "check"):
        cls.check()
    sink = cls(**_arguments(cls, options, folder))
    from hookline.sinks.replay_log import replay

    context = _context(folder)
    if context:
        sink.set_run_context(**context)
    replay(folder / LOG, sink)
    close = getattr(sink, "close", None)
    if close is not None:
        close()
    into = options.into or _usual_place(options.to, folder, context)
    tell(f"{folder / LOG} is replayed to {options.to}{f', into {into}' if into else ''}.")
    return DONE


def _usual_place(to: str, folder: Path, context: Mapping[str, Any]) -> Path | None:
    """Where a sink that was told no place has written."""
    name = FILES.get(to, "").format(strategy=context.get("strategy", folder.name))
    return folder / name if name and (folder / name).exists() else None


def _arguments(cls: Any, options: ReplayOptions, folder: Path) -> dict[str, Any]:
    takes = inspect.signature(cls).parameters
    found: dict[str, Any] = {}
    if options.into is not None:
        name = next((name for name in _PATHS if name in takes), None)
        if name is None:
            raise OptionError(f"--into: {cls.__name__} does not write to a path; leave it out.")
        found[name] = _store(options.into) if name == "tracking_uri" else options.into
    if "project" in takes:
        found["project"] = options.project or read_run_file(folder).get("experiment", "hookline")
    elif options.project is not None:
        raise OptionError(f"--project goes with --to wandb, not with {options.to}.")
    return found


def _store(into: str) -> str:
    """Of a folder, the file in it: MLflow keeps its newer stores in a database."""
    if "://" in into or into.endswith(".db"):
        return into
    Path(into).mkdir(parents=True, exist_ok=True)
    return str(Path(into) / "mlflow.db")


def _context(folder: Path) -> dict[str, Any]:
    """What the run would have told the sink."""
    facts = read_run_file(folder)
    if not facts:
        return {}
    return {
        "strategy": facts.get("strategy", folder.name),
        "experiment_name": facts.get("experiment"),
        "run_dir": str(folder),
        "config": facts.get("config", {}),
    }
