"""A line per snapshot: the few numbers that matter, in columns under their names.

Written by `ConsoleSink` in its mode ``"lines"``; takes metrics by name, hands back text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hookline.sinks.console_choice import MetricChoice
from hookline.sinks.console_format import format_short, split_key
from hookline.sinks.record import Record

__all__ = ["SnapshotLines"]

_WIDTH: Final = 9
"""Characters of a number: ``-0.001234``, ``-1.23e-05``."""
_ROWS: Final = 30
"""Lines under one row of names: as many as are on a screen together."""


class SnapshotLines:
    """Columns of numbers, with their names above when they change.

    Recipe: ``SnapshotLines(MetricChoice()).lines({"eval/val_acc": 0.5}, record)`` is the names and a line below.
    """

    def __init__(self, choice: MetricChoice) -> None:
        self._choice = choice
        self._columns: tuple[str, ...] = ()
        self._num_rows = 0

    def clear(self) -> None:
        """Have the names printed again: another run begins."""
        self._columns, self._num_rows = (), 0

    def lines(self, metrics: Mapping[str, Any], record: Record) -> list[str]:
        """Return the line of a snapshot, after the names of its columns if they are other ones than before."""
        chosen = self._choice.choose(metrics)
        places = _places(record)
        if not chosen:
            return []
        columns = self._columns
        shown = [key for key in columns if key not in places]
        if self._choice.may_stay(shown, metrics):
            chosen = shown
        if not {*places, *chosen} <= set(columns):
            columns = (*places, *chosen)
        is_new = columns != self._columns or self._num_rows >= _ROWS
        self._columns, self._num_rows = columns, 1 if is_new else self._num_rows + 1
        values = {key: format_short(metrics.get(key)) for key in columns} | places
        widths = {key: max(len(_name(key, columns)), len(key) if key in places else _WIDTH) for key in columns}
        names = "  ".join(_name(key, columns).rjust(widths[key]) for key in columns)
        row = "  ".join(values[key].rjust(widths[key]) for key in columns)
        return [names, row] if is_new else [row]


def _places(record: Record) -> dict[str, str]:
    """Where in the run it is; in the step loop the axis is the step alone."""
    if record.step is None:
        return {"epoch": str(record.epoch)}
    if record.epoch == record.step:
        return {" step": str(record.step)}
    return {"epoch": str(record.epoch), " step": str(record.step)}


def _name(key: str, columns: tuple[str, ...]) -> str:
    """The metric's own name; with its hook where two hooks have one of that name."""
    name = split_key(key)[1]
    return name if sum(split_key(other)[1] == name for other in columns) == 1 else key
