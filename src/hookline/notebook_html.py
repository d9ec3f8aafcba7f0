"""Make the HTML of a notebook that needs more than rows of text: shaded cells, pictures of numbers.

`hookline.tables` shades cells by it, `HeatMap` draws pictures. There is no script and no style
sheet, which viewers drop from a notebook that they do not trust. Colours are laid over
those of the page with some transparency, which reads in a light theme and in a dark one.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["ColourScale", "legend", "line", "picture", "shade_style"]

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
