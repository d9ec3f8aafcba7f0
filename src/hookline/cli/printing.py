"""What the command line prints: tables, lines, sizes.

Used by every command; rich is imported when something is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "print_table", "size", "table", "tell"]

_WIDE: Final = 160
"""Columns where nobody sees the end of a line: in a file, in a pipe."""


def console(*, stderr: bool = False) -> Console:
    """Where to print: as wide as the terminal, or as COLUMNS says; wide enough for tables in a file or a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    is_wide = not stream.isatty() and not os.environ.get("COLUMNS")
    return Console(stderr=stderr, width=_WIDE if is_wide else None, highlight=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; nothing in it is taken for markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=place == 0)  # a name is to be found and copied
    for row in rows:
        made.add_row(*[Text(cell) for cell in row])
    return made


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to the standard output, without the blanks at the ends of lines that rich fills it up with."""
    screen = console()
    with screen.capture() as caught:
        screen.print(table(title, columns, rows))
    lines = caught.get().splitlines()
    print("\n".join(line.rstrip() for line in lines), end="\n\n" if title else "\n", flush=True)


def tell(text: str = "", *, stderr: bool = False) -> None:
    """Print a line as it is."""
    print(text, file=sys.stderr if stderr else sys.stdout, flush=True)


def size(nbytes: int) -> str:
    """Bytes, as people say them."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
