"""Make the HTML of a notebook that needs more than rows of text: shaded cells, pictures of numbers, trees that fold.

`hookline.tables` shades cells by it, `HeatMap` draws pictures, ``find`` draws trees. There is no script and no style
sheet, which viewers drop from a notebook that they do not trust. Colours are laid over
those of the page with some transparency, which reads in a light theme and in a dark one.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

__all__ = ["ColourScale", "TreeLine", "folding_tree", "legend", "line", "picture", "shade_style"]

_ABOVE: Final = (222, 45, 38)
_BELOW: Final = (49, 107, 232)
_NOT_FINITE: Final = (240, 190, 0)
"""Red for numbers above zero, blue below, yellow for what is not finite; the stronger, the less transparent."""
_MOST_OF_TEXT: Final = 0.6
"""How much of a shade covers the page behind a text, at most: the text stays readable on both themes."""
_LEVELS: Final = 127
"""Shades on each side of zero; with zero and the one for NaN and Inf they fill the palette of a picture."""
_WIDEST_CELL: Final = 16
_WIDTH: Final = 480
"""Pixels on the screen: of one number of a picture at most, and of a whole one at least where numbers are many."""
_MAX_LINES: Final = 400
"""Lines of a tree. A browser folds many more, but a notebook keeps what it has shown in its file."""
_MAX_OPEN: Final = 24
"""A tree of so many lines is open from the start."""
_INDENT: Final = 'style="margin-left: 1.4em"'


def line(text: str) -> str:
    """Return a text of one or more lines as HTML."""
    return "".join(f"<div>{escape(part)}</div>" for part in text.splitlines())


def shade_style(share: float, most: float = _MOST_OF_TEXT) -> str:
    """Return the CSS of a background for a number between -1 and 1, or one that is not finite."""
    red, green, blue, strength = _colour(share)
    return f"background-color: rgba({red}, {green}, {blue}, {most * strength:.2f})"


def _colour(share: float) -> tuple[int, int, int, float]:
    """Return red, green, blue and how opaque; by the root, or one large number would leave all others blank."""
    if not math.isfinite(share):
        return (*_NOT_FINITE, 1.0)
    return (*(_ABOVE if share > 0 else _BELOW), math.sqrt(min(1.0, abs(share))))


@dataclass(frozen=True, slots=True)
class ColourScale:
    """Numbers at the ends of the colours. From ``low`` below zero to ``high`` above it, zero has no colour, and each
    side is as strong at its end; on one side of zero, the end that is nearer to it has none.
    """

    low: float
    high: float

    def share(self, number: float) -> float:
        """Return which colour a number has, from -1 to 1; past an end that of the end, and what is not finite as is.

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
    """Return a line of colours with their numbers, from end to end of ``scale``: as of a picture, or of cells."""
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
    levels = [_colour(level / _LEVELS) for level in range(-_LEVELS, _LEVELS + 1)] + [_colour(math.nan)]
    opaque = bytes(round(255 * strength) for *_, strength in levels)
    return [(b"PLTE", b"".join(bytes(colour[:3]) for colour in levels)), (b"tRNS", opaque)]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# -- trees ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TreeLine:
    """What a tree shows of one name, behind its last part."""

    words: str = ""
    """What it is."""
    marks: Sequence[tuple[str, float | None]] = ()
    """Texts of a second line with their shades, between -1 and 1; None for a text without."""


@dataclass(slots=True)
class _Node:
    part: str
    line: TreeLine = field(default_factory=TreeLine)
    inside: dict[str, _Node] = field(default_factory=dict)
    is_shown: bool = False
    is_open: bool = False

    def size(self) -> int:
        """Return how many nodes are inside, at any depth."""
        return sum(1 + child.size() for child in self.inside.values())


def folding_tree(lines: Mapping[str, TreeLine], root: str, unfold: Sequence[str] = ()) -> str:
    """Return dotted names as a tree whose branches fold; the empty name is the root, else ``root`` names it.

    Branches around the names in ``unfold`` are open. It has 400 lines at most, those near the root first; a branch
    that lacks some says how many.
    """
    top = _Node(root)
    for name, text in lines.items():
        node = top
        for part in name.split(".") if name else ():
            node = node.inside.setdefault(part, _Node(part))
        node.line = text
    for name in unfold:
        node = top
        for part in name.split(".") if name else ():
            node.is_open = True
            node = node.inside[part]
    _choose(top, _MAX_LINES)
    depth = 99 if top.size() <= _MAX_OPEN else 1
    return "\n".join(_html(top, depth))


def _choose(top: _Node, most: int) -> None:
    """Mark the nodes to be shown, level by level."""
    level = [top]
    while level and most > 0:
        for node in level[:most]:
            node.is_shown = True
        most -= len(level)
        level = [child for node in level if node.is_shown for child in node.inside.values()]


def _html(node: _Node, open_levels: int) -> Iterator[str]:
    text = f"<strong>{escape(node.part)}</strong> {escape(node.line.words)}".rstrip()
    if node.line.marks:
        text += f"<br><small>{' '.join(_mark(*mark) for mark in node.line.marks)}</small>"
    if not node.inside:
        yield f"<div>{text}</div>"
        return
    yield f"<details{' open' if node.is_open or open_levels > 0 else ''}><summary>{text}</summary><div {_INDENT}>"
    shown = [child for child in node.inside.values() if child.is_shown]
    for child in shown:
        yield from _html(child, open_levels - 1)
    hidden = node.size() - sum(1 + child.size() for child in shown)
    if hidden:
        yield f"<div>… and {hidden:,} more inside, not shown</div>"
    yield "</div></details>"


def _mark(text: str, share: float | None) -> str:
    if share is None:
        return escape(text)
    return f'<span style="{shade_style(share)}; padding: 0 0.3em">{escape(text)}</span>'
