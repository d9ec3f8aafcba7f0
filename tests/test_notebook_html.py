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
from hookline.notebook_html import picture, shade_style

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


def test_a_picture_has_a_pixel_for_each_number() -> None:
    """From the lowest place of the palette to the highest, zero in the middle, and one place for NaN and Inf."""
    html = picture([[-1.0, 0.0, 1.0], [math.nan, -math.inf, 5.0]], '"quoted" <b>')
    assert pixels(html) == [[0, ZERO, 2 * ZERO], [BAD, BAD, 2 * ZERO]]
    assert 'alt="&quot;quoted&quot; &lt;b&gt;" width="48" height="32"' in html


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


def legend_of(found: hl.observe.HeatMap) -> list[tuple[str, str]]:
    """Return the numbers below a heat map with their styles."""
    (line,) = re.findall(r"<div><small>colours: (.*?)</small></div>", found._repr_html_())
    return [(text, style) for style, text in re.findall(r'<span style="(.*?)">&emsp;</span> (\S+)', line)]


@pytest.mark.parametrize(
    ("limits", "drawn", "marks"),
    [
        ({}, [0, 64, 127, 191], ["-4", "-2", "0", "2", "4"]),
        ({"vmin": -4, "vmax": 2}, [0, 64, 127, 254], ["-4", "-2", "0", "1", "2"]),
        ({"vmin": 1, "vmax": 3}, [127, 127, 127, 191], ["1", "2", "3"]),
    ],
    ids=str,
)
def test_limits_set_the_ends_of_the_colours(limits: dict[str, float], drawn: list[int], marks: list[str]) -> None:
    """In a picture and in a table; the legend has the numbers at the ends, on the colours that they have."""
    values = [[-4.0, -2.0, 0.0, 2.0]]
    plain, named = hl.observe.HeatMap(values, **limits), hl.observe.HeatMap(values, rows=["a"], **limits)
    assert pixels(plain._repr_html_()) == [pytest.approx(drawn, abs=1)]
    for found in (plain, named):
        assert [text for text, _ in legend_of(found)] == marks
        assert "-4 to 2" in str(found)
    (cells,) = re.findall(r"<td[^>]*>-4</td>.*", named._repr_html_())
    shown = dict(zip(["-4", "-2", "0", "2"], re.findall(r'; (background-color[^"]*)"', cells), strict=True))
    for place, style in zip(drawn, shown.values(), strict=True):
        assert opacity(style) == pytest.approx(opacity(shade_style((place - ZERO) / ZERO)), abs=0.011)
    common = {text: style for text, style in legend_of(named) if text in shown}
    assert common.items() <= shown.items()
    assert [opacity(style) for _, style in legend_of(named)] == pytest.approx(
        [0.6 * opacity(style) for _, style in legend_of(plain)], abs=0.009
    )


def opacity(style: str) -> float:
    return float(re.findall(r"[\d.]+", style)[3])


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


def test_a_cache_draws_some_modules_and_lists_the_rest() -> None:
    """Twelve pictures; a module that was called often shows twelve calls."""
    model = nn.Sequential(*(nn.Identity() for _ in range(20)))
    with hl.capture(model, "#") as cache:
        for _ in range(14):
            model(torch.ones(2, dtype=torch.complex64) if len(cache.names) == 0 else torch.ones(2))
    assert cache._repr_html_().count("step 0, call 0: output · (2,) · complex64") == 12
    assert cache["3"]._repr_html_().count("<img") == 11
    assert "… and 2 more calls" in cache["3"]._repr_html_()
