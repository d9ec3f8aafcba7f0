"""Say what a run has left behind: its page, its files, the hooks that raised.

``hookline run`` calls these functions after each strategy of an experiment, and when a script has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hookline.runs.folder import LOG, read_run_json

if TYPE_CHECKING:
    from hookline.runs.run import Run

__all__ = ["failed_hooks", "files_of", "write_page"]

_AFTER_ERROR: Final = {"disable": "was switched off", "warn": "stayed on", "raise": "ended the run"}


def write_page(folders: Sequence[Path], page: Path | None = None) -> list[str] | None:
    """Write the page of runs; return what was found, None without a page. A run does not fail if it cannot be made."""
    try:
        from hookline.report.report_page import write_page

        return write_page(folders, page).found
    except KeyboardInterrupt:
        print(f"hookline: no report.html: stopped. Later: hookline report {folders[0]}", file=sys.stderr)
        raise
    except ImportError as error:  # says what to install
        print(f"hookline: no report.html: {error}", file=sys.stderr)
    except Exception as error:
        print(f"hookline: report.html could not be made: {type(error).__name__}: {error}", file=sys.stderr)
    return None


def files_of(run: Run, folder: Path, strategy: str, *, has_page: bool) -> dict[str, Path]:
    """Return the files of a run by what they are; a page that an earlier part of the run left is out of date."""
    names = {"report": "report.html"} if has_page else {}
    names |= {"records": LOG, **run.sinks.files(strategy), "checkpoints": "checkpoints"}
    return {label: folder / name for label, name in names.items() if (folder / name).exists()}


def failed_hooks(run: Run, folder: Path) -> list[str]:
    """Return a sentence about each hook that raised while the run went on; one that never fired was not attached."""
    found = []
    for name, told in (read_run_json(folder).get("hooks") or {}).items():
        if told.get("failed") and told.get("fired"):
            times = "once" if told["failed"] == 1 else f"{told['failed']} times"
            became = _AFTER_ERROR[run.hooks.on_error]
            found.append(f"The hook {name} raised {times} and {became}: its metrics are incomplete.")
    return found
