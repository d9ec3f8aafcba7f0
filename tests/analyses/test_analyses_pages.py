"""Every built-in analysis has a page that says what the code says, and a picture that can be drawn again."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hookline.analyses import BUILT_IN

DOCS = Path(__file__).parents[2] / "docs"
PAGES, PICTURES = DOCS / "analyses", DOCS / "pictures" / "analyses"
HEADINGS = ["Metrics", "Options", "When it misleads", "Cost"]
_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def tables() -> Any:
    """The script that writes the tables."""
    return _script("drawing.tables")


def _script(name: str) -> Any:
    """One of the files in docs, which is no package; torch and hookline are all that importing it takes."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


def _text(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def _rows(text: str, what: str) -> list[str]:
    """First column of the table between two marks."""
    return _ROW.findall(text.partition(f"<!-- {what} -->\n")[2].partition("<!-- end -->")[0])


def test_each_analysis_has_one_page_and_one_picture_and_there_are_no_others() -> None:
    """Pages, pictures and the registry agree."""
    assert {page.stem for page in PAGES.glob("*.md")} == {*BUILT_IN, "README"}
    assert {picture.name for picture in PICTURES.iterdir()} == {f"{name}.svg" for name in BUILT_IN}


def test_the_script_draws_a_picture_for_each() -> None:
    """One that is added cannot be forgotten, and one that is gone cannot stay."""
    assert set(_script("draw_analyses").PLOTS) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_page_has_the_metrics_and_options_of_the_code_and_no_others(name: str, tables: Any) -> None:
    """What ``describe_metrics`` and the constructor say, word for word; else: python docs/draw_analyses.py --tables."""
    text = _text(name)
    hook_class = tables.hook_class(name)
    options = list(inspect.signature(hook_class).parameters)
    assert _rows(text, "options") == options
    assert all(words for _, _, words in tables.options(name)), "an option is not described in the docstring"
    assert _rows(text, "metrics") == [info.name for info in tables.metrics(name)]
    assert tables.metric_names(name) == {info.name for info in hook_class().describe_metrics()}
    assert tables.with_tables(name, text) == text


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_page_is_whole_and_short(name: str) -> None:
    """Its picture and what that shows, how to use it, when it misleads, what it costs; on 70 lines."""
    text = _text(name)
    assert text.startswith(f"# `{name}`\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert len(text.splitlines()) <= 70
    before, picture, after = text.partition(f"](../pictures/analyses/{name}.svg)\n")
    assert picture
    assert len(after.partition("\n    hookline run ")[0].split()) >= 25, "it does not say what the picture shows"
    assert "\n    hookline run " in after
    assert f" {name}" in after.partition("\n    hookline run ")[2].partition("\n")[0]
    assert before.rpartition("![")[2], "the picture has no description"


def test_the_index_leads_to_every_page() -> None:
    """In its tables, each once."""
    text = _text("README")
    linked = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", text, re.MULTILINE)
    assert sorted(linked) == sorted((name, name) for name in BUILT_IN)


def test_a_page_that_says_something_else_is_found(tables: Any) -> None:
    """The check can fail: a metric that is renamed, one that is gone, an option that is too many."""
    text = _text("norms")
    for wrong in (text.replace("total_norm", "whole_norm"), re.sub(r"\| `max_component`.*\n", "", text)):
        assert wrong != text
        assert tables.with_tables("norms", wrong) == text
    extra = _text("variance").replace("| `max_gib`", "| `most_gib` | `1` | Nothing. |\n| `max_gib`")
    assert _rows(extra, "options") != list(inspect.signature(tables.hook_class("variance")).parameters)


def test_the_blocks_of_the_index_run_and_print_what_they_show() -> None:
    """Every python block runs; a text block after it is its exact output."""
    printed = None
    for language, text in _BLOCK.findall(_text("README")):
        if language == "python":
            buffer = io.StringIO()
            with contextlib.redirect_stdout(buffer):
                exec(compile(text, "README.md", "exec"), {"__name__": "__page__"})
            printed = buffer.getvalue()
        else:
            assert printed == text
    assert printed


def test_options_are_read_from_docstrings_with_lines_that_go_on(tables: Any) -> None:
    """The text of an option is all of its lines, and those of the next are not in it."""
    said = tables._documented("What.\n\nArgs:\n    one: First\n        goes on, ``x``.\n    two: Second.\n\nMore.\n")
    assert said == {"one": "First goes on, `x`.", "two": "Second."}
