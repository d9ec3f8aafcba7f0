"""Metrics of a watch as a table."""

from __future__ import annotations

from typing import Any

__all__ = ["as_table"]


def as_table(metrics: dict[str, Any]) -> str:
    """One line per place, one column per statistic; nested ones are left out."""
    rows: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        place, _, name = key.rpartition("/")
        if isinstance(value, int | float):
            rows.setdefault(place, {})[name] = f"{value:.4g}"
    if not rows:
        return "nothing watched yet"
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = [["", *names], *([place, *(row.get(name, "") for name in names)] for place, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(_line(cells, widths) for cells in table)


def _line(cells: list[str], widths: list[int]) -> str:
    first, *rest = cells
    return "  ".join(
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
    )
