"""Metrics of a watch as a table."""

from __future__ import annotations

from typing import Any

from hookline.tables import Table

__all__ = ["table_of"]


def table_of(metrics: dict[str, Any]) -> Table:
    """Return one row per place and one column per statistic of ``metrics``; nested ones are left out."""
    rows: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        place, _, name = key.rpartition("/")
        if isinstance(value, int | float):
            rows.setdefault(place, {})[name] = f"{value:.4g}"
    if not rows:
        return Table(title="nothing watched yet")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[place, *(row.get(name, "") for name in names)] for place, row in rows.items()]
    return Table(["", *names], cells, numbers=range(1, len(names) + 1), rule=False)
