"""What notebooks show beyond rows of text: heat maps, shaded cells."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.tables import shade_style

ZERO, BAD = 127, 255
"""Places in the palette of a picture."""


def pixels(html: str) -> list[list[int]]:
    """Return the places in the palette, row by row, of the only picture in ``html``."""
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    raw, chunks, at = base64.b64decode(data), {}, 8
    while at < len(raw):
        size, kind = struct.unpack(">I4s", raw[at : at + 8])
        body = raw[at + 8 : at + 8 + size]
        assert struct.unpack(">I", raw[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert (len(chunks[b"PLTE"]), len(chunks[b"tRNS"])) == (3 * 256, 256)
    rows = zlib.decompress(chunks[b"IDAT"])
    return [list(rows[1 + row * (width + 1) : (row + 1) * (width + 1)]) for row in range(height)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.tensor(2.0), "() · 2 to 2"),
        (torch.arange(3), "(3,) · 0 to 2"),
        (torch.tensor([True, False]), "(2,) · 0 to 1"),
        (torch.ones(2, 2, dtype=torch.bfloat16), "(2, 2) · 1 to 1"),
        ([[math.nan]], "(1, 1) · 1 not finite"),
    ],
    ids=["number", "whole", "bool", "bfloat16", "nan"],
)
def test_what_can_be_drawn(values: Any, words: str) -> None:
    found = hl.observe.HeatMap(values)
    assert str(found) == words
    assert pixels(found._repr_html_())


@pytest.mark.parametrize(
    "values",
    [torch.empty(0), torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")],
    ids=["empty", "complex", "sparse", "meta"],
)
def test_what_cannot_be_drawn_is_an_error_that_says_so(values: torch.Tensor) -> None:
    """A cache that holds it says what it is instead."""
    with pytest.raises(hl.errors.OptionError, match="takes real numbers"):
        hl.observe.HeatMap(values)


def test_a_heat_map_with_names_is_a_table_of_numbers() -> None:
    """Shaded by the largest of all; in text the same numbers."""
    found = hl.observe.HeatMap([[1.0, -2.0], [0.0, math.inf]], rows=["a", "b"], columns=["x", "y"], title="effects")
    table = found._repr_html_().partition("</table>")[0]
    assert table.count(shade_style(0.5)) == 1
    assert table.count(shade_style(-1.0)) == 1
    assert found._repr_html_().count(shade_style(math.inf)) == 1
    range_of_all = "numbers: -2 to 1 · 1 not finite"
    assert str(found).splitlines() == ["effects", "   x    y", "─  ─  ───", "a  1   -2", "b  0  inf", range_of_all]
    assert range_of_all in found._repr_html_()


def test_a_captured_module_shows_outputs_and_gradients_or_why_not() -> None:
    """A tensor that was changed in place since is not drawn: what is there now is not what flowed."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    with hl.capture(model, "#", grads=True) as cache:
        model(torch.ones(4, 2)).sum().backward()
    assert re.findall(r"<div>(2, step 0, call 0: \w+ · \S+ \S+)", cache["2"]._repr_html_()) == [
        "2, step 0, call 0: output · (4, 1)",
        "2, step 0, call 0: gradient · (4, 1)",
    ]
    assert "changed in place" in cache["0"]._repr_html_()
    assert cache._repr_html_().count("<img") == 4
    assert cache._repr_html_().count("changed in place") == 1
