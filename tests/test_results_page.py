"""The page of results is made from the measured rows, and the README repeats them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

README_ROWS = {
    "a model whose hooks were all removed": ("CPU", "all hooks removed, forward"),
    "twelve empty hooks": ("CPU", "twelve empty forward hooks"),
    "training step of GPT-2 small": ("GPU", "watch, GPT-2 small step, batch 8"),
    "the same at batch 32": ("GPU", "watch, GPT-2 small step, batch 32"),
    "the same at every 50th step": ("GPU", "watch every 50 steps, GPT-2 small, batch 32"),
    "the same numbers by `.item()`": ("GPU", "item, GPT-2 small step, batch 8"),
}
"""How the rows of the README's table begin, and the section and row of the benchmarks that each repeats."""


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import ``benchmarks/results.py``, which imports its neighbours by their short names."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in ("results", "measure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import results

    return results


def test_the_page_is_made_from_the_rows(results: Any) -> None:
    """The committed page is what the committed rows give; each missed target has a sentence."""
    page = results.make_page()
    assert page == results.PAGE.read_text(encoding="utf-8"), "python -c 'import results; results.write_page()'"
    assert "Not explained yet" not in page


def test_a_row_replaces_the_one_of_its_name_and_model(results: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    results.keep(path, {"CPU": [{"name": "a", "model": "m", "ratio": 1}, {"name": "b", "model": "m", "ratio": 2}]})
    results.keep(path, {"CPU": [{"name": "a", "model": "m", "ratio": 3}], "GPU": [{"name": "a", "model": "m"}]})
    assert [row.get("ratio") for rows in results.load(path).values() for row in rows] == [3, 2, None]


def test_the_readme_repeats_what_was_measured(results: Any) -> None:
    """Compare each row of its table, to two digits."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n| what | ratio |")[2].partition("\n\n")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]
    assert len(table) == len(README_ROWS)
    for (what, ratio), (words, (section, name)) in zip(table, README_ROWS.items(), strict=True):
        assert what.startswith(words)
        medians = [row["ratio"][0] for row in results.load()[section] if row["name"] == name]
        assert ratio == f"{medians[0]:.2f}", what
