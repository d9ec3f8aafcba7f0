"""Make the HTML page of runs (``hookline report``), and feed the records of a run to a sink (``hookline replay``).

`main` calls `report` and `replay`; they find the folder of a run and call `hookline.report` and `hookline.sinks`.
"""

from __future__ import annotations

import inspect
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from tyro.conf import Positional, arg

from hookline.cli.destinations import FILES, sink_class
from hookline.cli.main import DONE
from hookline.cli.parse import parse
from hookline.cli.run_folder import LOG, read_run_json, run_folder
from hookline.cli.screen import tell
from hookline.config.run_options import flag
from hookline.errors import OptionError

__all__ = ["ReplayOptions", "ReportOptions", "replay", "report"]

_PATHS: Final = ("filepath", "path", "log_dir", "dir", "tracking_uri")
"""The arguments of sinks that say where they write."""


@dataclass
class ReportOptions:
    """Make one HTML page of one or more runs; several are compared.

    Examples:
      hookline report runs/mod_arithmetic/random
      hookline report runs/mod_arithmetic                     # all runs in it
      hookline report runs/mod_arithmetic/random runs/mod_arithmetic/stride -o compared.html --open
    """

    runs: Annotated[Positional[tuple[str, ...]], flag("RUN ...")]
    """Folders of runs, or folders that hold runs."""
    output: Annotated[str | None, arg(metavar="FILE", aliases=("-o",), help_behavior_hint="")] = None
    """Where the page goes; report.html in the first folder if left out."""
    open: Annotated[bool, flag()] = False
    """Show it in the browser."""


def report(arguments: Sequence[str]) -> int:
    """Make the page, and print where it is."""
    options = parse(ReportOptions, arguments, "report")
    if not options.runs:
        raise OptionError("hookline report needs the folder of a run: hookline report runs/EXPERIMENT/STRATEGY.")
    folders = [_folder(run) for run in options.runs]
    from hookline.report.report_page import write_report

    page = write_report(folders, None if options.output is None else Path(options.output))
    tell(str(page))
    if options.open:
        webbrowser.open(page.resolve().as_uri())
    return DONE


def _folder(path: str) -> Path:
    """Return the folder of the run that is meant, or `path` itself if it holds several runs."""
    from hookline.report.report_runs import find_runs

    folder = Path(path)
    return folder if folder.is_dir() and len(find_runs([folder])) > 1 else run_folder(folder)


@dataclass
class ReplayOptions:
    """Feed the records of a run to another destination, now that it is over or while it lasts.

    Examples:
      hookline replay runs/mod_arithmetic/random --to tensorboard
      hookline replay runs/mod_arithmetic/random --to csv --into metrics.csv
      hookline replay runs/mod_arithmetic/random --to wandb --project grokking
    """

    run: Annotated[Positional[str], flag("RUN")]
    """The folder of a run, or its records.jsonl."""
    to: Annotated[str, flag("csv|jsonl|parquet|tensorboard|mlflow|wandb|PKG.MOD:CLASS")]
    """Where to."""
    into: Annotated[str | None, flag("PATH")] = None
    """The file or folder; in the run's folder if left out."""
    project: Annotated[str | None, flag("PROJECT")] = None
    """The project, for wandb; the experiment's name if left out."""


def replay(arguments: Sequence[str]) -> int:
    """Feed the records of a run to another sink."""
    options = parse(ReplayOptions, arguments, "replay")
    folder = run_folder(options.run)
    if not (folder / LOG).exists():
        raise OptionError(f"{folder} has no {LOG}: a run without hooks has no records to replay.")
    cls = sink_class(options.to)
    if hasattr(cls, "check"):
        cls.check()
    sink = cls(**_arguments(cls, options, folder))
    from hookline.sinks import replay_log

    context = _context(folder)
    if context:
        sink.set_run_context(**context)
    replay_log.replay(folder / LOG, sink)
    close = getattr(sink, "close", None)
    if close is not None:
        close()
    into = options.into or _usual_place(options.to, folder, context)
    tell(f"{folder / LOG} is replayed to {options.to}{f', into {into}' if into else ''}.")
    return DONE


def _usual_place(to: str, folder: Path, context: Mapping[str, Any]) -> Path | None:
    """Return where a sink without a given place has written."""
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
        found["project"] = options.project or read_run_json(folder).get("experiment", "hookline")
    elif options.project is not None:
        raise OptionError(f"--project goes with --to wandb, not with {options.to}.")
    return found


def _store(into: str) -> str:
    """Return the store for ``--into``; for a folder, a file in it: MLflow keeps its newer stores in a database."""
    if "://" in into or into.endswith(".db"):
        return into
    Path(into).mkdir(parents=True, exist_ok=True)
    return str(Path(into) / "mlflow.db")


def _context(folder: Path) -> dict[str, Any]:
    """Return the context that the run gave its sinks."""
    facts = read_run_json(folder)
    if not facts:
        return {}
    return {
        "strategy": facts.get("strategy", folder.name),
        "experiment_name": facts.get("experiment"),
        "run_dir": str(folder),
        "config": facts.get("config", {}),
    }
