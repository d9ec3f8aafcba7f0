"""Every built-in analysis has a section that says what the code says, and a picture that can be drawn again."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import hookline.analyses
from hookline.analyses import BUILT_IN

DOCS = Path(__file__).parents[2] / "docs"
PAGES, PICTURES = DOCS / "analyses", DOCS / "pictures" / "analyses"


@pytest.fixture(scope="module")
def tables() -> Any:
    """Import the script that writes the tables."""
    return _script("drawing.tables")


def _script(name: str) -> Any:
    """Import one of the files in docs, which is no package."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


def _sections() -> dict[str, str]:
    """Return the text of each analysis, by its name."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")) if page.name != "README.md"]
    parts = [part for page in pages for part in page.split("\n## `")[1:]]
    return {part.partition("`")[0]: part for part in parts}


def test_sections_pictures_and_registry_agree() -> None:
    """Each analysis has one section and one picture, and there are no others."""
    assert set(_sections()) == set(BUILT_IN)
    assert {picture.name for picture in PICTURES.iterdir()} == {f"{name}.svg" for name in BUILT_IN}
    assert set(_script("draw_analyses").PLOTS) == set(BUILT_IN)


def test_the_index_leads_to_every_section() -> None:
    """In its tables, each once."""
    text = (PAGES / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[`(\w+)`\]\(\w+\.md#(\w+)\)", text, re.MULTILINE)
    assert sorted(linked) == sorted((name, name) for name in BUILT_IN)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_the_metrics_of_the_code(page: Path, tables: Any) -> None:
    """The tables are what ``describe_metrics`` says; else: python docs/draw_analyses.py --tables."""
    text = page.read_text(encoding="utf-8")
    assert tables.with_tables(text) == text


def test_a_page_that_says_something_else_is_found(tables: Any) -> None:
    """The check can fail: a metric that is renamed, one that is gone."""
    text = (PAGES / "gradients.md").read_text(encoding="utf-8")
    for wrong in (text.replace("- `total_norm`", "- `whole_norm`"), re.sub(r"- `max_component`.*\n", "", text)):
        assert wrong != text
        assert tables.with_tables(wrong) == text


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_section_is_whole(name: str, tables: Any) -> None:
    """It has its picture, its metrics, when it misleads, what it costs."""
    text = _sections()[name]
    for part in (f"](../pictures/analyses/{name}.svg)\n", f"<!-- metrics of {name} -->",
                 "**When it misleads**", "**Cost.**"):  # fmt: skip
        assert part in text, part
    assert tables.metric_names(name) == {info.name for info in tables.hook(name).describe_metrics()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_option_is_described(name: str) -> None:
    """The docstring of the class has a line for each argument."""
    hook_class = getattr(hookline.analyses, BUILT_IN[name].partition(":")[2])
    said = inspect.getdoc(hook_class) or ""
    for option in inspect.signature(hook_class).parameters:
        assert re.search(rf"^    {option}: \S", said, re.MULTILINE), option


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_picture_is_a_small_light_svg_with_axes(name: str) -> None:
    """Up to 60 KB, a white ground, and a mark that the axes have names (matplotlib writes each text as a comment)."""
    picture = PICTURES / f"{name}.svg"
    assert 2_000 < picture.stat().st_size <= 60 * 1024
    text = picture.read_text(encoding="utf-8")
    assert "fill: #ffffff" in text
    texts = re.findall(r"<!-- (.*?) -->", text)
    assert any(words.startswith(("epoch", "step", "layer", "k", "a;")) for words in texts), "no axis has a name"
