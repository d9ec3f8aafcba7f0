"""Make the HTML page of one or more runs: ``hookline report``.

`main` calls `report`, which finds the folders of the runs and calls `hookline.report`.
"""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hookline.cli.main import DONE
from hookline.cli.parse import parse
from hookline.cli.run_folder import run_folder
from hookline.cli.screen import tell
from hookline.config.run_options import flag
from hookline.errors import OptionError

__all__ = ["ReportOptions", "report"]


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
    """Return the folder of the run at ``path``, or ``path`` itself if it holds several runs."""
    from hookline.report.report_runs import find_runs

    folder = Path(path)
    return folder if folder.is_dir() and len(find_runs([folder])) > 1 else run_folder(folder)
