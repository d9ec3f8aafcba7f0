"""Show objects as tables: aligned text in a terminal, HTML in a notebook.

Listings, receipts, captures, watches, plans of hooks, reports and results of ``debug`` derive from `ShownAsTable`.
Others make a `Table` of their cells (``sinks.memory_sink``, ``debug.parity``, ``debug.diagnose``). These are in
``sites``, ``observe``, ``debug``, ``lifecycle``, ``report``, ``sinks`` and ``testing``: grep for ``hookline.tables``
before you change a name. ``observe.heat_map``, ``observe.capturing`` and ``debug.compare.result`` also use the parts
for HTML, such as `line`, `legend` and `picture`. ``report`` and ``debug`` put the HTML of tables into pages.

This file must not import torch: ``report`` and ``sinks.memory_sink`` use it and start without torch, which takes
seconds to import. The HTML has no script and no style sheet, as viewers drop these from a notebook that they do not
trust. Colours are laid over those of the page and are partly transparent, so a text can be read in a light theme and in
a dark one. Cells are texts. Shading reads numbers out of them (`_number`), so a column that ``heat`` shades holds what
``float`` takes, with commas allowed. Tests: tests/test_tables.py.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final, Literal

ON: Final = "on, .remove() takes it off"
"""How an object says that its hooks are on."""
OFF: Final = "off"
"""The same for hooks that are off."""
THE_MODEL: Final = "(the model)"
"""How tables name a model itself, whose name is empty. sites/receipt.py, debug/audit/audit.py, debug/diagnose/doctor.py
and cli/run.py write the same words out: change them too."""

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
    most: int | None = None
    """How many rows are shown, with a line on the others before the foot; None for all, in HTML 500."""
    rest: str = " more"
    """What that line says after the number of rows that are left out."""
    heat: Literal["column"] | ColourScale | None = None
    """Whether HTML shades numbers: by the largest of their column, or on one scale of colours."""

    def with_foot(self, line: str) -> Table:
        """Return the table with one more line below it; the same table if ``line`` is empty."""
        return replace(self, foot=(*self.foot, line)) if line else self

    def with_state(self, state: str) -> Table:
        """Return the table with a line on whether its hooks are on; the same table if ``state`` is empty."""
        return self.with_foot(state and f"hooks: {state}")

    def text(self) -> str:
        """Return the table in aligned columns."""
        lines = [self.title] if self.title else []
        if self.header:
            cells = [tuple(self.header), *map(tuple, self.rows[: self.most])]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            if self.rule:
                cells.insert(1, tuple("─" * width for width in self._rule(widths)))
            lines += [self._line(row, widths) for row in cells]
        return "\n".join([*lines, *self._left_out(self.most), *self.foot])

    __str__ = text

    def _left_out(self, most: int | None) -> list[str]:
        more = 0 if most is None else len(self.rows) - most
        return [f"… and {more:,}{self.rest}"] if more > 0 else []

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
        parts = [line(self.title)]
        if self.header:
            most = min(self.most or _MAX_HTML_ROWS, _MAX_HTML_ROWS)
            scales = self._scales()
            body = [self._html_row("td", row, scales) for row in self.rows[:most]]
            parts += ["<table>", f"<thead>{self._html_row('th', self.header)}</thead>", "<tbody>", *body, "</tbody>"]
            parts.append("</table>")
            hint = " rows; print() shows all" if self.most is None else ""
            parts += [line(text + hint) for text in self._left_out(most)]
        parts += map(line, self.foot)
        return "\n".join(filter(None, parts))

    _repr_html_ = html

    def _html_row(self, tag: str, row: Sequence[str], scales: Sequence[ColourScale | None] = ()) -> str:
        cells = []
        for column, cell in enumerate(row):
            scale = scales[column] if scales else None
            style = f"text-align: {'right' if column in self.numbers else 'left'}"
            if scale is not None and (number := _number(cell)) is not None:
                style += f"; {shade_style(scale.share(number))}"
            cells.append(f'<{tag} style="{style}">{escape(cell)}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"

    def _scales(self) -> list[ColourScale | None]:
        """Return by which scale to shade the numbers of each column, as ``heat`` says; None: by none."""
        if self.heat is None:
            return []
        one = self.heat if isinstance(self.heat, ColourScale) else None
        columns = enumerate(zip(*self.rows, strict=True))
        return [(one or _scale_of(cells)) if column in self.numbers else None for column, cells in columns]


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def _scale_of(cells: Sequence[str]) -> ColourScale:
    """Return the scale from minus to plus the largest size; if all numbers are equal, one that shades nothing."""
    finite = [number for number in map(_number, cells) if number is not None and math.isfinite(number)]
    largest = max(map(abs, finite)) if len(set(finite)) > 1 else math.inf
    return ColourScale(-largest, largest)


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
        return self._table().with_state(self._state()).text()

    def _repr_html_(self) -> str:
        return self._table().with_state(self._state()).html()


# -- what is more than cells ---------------------------------------------------------------------------------------

_ABOVE: Final = (222, 45, 38)
_BELOW: Final = (49, 107, 232)
_NOT_FINITE: Final = (240, 190, 0)
"""Red for numbers above zero, blue below, yellow for what is not finite; the stronger, the less transparent."""
_MOST_OF_TEXT: Final = 0.6
"""How much of a shade covers the page behind a text, at most: the text stays readable on both themes."""
_LEVELS: Final = 127
"""Shades on each side of zero. With zero, and the shade for NaN and Inf, they fill the 256 of a picture's palette."""
_WIDEST_CELL: Final = 16
"""How many pixels of the screen one number of a picture is wide and high, at most."""
_WIDTH: Final = 480
"""How many pixels of the screen a picture is wide, at most. One with more columns than that has a pixel for each."""


