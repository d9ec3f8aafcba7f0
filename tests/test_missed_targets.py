"""Every target that the benchmarks miss is explained, and nothing is explained that is not missed."""

from __future__ import annotations

from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def missed_rows(results: str) -> set[str]:
    """The names of rows that miss their target; rows beside other libraries have a page of their own."""
    own = results.partition("\n## Peers\n")[0]
    rows = [line.strip("| ").split(" | ") for line in own.splitlines() if line.startswith("| ")]
    return {cells[0] for cells in rows if cells[-1] == "**missed**"}


def explained_rows(page: str) -> set[str]:
    """The first cells of the tables headed ``row``."""
    names, inside = set(), False
    for line in page.splitlines():
        inside = line.startswith("| row |") or (inside and line.startswith("|"))
        if inside and not line.startswith(("| row |", "|---")):
            names.add(line.strip("| ").split(" | ")[0])
    return names


def test_every_missed_target_is_explained() -> None:
    """`benchmarks/MISSED.md` names the rows of `RESULTS.md` that are missed, no more and no less."""
    missed = missed_rows((BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8"))
    assert missed, "no row was read"
    assert explained_rows((BENCHMARKS / "MISSED.md").read_text(encoding="utf-8")) == missed
