"""Keep the cells of the release matrix, and write them as tables. `matrix.py` calls it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

BEGIN, END = "<!-- release matrix: written by release/matrix.py -->", "<!-- end of the release matrix -->"


@dataclasses.dataclass
class Cell:
    """One environment, and what came of it: ``tested``, ``failed`` or ``not possible``."""

    python: str
    torch: str
    extra: str
    package: str
    state: str
    note: str

    @property
    def name(self) -> str:
        """Return what tells the cell from others: the minor versions, the extra, wheel or sdist."""
        parts = [
            _minor(self.python),
            f"torch {_minor(self.torch)}",
            self.extra,
            self.package * (self.package != "wheel"),
        ]
        return " ".join(part for part in parts if part)

    def ended(self, state: str, note: str) -> Cell:
        """Return the cell with its ``state`` and a ``note``."""
        self.state, self.note = state, note
        return self


def read_cells(path: Path) -> dict[str, Cell]:
    """Return the cells that earlier calls have left in ``path``."""
    if not path.exists():
        return {}
    return {name: Cell(**values) for name, values in json.loads(path.read_text()).items()}


def write_cells(path: Path, cells: Mapping[str, Cell]) -> None:
    """Write ``cells`` into ``path``."""
    path.write_text(json.dumps({name: dataclasses.asdict(cell) for name, cell in cells.items()}, indent=1) + "\n")


def table(cells: Mapping[str, Cell]) -> str:
    """Return two tables in Markdown: Python by torch, and the extras; below them why a cell is not tested."""
    plain = [cell for cell in cells.values() if not cell.extra and cell.package == "wheel"]
    columns = _in_order(_minor(cell.torch) for cell in plain)
    rows = _in_order(_minor(cell.python) for cell in plain)
    by_place = {(_minor(cell.python), _minor(cell.torch)): cell for cell in plain}
    lines = [_row(["Python", *(f"torch {column}" for column in columns)]), _row(["---"] * (len(columns) + 1))]
    for row in rows:
        found = [by_place.get((row, column)) for column in columns]
        lines.append(_row([row, *(_short(cell) for cell in found)]))
    others = [cell for cell in cells.values() if cell not in plain]
    if others:
        lines += ["", _row(["installed", "Python", "torch", "state"]), _row(["---"] * 4)]
        for cell in sorted(others, key=lambda cell: cell.extra):
            what = f"`hookline[{cell.extra}]`" if cell.extra else "from the sdist"
            lines.append(_row([what, cell.python, cell.torch, cell.state]))
    reasons = [f"- {cell.name}: {cell.note}" for cell in cells.values() if cell.state != "tested"]
    return "\n".join([*lines, *([""] if reasons else []), *reasons]) + "\n"


def write_page(page: Path, cells: Mapping[str, Cell]) -> None:
    """Put the tables between the two marks of ``page``."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no place for the matrix: write the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{table(cells)}\n{END}{after}")


def _short(cell: Cell | None) -> str:
    if cell is None:
        return "not asked for"
    return f"{cell.state} ({cell.python}, {cell.torch})" if cell.state == "tested" else cell.state


def _row(parts: Iterable[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _minor(version: str) -> str:
    """Return ``2.13`` of ``2.13.0+cpu``; a name or a path as it is."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def _in_order(versions: Iterable[str]) -> list[str]:
    return sorted(set(versions), key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
