"""The notebooks run, and what their files show is what running them shows.

Their cells run here, without a kernel: five kernels would take longer than all that is in the cells.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ("watch", "capture_and_patch", "interventions", "debugging", "serving")
TRAINED = "induction_heads"
"""Trains a model for a minute or two: on another machine its numbers are others, and what it finds is the same."""
NUMBER = re.compile(r"(?<![\w.#])-?\d+(?:\.(\d+))?(?:e[+-]?\d+)?")
PICTURE = re.compile(r"(?<=base64,)[^\"]+")


def code_cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def kept(cell: dict[str, Any]) -> dict[str, str]:
    """Return what the file shows below a cell, by kind."""
    found: dict[str, str] = {}
    for output in cell["outputs"]:
        assert output["output_type"] in ("stream", "execute_result"), output
        data = {output["name"]: output["text"]} if output["output_type"] == "stream" else output["data"]
        for kind, text in data.items():
            found[kind] = found.get(kind, "") + "".join(text)
    return found


def shown(cell: dict[str, Any], namespace: dict[str, Any], name: str) -> dict[str, str]:
    """Run a cell; return what a notebook would show below it."""
    source = "".join(cell["source"])
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for those who read sources
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    found = {"stdout": printed.getvalue()} if printed.getvalue() else {}
    if value is not None:
        found["text/plain"] = repr(value)
        if hasattr(value, "_repr_html_"):
            found["text/html"] = value._repr_html_()
    return found


def differ(one: str, other: str) -> bool:
    """Return whether two texts differ in more than the rounding of their numbers and the data of pictures."""
    one, other = (PICTURE.sub("", text) for text in (one, other))
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return True
    pairs = zip(NUMBER.finditer(one), NUMBER.finditer(other), strict=True)
    return any(not _is_near(a[0], b[0], a[1]) for a, b in pairs)


def _is_near(one: str, other: str, decimals: str | None) -> bool:
    """Return whether numbers are the same; of a fraction, to two hundredths or one in its last place."""
    if decimals is None and "e" not in one:
        return one == other
    last_place = 0.0 if decimals is None or "e" in one else 1.1 * 10.0 ** -len(decimals)
    a, b = float(one), float(other)
    return abs(a - b) <= 0.02 * max(abs(a), abs(b)) + last_place


@pytest.fixture
def _random_numbers_as_before() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.usefixtures("_random_numbers_as_before")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_what_its_file_shows(name: str) -> None:
    """Every cell runs; texts are the same, numbers but for rounding. If not: make notebooks."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(name), start=1):
        found, expected = shown(cell, namespace, f"<{name} {number}>"), kept(cell)
        assert cell["execution_count"] == number
        assert found.keys() == expected.keys(), f"cell {number}: {''.join(cell['source'])}"
        for kind, text in found.items():
            assert not differ(expected[kind], text), f"cell {number}, {kind}:\n{expected[kind]}\nis now:\n{text}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_random_numbers_as_before")
@pytest.mark.filterwarnings("default")
def test_the_notebook_that_trains_finds_induction_heads() -> None:
    """Heads that look at the previous token, then heads that need these; the loss is low, and rises without them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(TRAINED), start=1):
        assert shown(cell, namespace, f"<{TRAINED} {number}>").keys() == kept(cell).keys()
    assert namespace["plain"] < 0.5
    assert namespace["previous"][0].max() > 0.5
    assert namespace["induction"][1].max() > 0.5 > 0.3 > namespace["induction"][0].max()
    assert namespace["together"] > 0.5
    assert max(namespace["effects"][0]) > 0.3
    assert namespace["lost"].max() < 0.8 * namespace["induction"][1].max()
    assert namespace["votes"][1].max() > 0.5


def test_notebooks_are_small_and_name_no_machine() -> None:
    """No address of an object, no path, no script; pictures in all of them."""
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NAMES, TRAINED}
    for name in (*NAMES, TRAINED):
        text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
        assert len(text) < 60_000
        outputs = "".join(text for cell in code_cells(name) for text in kept(cell).values())
        assert re.search(r"<img|background-color|<details", outputs)
        assert not re.search(r"0x[0-9a-f]{6}|(?<![\w.<:])/(?:home|tmp|root|usr|work)/|<script|\.py:\d", outputs)
        for data in PICTURE.findall(outputs):
            assert base64.b64decode(data).startswith(b"\x89PNG")


def test_the_comparison_notices_another_number_and_another_word() -> None:
    """The control: rounding passes, a digit more than that does not, nor does another whole number."""
    assert not differ("loss 0.1234, 5 steps", "loss 0.1235, 5 steps")
    assert not differ("mean 1.5e-07", "mean 1.51e-07")
    assert differ("loss 0.1234, 5 steps", "loss 0.1334, 5 steps")
    assert differ("loss 0.1234, 5 steps", "loss 0.1234, 6 steps")
    assert differ("loss 0.1234", "los 0.1234")
