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

Written by `make bench` from [results.json](results.json), which has every row with its machine, versions and date.
Other libraries are on [their own page](../docs/peers.md).

Each ratio is the median over many rounds, with its quartiles; 1.00 is no slowdown. In a round every variant runs once,
in shuffled order, in one process with one torch thread and the garbage collector off. A/A is the denominator measured
against itself in the same rounds: a difference smaller than that spread is none. On the CPU it is CPU time of the
thread, on the GPU wall-clock time up to a synchronize. oneDNN is off: on some machines it makes small layers so slow
that they hide every overhead.
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
    questions = tomllib.loads((FOLDER / "page.toml").read_text(encoding="utf-8"))
    shown = [rows[key] for names in questions.values() for key in map(_key, names)]
    parts = [INTRO, *_machines(sections), _models(shown)]
    for question, names in questions.items():
        lines = [_line(section, rows[section, name]) for section, name in map(_key, names)]
        parts.append("\n".join([f"## {question}\n", _TABLE_HEAD, *lines, ""]))
    return "\n".join([*parts, "## Missed targets\n", *_missed(sections), ""])


_TABLE_HEAD = """\
| on | row | ratio [quartiles] | A/A | target | what is divided by what |
|---|---|---|---|---|---|"""


def _key(text: str) -> tuple[str, str]:
    section, _, name = text.partition(": ")
    return section, name


def _line(section: str, row: Row) -> str:
    target = row.target if row.verdict in ("met", "–") else f"{row.target}, {row.verdict}"
    what = f"{row.numerator} / {row.denominator}"
    model = row.model.partition(":")[0]
    named = model == "no model" or model in row.name
    noise = f"{row.same.low:.3f} to {row.same.high:.3f}"
    return f"| {section} | {row.name} | {row.ratio} | {noise} | {target} | {what}{'' if named else f'; {model}'} |"


def _machines(sections: Sections) -> Iterator[str]:
    for section, rows in sections.items():
        days: dict[str, set[str]] = {}
        for row in rows:
            days.setdefault(f"{row['machine']}; {row['versions']}", set()).add(row["date"])
        places = [f"- {place}; {', '.join(sorted(days[place]))}" for place in sorted(days)]
        yield "\n".join([f"{section} rows were measured on:\n", *places, ""])


def _models(rows: list[Row]) -> str:
    """Say once what the models of the rows are, which the tables only name."""
    models = sorted({row.model for row in rows if ":" in row.model})
    return "\n".join(["Models:\n", *(f"- {model}" for model in models), ""])


def _missed(sections: Sections) -> Iterator[str]:
    """Yield a line for each reason, with the rows that it explains."""
    why = tomllib.loads((FOLDER / "missed.toml").read_text(encoding="utf-8"))
    by_reason: dict[str, list[str]] = {}
    for section, rows in sections.items():
        for row in map(_row, rows):
            if "missed" in row.verdict:
                told = f"{section}, {row.name}: {row.ratio.median:.3f} ({row.target})"
                by_reason.setdefault(why.get(row.name, "Not explained yet."), []).append(told)
    for reason, told in by_reason.items():
        yield f"- {'; '.join(told)}. {reason}"


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