def line(text: str) -> str:
    """Return a text of one or more lines as HTML."""
    return "".join(f"<div>{escape(part)}</div>" for part in text.splitlines())


def shade_style(share: float, most: float = _MOST_OF_TEXT) -> str:
    """Return the CSS of a background for a number between -1 and 1, or one that is not finite."""
    red, green, blue, strength = _colour(share)
    return f"background-color: rgba({red}, {green}, {blue}, {most * strength:.2f})"


def _colour(share: float) -> tuple[int, int, int, float]:
    """Return red, green, blue and the opacity: the root of ``share``, so that small numbers show beside a large one."""
    if not math.isfinite(share):
        return (*_NOT_FINITE, 1.0)
    return (*(_ABOVE if share > 0 else _BELOW), math.sqrt(min(1.0, abs(share))))


@dataclass(frozen=True, slots=True)
class ColourScale:
    """The numbers that have the strongest colours.

    With ``low`` below zero and ``high`` above it, zero has no colour, and both ends are equally strong. With both on
    one side of zero, the one that is nearer to zero has no colour.
    """

    low: float
    high: float

    def share(self, number: float) -> float:
        """Return the colour of a number, from -1 to 1; past an end, the colour of the end; NaN and Inf as they are.

        >>> ColourScale(-2, 4).share(2), ColourScale(1, 3).share(2), ColourScale(-3, -1).share(-9)
        (0.5, 0.5, -1.0)
        """
        if not math.isfinite(number):
            return number
        inside = max(self.low, min(self.high, number))
        if self.low < 0 < self.high:
            return inside / (self.high if inside > 0 else -self.low)
        return (inside - (self.low if self.low >= 0 else self.high)) / (self.high - self.low)


def legend(scale: ColourScale, *, behind_text: bool) -> str:
    """Return a line of HTML with five or three colours of ``scale`` and their numbers.

    ``behind_text``: the colours are those of cells, which are paler than those of a picture.
    """
    sides = [(scale.low, 0.0), (0.0, scale.high)] if scale.low < 0 < scale.high else [(scale.low, scale.high)]
    numbers = [scale.low, *(number for low, high in sides for number in ((low + high) / 2, high))]
    styles = [shade_style(scale.share(number), _MOST_OF_TEXT if behind_text else 1.0) for number in numbers]
    marks = [f'<span style="{style}">&emsp;</span> {x:.3g}' for style, x in zip(styles, numbers, strict=True)]
    return f"<div><small>colours: {' '.join(marks)}</small></div>"


def picture(shares: Sequence[Sequence[float]], words: str) -> str:
    """Return numbers between -1 and 1 as an image, one pixel each and enlarged by the browser; ``words`` describe it.

    It is a PNG in the text itself, which also those viewers show that drop SVG and styles.
    """
    height, width = len(shares), max(map(len, shares), default=0)
    cell = max(1, min(_WIDEST_CELL, _WIDTH // max(1, width)))
    rows = b"".join(b"\0" + bytes(map(_level, row)).ljust(width, bytes([_LEVELS])) for row in shares)
    # Each row begins with the number of its filter, 0 for none; a short row is filled up with the level of zero.
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, colours from the palette
    chunks = [(b"IHDR", header), *_palette(), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)
    return (
        f'<img src="data:image/png;base64,{base64.b64encode(data).decode()}" alt="{escape(words)}" '
        f'width="{width * cell}" height="{height * cell}" '
        'style="image-rendering: pixelated; border: 1px solid #8888; max-width: none">'
    )


def _level(share: float) -> int:
    """Return the place of a number in the palette: zero in the middle, what is not finite at the end."""
    if not math.isfinite(share):
        return 2 * _LEVELS + 1
    return _LEVELS + round(_LEVELS * max(-1.0, min(1.0, share)))


def _palette() -> list[tuple[bytes, bytes]]:
    """Return the chunks with the colours of all levels, in the order of `_level`, and how opaque each is."""
    levels = [_colour(level / _LEVELS) for level in range(-_LEVELS, _LEVELS + 1)] + [_colour(math.nan)]
    opaque = bytes(round(255 * strength) for *_, strength in levels)
    return [(b"PLTE", b"".join(bytes(colour[:3]) for colour in levels)), (b"tRNS", opaque)]


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Return one chunk of a PNG: length, kind, data, checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
