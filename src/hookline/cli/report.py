"""Make the HTML page of one or more runs, once or again and again while they go on: ``hookline report``.

`main` calls `report`, which finds the folders of the runs and calls `hookline.report`.
"""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from hookline.cli.main import DONE
from hookline.cli.screen import tell
from hookline.errors import OptionError
from hookline.runs.flags import Show, parse
from hookline.runs.folder import run_folder

if TYPE_CHECKING:
    from hookline.report.report_page import WrittenPage

__all__ = ["ReportOptions", "report"]

_EVERY: Final = 5.0
"""Seconds from one page of ``--live`` to the next, and until a page loads itself anew."""
_LOOK_EVERY: Final = 0.5
"""Seconds from one look for a folder that is not there yet to the next."""


@dataclass
class ReportOptions:
    """Make one HTML page of one or more runs; several are compared.

    Examples:
      hookline report runs/mod_arithmetic/random
      hookline report runs/mod_arithmetic                     # all runs in it
      hookline report runs/mod_arithmetic/random runs/mod_arithmetic/stride -o compared.html --open
      hookline report --live runs/mod_arithmetic              # while they go on
    """

    runs: Annotated[tuple[str, ...], Show("RUN ...", is_word=True)]
    """Folders of runs, or folders that hold runs."""
    output: Annotated[str | None, Show("FILE", short="-o")] = None
    """Where the page goes; report.html in the first folder if left out."""
    open: bool = False
    """Show it in the browser."""
    live: bool = False
    """Write the page again every few seconds while the runs go on; it loads itself anew. Waits for a run to begin."""


def report(arguments: Sequence[str]) -> int:
    """Make the page, and print where it is."""
    options = parse(ReportOptions, arguments, "report")
    if not options.runs:
        raise OptionError("hookline report needs the folder of a run: hookline report runs/EXPERIMENT/STRATEGY.")
    if options.live:
        page = _follow(options)
    else:
        page = _write([_folder(run) for run in options.runs], options)
        _tell_page(page, options)
    for line in [] if page is None else page.found:  # beside the path, which a shell may take
        print(f"  {line}", file=sys.stderr)
    return DONE


def _write(runs: Sequence[str | Path], options: ReportOptions, *, live: float = 0.0) -> WrittenPage:
    from hookline.report.report_page import write_page

    return write_page(runs, options.output, live=live)


def _tell_page(page: WrittenPage, options: ReportOptions) -> None:
    tell(str(page.path))
    if options.open:
        webbrowser.open(page.path.resolve().as_uri())


def _follow(options: ReportOptions) -> WrittenPage | None:
    """Write the page again and again, until all runs have ended or Ctrl-C; the last one does not load itself anew."""
    page = None
    try:
        _wait_for(options.runs)
        while page is None or not page.is_over:
            began, is_first = time.monotonic(), page is None
            page = _write(options.runs, options, live=_EVERY)
            if is_first:
                _tell_page(page, options)
                tell(f"It is written every {_EVERY:g} seconds. Ctrl-C ends that.")
            time.sleep(0 if page.is_over else max(_EVERY, 9 * (time.monotonic() - began)))  # a tenth of one core
    except KeyboardInterrupt:
        tell("Ended.")
        return None if page is None else _write(options.runs, options)
    return page


def _wait_for(runs: Sequence[str]) -> None:
    """Wait until all folders are there."""
    missing = [run for run in runs if not Path(run).exists()]
    if missing:
        print(f"Waiting for {', '.join(missing)}; Ctrl-C ends that.", file=sys.stderr)
    while not all(Path(run).exists() for run in missing):
        time.sleep(_LOOK_EVERY)


def _folder(path: str) -> Path:
    """Return the folder of the run at ``path``, or ``path`` itself if it holds several runs."""
    from hookline.report.report_runs import find_runs

    folder = Path(path)
    return folder if folder.is_dir() and len(find_runs([folder])) > 1 else run_folder(folder)
