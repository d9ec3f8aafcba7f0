"""Tables of text that objects show of themselves: aligned in a terminal, HTML in a notebook; without torch.

Objects of every folder make a `Table` of their cells. Those that are shown as one derive from `ShownAsTable`, which
gives them ``__str__``, ``__repr__`` and ``_repr_html_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

__all__ = ["OFF", "ON", "ShownAsTable", "Table", "number_text"]

ON: Final = "on, .remove() takes it off"
"""How an object says that its hooks are on."""
OFF: Final = "off"

_MAX_HTML_ROWS: Final = 500
"""A notebook keeps what it has shown, and a browser slows down on large tables."""
_MAX_CELL: Final = 60


def number_text(value: object) -> str:
    """Return a metric in a few characters: a number with four digits, a container as how much is in it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    text = str(value)
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}…"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header.

    >>> print(Table(("hook", "fired"), [("norms", "12")], numbers=(1,), foot=("1 hook",)).text())
    hook   fired
    ─────  ─────
    norms     12
    1 hook
    """

    header: Sequence[str] = ()
    """The names of the columns; without them there are no rows, only the lines above and below."""
    rows: Sequence[Sequence[str]] = ()
    numbers: Sequence[int] = ()
    """Which columns are aligned on the right."""
    title: str = ""
    """A line above the table."""
    foot: Sequence[str] = ()
    """Lines below the table."""
    rule: bool = True
    """Whether a line is drawn under the header, in text."""

    def with_foot(self, line: str) -> Table:
        """Return the table with one more line below it; the same table if ``line`` is empty."""
        return replace(self, foot=(*self.foot, line)) if line else self

    def text(self) -> str:
        """Return the table in aligned columns."""
        lines = [self.title] if self.title else []
        if self.header:
            cells = [tuple(self.header), *map(tuple, self.rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            if self.rule:
                cells.insert(1, tuple("─" * width for width in self._rule(widths)))
            lines += [self._line(row, widths) for row in cells]
        return "\n".join([*lines, *self.foot])

    def _rule(self, widths: Sequence[int]) -> Sequence[int]:
        """Return how long the rule of each column is: words in the last column may run far beyond its name."""
        last = len(widths) - 1
        return widths if last in self.numbers else [*widths[:-1], len(self.header[last])]

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(
            cell.rjust(width) if column in self.numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(cells)
        ).rstrip()

    def html(self) -> str:
        """Return the table as HTML, of at most 500 rows."""
        parts = [f"<div>{escape(self.title)}</div>"] if self.title else []
        foot = list(self.foot)
        if self.header:
            body = [self._html_row("td", row) for row in self.rows[:_MAX_HTML_ROWS]]
            parts += ["<table>", f"<thead>{self._html_row('th', self.header)}</thead>", "<tbody>", *body, "</tbody>"]
            parts.append("</table>")
            if len(self.rows) > _MAX_HTML_ROWS:
                foot.insert(0, f"… and {len(self.rows) - _MAX_HTML_ROWS:,} more rows; print() shows all")
        parts += [f"<div>{escape(line)}</div>" for line in foot]
        return "\n".join(parts)

    def _html_row(self, tag: str, row: Sequence[str]) -> str:
        cells = [
            f'<{tag} style="text-align: {"right" if column in self.numbers else "left"}">{escape(cell)}</{tag}>'
            for column, cell in enumerate(row)
        ]
        return f"<tr>{''.join(cells)}</tr>"


class ShownAsTable:
    """Gives an object the representations of its table: ``print(thing)``, and ``thing`` at the end of a cell.

    A subclass defines ``_table()``. One whose hooks come off by ``remove()`` defines ``_state()`` as well: the
    representation, but not ``print``, ends with whether they are on.
    """

    __slots__ = ()

    def _table(self) -> Table:
        """Return what is shown."""
        raise NotImplementedError

    def _state(self) -> str:
        """Return ``ON`` or ``OFF``; nothing for an object that has no hooks."""
        return ""

    def __str__(self) -> str:
        return self._table().text()

    def __repr__(self) -> str:
        return self._table().with_foot(self._state()).text()

    def _repr_html_(self) -> str:
        return self._table().with_foot(self._state()).html()
