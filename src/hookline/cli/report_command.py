"""Make the HTML page of one or more runs, or show them while they go on: ``hookline report``.

`main` calls `report`, which finds the folders of the runs and calls `hookline.report`.
"""

from __future__ import annotations

import sys
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
      hookline report --live runs/mod_arithmetic              # while they go on
    """

    runs: Annotated[Positional[tuple[str, ...]], flag("RUN ...")]
    """Folders of runs, or folders that hold runs."""
    output: Annotated[str | None, arg(metavar="FILE", aliases=("-o",), help_behavior_hint="")] = None
    """Where the page goes; report.html in the first folder if left out."""
    open: Annotated[bool, flag()] = False
    """Show it in the browser."""
    live: Annotated[bool, flag()] = False
    """Write no file; show the runs while they go on, to browsers of this machine alone, until Ctrl-C."""
    port: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The port for --live; one that is free if left out."""


def report(arguments: Sequence[str]) -> int:
    """Make the page, and print where it is."""
    options = parse(ReportOptions, arguments, "report")
    if not options.runs:
        raise OptionError("hookline report needs the folder of a run: hookline report runs/EXPERIMENT/STRATEGY.")
    if options.live:
        return _follow(options)
    if options.port is not None:
        raise OptionError("--port is for --live: a page in a file needs none.")
    folders = [_folder(run) for run in options.runs]
    from hookline.report.report_page import write_page

    page, found = write_page(folders, options.output)
    tell(str(page))
    for line in found:  # beside the path, which a shell may take
        print(f"  {line}", file=sys.stderr)
    if options.open:
        webbrowser.open(page.resolve().as_uri())
    return DONE


def _follow(options: ReportOptions) -> int:
    """Serve the runs until Ctrl-C."""
    if options.output is not None:
        raise OptionError("--live writes no file; leave -o out, or write the page without --live.")
    for run in options.runs:
        if not Path(run).exists():
            run_folder(run)  # raises, and names the runs there are; an empty folder is a run that has not begun
    from hookline.report.live_runs import LiveRuns
    from hookline.report.live_server import LiveServer

    server = LiveServer(LiveRuns(options.runs), port=options.port or 0)
    try:
        tell(server.url)
        tell("Open it in a browser of this machine. Ctrl-C ends it.")
        if options.open:
            webbrowser.open(server.url)
        server.serve()
    except KeyboardInterrupt:
        tell("Ended.")
    finally:
        server.close()
    return DONE


def _folder(path: str) -> Path:
    """Return the folder of the run at ``path``, or ``path`` itself if it holds several runs."""
    from hookline.report.report_runs import find_runs

    folder = Path(path)
    return folder if folder.is_dir() and len(find_runs([folder])) > 1 else run_folder(folder)
