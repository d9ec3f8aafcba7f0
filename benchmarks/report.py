"""The page of results.

Takes `Row`s from ``run``, writes them as one section (CPU or GPU) of a Markdown page and leaves the other sections of
that page, measured on another machine perhaps, as they are. ``peers_page`` writes the third one.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import Row

import hookline

__all__ = ["console_line", "head", "put", "sections_of", "table", "write"]

SECTIONS = ("CPU", "GPU", "Peers")

INTRO = """\
# Results

Written by `make bench`, the section "Peers" by `make bench-peers`; what the rows are and how they are measured is in
the files beside this page.

Each ratio is the median over many rounds, with its quartiles. In a round every variant runs once, in shuffled order, in
one process with one torch thread and the garbage collector off; it counts with the least of several timings, and the
ratio is formed inside the round. The A/A column is the denominator measured against itself in the same rounds: a
difference smaller than that spread is none. On the CPU it is CPU time of the thread, on the GPU wall-clock time up to a
synchronize. oneDNN (mkldnn) is off, since on some machines it makes small layers so slow that they hide every overhead.
Rows without a target only inform; a missed target stays on the page. The rows about two threads are shares of captures
that went wrong, not times; how large a share is depends on the load of the machine: only zero and not zero compare.
"""

ELSEWHERE = '- other machines and days: a row of one names it in its column "measured"'

HEADER = (
    "row", "numerator", "denominator", "model", "ratio [quartiles]", "A/A [quartiles]", "measured", "target", "result",
)  # fmt: skip


def write(path: Path, section: str, rows: Sequence[Row], *, keep: bool = False) -> None:
    """Put a section into the page, in place of the one of that name; with ``keep``, in place of the same rows only."""
    put(path, section, body(section, rows), keep=keep)


def put(path: Path, section: str, text: str, *, keep: bool) -> None:
    """The same for a section that was measured elsewhere."""
    sections = sections_of(path)
    sections[section] = merged(sections[section], text) if keep and section in sections else text
    page = [INTRO, *(f"## {name}\n\n{sections[name].strip()}\n" for name in SECTIONS if name in sections)]
    path.write_text("\n".join(page), encoding="utf-8")


def sections_of(path: Path) -> dict[str, str]:
    """The sections of a page, by name."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = re.split(rf"^## ({'|'.join(SECTIONS)})$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def merged(old: str, new: str) -> str:
    """The old section with the rows of the new one, each where it was or at the end."""
    head, old_rows = apart(old)
    new_head, new_rows = apart(new)
    machine_of = re.compile(r"^- machine: (.+)$", re.MULTILINE).search
    where, there = machine_of("\n".join(new_head)), machine_of("\n".join(head))
    if where is not None and there is not None and where[1] != there[1]:
        new_rows = {key: with_machine(text, where[1], new_head) for key, text in new_rows.items()}
        if ELSEWHERE not in head:
            head.insert(next(at for at, text in enumerate(head) if text.startswith("- date: ")) + 1, ELSEWHERE)
    return "\n".join([*head, *{**old_rows, **new_rows}.values()])


def with_machine(text: str, where: str, head: Sequence[str]) -> str:
    """The row with a note of the machine and the day, in its cell of what was measured: the head names another."""
    cells = text.split(" | ")
    day = next((part.removeprefix("- date: ") for part in head if part.startswith("- date: ")), "")
    cells[6] += f"; on {where}, {day}"
    return " | ".join(cells)


def apart(section: str) -> tuple[list[str], dict[tuple[str, str], str]]:
    """What stands above the rows of a section, and its rows by name and model."""
    lines = section.strip().splitlines()
    start = next(index for index, text in enumerate(lines) if text.startswith("| ---")) + 1
    cells = {text: [cell.strip() for cell in text.strip("|").split("|")] for text in lines[start:]}
    return lines[:start], {(row[0], row[3]): text for text, row in cells.items()}


def body(section: str, rows: Sequence[Row]) -> str:
    """Where and when it was measured, and the table."""
    return "\n".join([*head(section), "", *table(rows)])


def head(section: str) -> list[str]:
    """Where and when it was measured."""
    return [
        f"- machine: {machine(section)}",
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, hookline {hookline.__version__}",
        f"- date: {datetime.date.today().isoformat()}",
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the table."""
    cells = [
        (
            row.name,
            row.numerator,
            row.denominator,
            row.model,
            row.ratio,
            row.same,
            row.absolute,
            row.target,
            row.verdict,
        )
        for row in rows
    ]  # fmt: skip
    return [line(HEADER), line(["---"] * len(HEADER)), *map(line, cells)]


def console_line(row: Row) -> str:
    """A row for the terminal."""
    verdict = row.verdict.strip("*")
    return f"{row.name:<66}  {row.ratio!s:>23}  A/A {row.same!s:>23}  {row.target:>16}  {verdict:<6}  {row.absolute}"


def line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def machine(section: str) -> str:
    """Processor, cores and system; for the GPU section the device as well."""
    host = f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"
    return f"{torch.cuda.get_device_name()}; {host}" if section == "GPU" else host


def processor() -> str:
    """The processor's own name for itself."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
