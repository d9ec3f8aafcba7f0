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


def measured_rows() -> dict[str, list[str]]:
    """All rows of the benchmarks but those beside other libraries, by name; of equal names the last."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").partition("\n## Peers\n")[0]
    rows = [line.strip("| ").split(" | ") for line in results.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in rows}


def table_after(page: str, head: str) -> list[list[str]]:
    """The cells of a table whose first line begins with `head`."""
    lines = page.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_what_a_watch_costs_by_modules_width_and_batch_was_measured() -> None:
    """Every cell of the table of docs/scaling.md."""
    rows, page = measured_rows(), (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    table = table_after(page, "| GPT-2 | modules |")
    assert len(table) == 5
    for size, modules, width, batch, wall, steady, kernels, by_hand, noise in table:
        name = f"GPT-2 {size}, batch {batch}, eager step"
        _, numerator, _, model, ratio, a_a, times, *_ = rows[f"watch, {name}"]
        assert f"{modules} modules" in numerator
        assert f"d {width}, seq 1024, batch {batch}," in model
        assert ratio.startswith(f"{wall} [")
        assert re.search(rf"steady {steady} \[.*?\], kernels alone {kernels} ", times.partition("before")[0])
        assert a_a == noise
        floor = rows.get(f"hooks by hand that only keep, {name}")
        assert by_hand == ("–" if floor is None else floor[4].split(" ")[0])


def test_what_ranks_cost_was_measured() -> None:
    """The two rows of docs/scaling.md, with their noise."""
    rows, page = measured_rows(), (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    flush, ddp = table_after(page, "| row | figure | A/A |")
    for cells, name in ((flush, "flush over 2 ranks (ms, wall clock)"), (ddp, "watch under DDP, 2 processes")):
        assert cells[1].startswith(rows[name][4])
        assert cells[2] == rows[name][5]


COSTS = {
    "a model whose hooks were all removed": ("CPU", "all hooks removed, forward"),
    "twelve empty hooks": ("CPU", "twelve empty forward hooks"),
    "training step of GPT-2 small": ("GPU", "watch, GPT-2 small step, batch 8"),
    "the same at batch 32": ("GPU", "watch, GPT-2 small step, batch 32"),
    "the same at every 50th step": ("GPU", "watch every 50 steps, GPT-2 small, batch 32"),
    "the same numbers by `.item()`": ("GPU", "item, GPT-2 small step, batch 8"),
}
"""How the rows of the README's table begin, and the section and row of the benchmarks that each repeats."""


def test_the_costs_of_the_readme_are_those_that_were_measured() -> None:
    """Each row of its table, to two digits."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = table_after((ROOT / "README.md").read_text(encoding="utf-8"), "| what | ratio |")
    assert len(table) == len(COSTS)
    for (what, ratio), (words, (section, name)) in zip(table, COSTS.items(), strict=True):
        assert what.startswith(words)
        part = results.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        cells = part.partition(f"\n| {name} |")[2].split("\n")[0].split(" | ")
        assert ratio == f"{float(cells[3].split(' ')[0]):.2f}", what


def test_the_versions_of_the_compatibility_page_are_those_of_the_tests() -> None:
    """Every package of its table, and torch."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| ([a-z-]+) \| (\d\S*) \|", page, re.MULTILINE)
    assert len(named) > 5
    assert {name: pins[name] for name, _ in named} == dict(named)
    assert f"| {pins['torch']} | Linux, CPU | every test" in page
