"""Figures that pages repeat from the benchmarks are those of `benchmarks/RESULTS.md`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLUMNS = (("prefill", "CPU"), ("decode", "CPU"), ("prefill", "GPU"), ("decode", "GPU"))
"""What the four columns of the table in docs/serving.md measure, and the section that it comes from."""
STATES = "hidden states of one layer"


def medians(section: str) -> dict[str, float]:
    """The ratios of a section, by the names of their rows."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    part = results.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| served, ")]
    return {cells[0].removeprefix("served, "): float(cells[4].split(" ")[0]) for cells in rows}


def cost_table() -> dict[str, list[str]]:
    """The table of docs/serving.md: its four cells by what is measured."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = page.partition("| prompt, CPU |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0]: cells[1:] for cells in rows}


def test_the_costs_of_serving_are_those_that_were_measured() -> None:
    """Two digits after the point, of every cell."""
    by_section = {section: medians(section) for section in ("CPU", "GPU")}
    table = cost_table()
    assert len(table) == 5
    for what, cells in table.items():
        if what.startswith(STATES):
            expected = [f"{by_section[section][f'{STATES} for every token']:.2f}" for section in ("CPU", "GPU")]
            assert [cell for cell in cells if cell != "–"] == expected
            continue
        expected = [f"{by_section[section][f'eager {phase}, {what}']:.2f}" for phase, section in COLUMNS]
        assert cells == expected, what


def test_the_costs_of_engines_are_those_that_were_measured() -> None:
    """The ratios on vLLM that docs/engines.md repeats."""
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| vLLM, .*?\]", results, re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        ratio = row.rsplit(" | ", 1)[1].split(" ")[0]
        assert ratio in page, row
