"""How objects show themselves: in a terminal, and at the end of a notebook's cell."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.tables import shade_style


class Cells(HTMLParser):
    """What stands in the cells of a table, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "style")
        assert not [name for name, value in attrs if name.startswith("on")]
        self.open += [tag] * (tag not in ("br", "img"))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def ignore(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing."""


def model_and_data() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(8, 4)


NO_CELLS = ("handle", "receipt of one site", "captured", "heat map", "factory without numbers")
"""What is shown as one line, a tree or a picture."""


class Norm(hl.TrainingHook):
    hook_points = {hl.HookPoint.POST_EPOCH}

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        return {"norm": ctx.model[0].weight.norm()}


class Zeroes(hl.InterventionHook):
    hook_points = {hl.HookPoint.SNAPSHOT}

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: Any) -> dict[str, Any]:
        with torch.no_grad():
            model_ctx.model[0].weight.zero_()
        return {"a": 1}


def trained() -> tuple[hl.HookManager, hl.sinks.MemorySink]:
    model, x = model_and_data()
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[Norm, Zeroes], sinks=[sink], profile_hooks=True)
    experiment = hl.Experiment(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        [(x, x[:, :1])] * 3,
        evaluate=lambda model: {"val_acc": 0.5},
    )
    hl.epoch_loop(experiment, epochs=2, manager=manager)
    return manager, sink


def everything_that_ends_a_cell() -> dict[str, Any]:
    model, x = model_and_data()
    one, many = hl.attach(model, "0", ignore), hl.attach(model, "#", ignore, name="<b>bold</b>")
    patch, watch = hl.patch(model, {"1": hl.edits.ablate(), "2": torch.sin}), hl.watch(model, "#", on="forward")
    cache = hl.capture(model, "#")
    model(x)
    manager, sink = trained()
    found = {
        "find": hl.find(model),
        "handle": one,
        "handles": hl.HandleSet([one, many]),
        "receipt": many.report(),
        "receipt of one site": one.report(),
        "receipts": patch.report(),
        "patch": patch,
        "watch": watch,
        "cache": cache,
        "captured": cache["1"],
        "doctor": hl.doctor(model),
        "heat map": hl.observe.HeatMap(x),
        "heat map with names": hl.observe.HeatMap([[1.0, -2.0]], rows=["<b>"], columns=["<script>", "b"]),
        "plan": manager.plan,
        "manager": manager,
        "profiler": manager.profiler,
        "memory": sink,
    }
    for handle in (one, many, patch, watch, cache):
        handle.remove()
    return found


def test_whatever_ends_a_cell_has_html_with_cells_and_a_text_without_addresses():
    """Every element is closed, names are escaped, and neither form is Python's default of an object."""
    for name, thing in everything_that_ends_a_cell().items():
        html, text = thing._repr_html_(), repr(thing)
        parsed = Cells(html)
        assert parsed.open == [], name
        assert parsed.cells or name in NO_CELLS, name
        assert " object at 0x" not in text, name
        assert "<b>" not in html, name


@pytest.mark.parametrize(
    "switch_on",
    [
        lambda model: hl.attach(model, "0", ignore),
        lambda model: hl.patch(model, {"1": hl.edits.ablate()}),
        lambda model: hl.capture(model, "0"),
        lambda model: hl.watch(model, "0", on="forward"),
        lambda model: hl.freeze(model, "0"),
        lambda model: hl.HandleSet([hl.attach(model, "0", ignore)]),
        lambda model: hl.HandleSet([model.register_forward_hook(ignore)]),
    ],
    ids=["attach", "patch", "capture", "watch", "freeze", "set", "set of torch's"],
)
def test_what_was_left_on_says_so_and_how_to_take_it_off(switch_on: Any):
    """Without ``with`` hooks stay on: the representation says "on" and names ``remove``; later it says "off"."""
    model, x = model_and_data()
    thing = switch_on(model)
    model(x)
    shown = [repr(thing), thing._repr_html_()]
    assert all(
        ".remove() takes" in text and " on, " in f" {text}".replace(">", " ").replace("\n", " ") for text in shown
    )
    thing.remove()
    for text in (repr(thing), thing._repr_html_()):
        assert ".remove()" not in text
        assert "off" in text


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


def test_names_of_a_large_heat_map_are_those_of_what_is_drawn() -> None:
    """Of 2 Mi numbers every second row and column is read: names are given for all, and rows without keep numbers."""
    values, columns = torch.zeros(512, 4096), [f"c{index}" for index in range(4096)]
    lines = str(hl.observe.HeatMap(values, columns=columns)).splitlines()
    assert [*lines[0].split()[:2], lines[3].split()[0]] == ["c0", "c2", "2"]
    assert "one in 2 of its rows and columns" in lines[-1]
    with pytest.raises(hl.errors.OptionError, match=r"2048 names.* 4096 columns"):
        hl.observe.HeatMap(values, columns=columns[::2])


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
