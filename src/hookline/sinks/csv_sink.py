"""Metrics as a table: a line per record, a column per metric.

Takes records from the fan-out, hands rows to a `TableFile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from hookline.errors import OptionError
from hookline.sinks.flat_metrics import clean, json_text, plain, renamed
from hookline.sinks.growing_csv import TableFile
from hookline.sinks.record import Record
from hookline.sinks.row_sink import RowSink
from hookline.sinks.sink_paths import candidates

__all__ = ["CSVSink"]

_FIRST: Final = ("epoch", "hook_point")
_NOWHERE: Final = "CSVSink requires either filepath or (output_dir + experiment_name)"


class CSVSink(RowSink[TableFile]):
    """One CSV file per strategy; its columns are ``epoch``, ``hook_point``, then metrics as they are first seen.

    Recipe::

        sink = hookline.sinks.CSVSink("metrics.csv")
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        print(sink.path.read_text())  # two lines: epoch,hook_point,norms/total and 0,POST_EPOCH,1.5

    Each row is written, by one system call, before ``emit`` returns. A metric that is new widens the header; rows from
    before it have empty cells there, or, until ``close``, end early, which every reader takes for empty. A dictionary
    is ``k:v;k:v``, a list ``a;b``, None an empty cell, NaN ``nan``; a metric called ``epoch`` has the column
    ``metric/epoch``. The file is never overwritten: if there is one, this one gets ``_1``, ``_2``, …
    """

    ending: ClassVar[str] = ".csv"

    def __init__(
        self,
        filepath: str | Path | None = None,
        *,
        output_dir: str | Path | None = None,
        experiment_name: str | None = None,
    ) -> None:
        if filepath is None and (output_dir is None) != (experiment_name is None):
            raise OptionError(_NOWHERE + ".")
        super().__init__(filepath, output_dir=output_dir, experiment_name=experiment_name)
        self._columns: dict[str, str] = {}

    def _write(self, record: Record) -> None:
        table = self._rows or self._opened()
        if table is None:
            self._drop(f"{_NOWHERE}, or a run_dir or strategy told by set_run_context().")
            return
        row: dict[str, Any] = {"epoch": record.epoch, "hook_point": record.point}
        for name, value in record.metrics.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = renamed(str(name), _FIRST)
            row[column] = value if type(value) is float else cell(value)
        table.append(row)

    def _new(self, wanted: Path) -> TableFile:
        return TableFile.create(candidates(wanted), _FIRST)

    def _again(self, path: Path, count: int) -> TableFile:
        return TableFile.open(path, count)


def cell(value: Any) -> Any:
    """What stands in a cell: numbers as they are, dictionaries ``k:v;k:v``, lists ``a;b``, what is deeper as JSON."""
    kind = type(value)
    if kind is float or kind is int:
        return value
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ";".join(f"{clean(str(key))}:{_inner(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ";".join(map(_inner, value))
    return clean(value) if isinstance(value, str) else value


def _inner(value: Any) -> str:
    if type(value) is float:
        return repr(value)
    value = plain(value)
    return json_text(value) if isinstance(value, (Mapping, list)) else clean(str(cell(value)))
