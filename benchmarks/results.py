"""Keep every measured row in ``results.json``, and make the page ``RESULTS.md`` from it.

``run.py`` hands over rows; the file keeps them with the machine, versions and date of each. The page shows the rows of
``page.toml`` by question, and every missed target with the sentence that ``missed.toml`` has for it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import Row, Spread

import hookline

__all__ = ["RESULTS", "console_line", "head_lines", "keep", "load", "make_page", "measured", "write_page"]

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
PAGE = FOLDER / "RESULTS.md"

INTRO = """\
# Results

Written by `make bench` from [results.json](results.json), which has every row with its machine, versions and date; this
page shows the rows to decide by, and each target that is missed. Other libraries are on [a page of
their own](../docs/peers.md).

Each ratio is the median over many rounds, with its quartiles. In a round every variant runs once, in shuffled order, in
one process with one torch thread and the garbage collector off, and the ratio is formed inside the round. A/A is the
denominator measured against itself in the same rounds: a difference smaller than that spread is none. On the CPU it is
CPU time of the thread, on the GPU wall-clock time up to a synchronize. oneDNN (mkldnn) is off: on some machines it
makes small layers so slow that they hide every overhead.
"""

Sections = dict[str, list[dict[str, Any]]]
"""Rows as they are in the file, by CPU and GPU."""


# -- the file --------------------------------------------------------------------------------------------------------


def load(path: Path = RESULTS) -> Sections:
    """Return the rows of a file; a missing file has none."""
    sections: Sections = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return sections


def keep(path: Path, new: Sections) -> None:
    """Write rows into a file: each replaces the row of its name and model, or comes last."""
    sections = load(path)
    for section, rows in new.items():
        by_key = {(row["name"], row["model"]): row for row in [*sections.get(section, []), *rows]}
        sections[section] = list(by_key.values())
    parts = [
        f'"{section}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"
        for section, rows in sections.items()
    ]
    path.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def measured(section: str, rows: Iterable[Row]) -> Sections:
    """Return rows of this machine and day as the file keeps them."""
    return {section: [_plain(row) | head(section) for row in rows]}


def _plain(row: Row) -> dict[str, Any]:
    return {**asdict(row), "ratio": _numbers(row.ratio), "same": _numbers(row.same)}


def _numbers(spread: Spread) -> list[float]:
    return [float(f"{value:.4g}") for value in (spread.median, spread.low, spread.high)]


def _row(plain: dict[str, Any]) -> Row:
    words = {name: plain[name] for name in Row.__dataclass_fields__ if name not in ("ratio", "same")}
    return Row(**words, ratio=Spread(*plain["ratio"]), same=Spread(*plain["same"]))


# -- the page --------------------------------------------------------------------------------------------------------


def write_page() -> None:
    """Write the page beside the file."""
    PAGE.write_text(make_page(), encoding="utf-8")


def make_page(sections: Sections | None = None) -> str:
    """Return the text of the page."""
    sections = load() if sections is None else sections
    rows = {(section, plain["name"]): _row(plain) for section in sections for plain in sections[section]}
    parts = [INTRO, *_machines(sections)]
    for question, names in tomllib.loads((FOLDER / "page.toml").read_text(encoding="utf-8")).items():
        lines = [_line(section, rows[section, name]) for section, name in map(_key, names)]
        parts.append("\n".join([f"## {question}\n", _TABLE_HEAD, *lines, ""]))
    return "\n".join([*parts, "## Missed targets\n", *_missed(sections), ""])


_TABLE_HEAD = """\
| on | row | ratio [quartiles] | A/A | target | what is divided by what, and the model |
|---|---|---|---|---|---|"""


def _key(text: str) -> tuple[str, str]:
    section, _, name = text.partition(": ")
    return section, name


def _line(section: str, row: Row) -> str:
    target = row.target if row.verdict in ("met", "–") else f"{row.target}, {row.verdict}"
    what = f"{row.numerator} / {row.denominator}; {row.model}"
    return f"| {section} | {row.name} | {row.ratio} | {row.same.low:.3f} to {row.same.high:.3f} | {target} | {what} |"


def _machines(sections: Sections) -> Iterator[str]:
    for section, rows in sections.items():
        places = sorted({f"{row['machine']}; {row['versions']}; {row['date']}" for row in rows})
        yield "\n".join([f"{section} rows were measured on:\n", *(f"- {place}" for place in places), ""])


def _missed(sections: Sections) -> Iterator[str]:
    why = tomllib.loads((FOLDER / "missed.toml").read_text(encoding="utf-8"))
    for section, rows in sections.items():
        for row in map(_row, rows):
            if "missed" in row.verdict:
                reason = why.get(row.name, "Not explained yet.")
                yield f"- {section}, {row.name}: {row.ratio.median:.3f}, target {row.target}. {reason}"


# -- this machine ----------------------------------------------------------------------------------------------------


def console_line(row: Row) -> str:
    """Return a row for the terminal."""
    verdict = row.verdict.strip("*")
    return f"{row.name:<66}  {row.ratio!s:>23}  A/A {row.same!s:>23}  {row.target:>16}  {verdict:<6}  {row.absolute}"


def head(section: str) -> dict[str, str]:
    """Return where and when it is measured."""
    return {
        "machine": machine(section),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, hookline {hookline.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def head_lines(section: str) -> list[str]:
    """Return the same as lines of a page."""
    return [f"- {name}: {text}" for name, text in head(section).items()]


def machine(section: str) -> str:
    """Return processor, cores and system; for the GPU section the device as well."""
    host = f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"
    return f"{torch.cuda.get_device_name()}; {host}" if section == "GPU" else host


def processor() -> str:
    """Return the processor's own name for itself."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
