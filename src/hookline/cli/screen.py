"""Print what a command says: lines, tables, JSON, warnings, errors; and show a run while it lasts.

Every command prints by these functions; a run takes its console sink and its progress from `Screen`. rich is imported
when something is shown.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hookline.screen import RunProgress, can_redraw

if TYPE_CHECKING:
    from rich.console import Console

    from hookline.runs.run import Run

_WIDE: Final = 160
"""Columns of a table in a file or a pipe."""
_MOST_IN_CELL: Final = 12
_JSON_VERSION: Final = 2
"""Goes up when a key of ``--json`` is renamed, taken away, or means something else; keys may be added."""


def _console() -> Console:
    """Return where to print: as wide as the terminal or as COLUMNS says; wide enough for tables in a file or a pipe."""
    from rich.console import Console

    is_wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(width=_WIDE if is_wide else None, highlight=False, soft_wrap=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to the standard output; nothing in it is taken for markup, and no line ends in blanks."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=place == 0)  # a name is to be found and copied
    for row in rows:
        made.add_row(*[Text(cell) for cell in row])
    screen = _console()
    with screen.capture() as caught:
        screen.print(made)
    lines = caught.get().splitlines()
    print("\n".join(line.rstrip() for line in lines), end="\n\n" if title else "\n", flush=True)


def tell(text: str = "") -> None:
    """Print a line as it is."""
    print(text, flush=True)


def tell_found(command: str, values: dict[str, Any], text: object, *, as_json: bool) -> None:
    """Print what ``command`` has found: ``values`` as JSON, or ``text``."""
    if as_json:
        tell_json(command, values)
    else:
        tell(str(text))


def tell_plan(command: str, plan: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what ``command`` would do, or has read: as JSON, or lists of rows as tables and all else as lines."""
    if as_json:
        tell_json(command, plan)
        return
    for key, value in plan.items():
        label = key.replace("_", " ")
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            columns = [column.replace("_", " ") for column in value[0]]
            print_table(label.capitalize(), columns, [[_cell(one) for one in row.values()] for row in value])
        elif value is not False and value not in (None, [], {}):
            tell(f"{label}  {_cell(value)}")


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={one!r}" for name, one in value.items())
    if not isinstance(value, list):
        return str(value)
    more = f", … {len(value)} in all" if len(value) > _MOST_IN_CELL else ""
    return ", ".join(map(str, value[:_MOST_IN_CELL])) + more or "–"


def tell_json(command: str, values: Mapping[str, Any]) -> None:
    """Print ``values`` as the JSON of ``command``, with format and version before them."""
    found = {"format": f"hookline.{command}", "version": _JSON_VERSION, **values}
    tell(json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False))


class Screen:
    """Show a run: its metrics, its progress bar, its lines."""

    def __init__(self, run: Run, live_metrics: Mapping[str, Mapping[str, str]], *, quiet: bool = False) -> None:
        self._console = _console()
        usual = "live" if can_redraw(self._console) else "silent"
        self.mode = "none" if quiet else run.console or usual
        """``"live"``, ``"tables"``, ``"silent"`` or ``"none"``."""
        self._live_metrics = live_metrics
        self._sink: Any = None

    def sinks(self, snapshot_every: int | None = None) -> list[Any]:
        """Return the console sink for the next strategy; none if it is to be quiet.

        Args:
            snapshot_every: How many epochs from one snapshot to the next; None or 0 if epochs do not count them.
        """
        if self.mode in ("none", "silent"):
            return []
        from hookline.sinks.console_sink import ConsoleSink

        mode: Any = "normal" if self.mode == "tables" else self.mode
        self._sink = ConsoleSink(mode, self._live_metrics, snapshot_every=snapshot_every, console=self._console)
        return [self._sink]

    def progress(self) -> Any:
        """Return what shows how far the run is, for the loop; False where nothing is shown."""
        if self.mode == "none":
            return False
        return RunProgress(self._console) if self._sink is None else self._sink

    def say(self, text: str) -> None:
        """Print a line, unless nothing is to be shown."""
        if self.mode != "none":
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


# -- errors and warnings -----------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    """Print to the standard error of the moment: while a progress bar is drawn, that is the bar's."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line; at level INFO not where an error came from: a warning has said it in a sentence."""
        if record.levelno <= logging.INFO and record.exc_info:
            return
        shown = "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else ""
        print(f"{self._prefix}{record.getMessage()}\n{shown}", end="", file=sys.stderr)


@contextmanager
def messages(prefix: str = "hookline: ") -> Iterator[None]:
    """Show warnings and log messages of hookline as lines on the standard error, while the block lasts."""
    from hookline.errors import HooklineWarning

    logger = logging.getLogger("hookline")
    handler = _Lines(prefix)
    level = logger.level
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, HooklineWarning):
            print(f"{prefix}warning: {message}", file=sys.stderr)
        else:
            shown(message, category, filename, lineno, file, line)

    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
        logger.setLevel(level)
        logger.removeHandler(handler)
