"""Write metrics as a CSV table: a line per record, a column per metric.

A `Reader` hands records to `CSVSink`. A new column has the file written again with the wider header.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Final

from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.records.sink import FileSink, Record, StepSeries
from hookline.records.values import json_text, to_plain

_PLACES: Final = ("step", "epoch", "hook_point")
"""Columns of every row that has them; no metric's."""
_QUOTED: Final = frozenset(',"\r\n')


class CSVSink(FileSink):
    """One CSV file per strategy; its columns are ``epoch``, ``hook_point``, then metrics as they are first seen.

    Of a run that counts steps (``step_loop``, ``loop="step"``) the first column is ``step``, and there is no ``epoch``.

    Recipe::

        sink = hookline.sinks.CSVSink("metrics.csv")
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        print(sink.path.read_text())  # two lines: epoch,hook_point,norms/total and 0,POST_EPOCH,1.5

    Each row is written, by one system call, before ``emit`` returns. A metric that is new has the file written again
    with the wider header, and empty cells in the rows before. A dictionary is ``k:v;k:v``, a list ``a;b``, None an
    empty cell, NaN ``nan``; a metric called ``epoch`` or ``step`` has the column ``metric/epoch``, ``metric/step``. The
    file is never overwritten: if there is one, this one gets ``_1``, ``_2``, …

    Args:
        filepath: The file; if left out, one in ``output_dir``, or in the folder of the run.
        output_dir: A folder; with ``experiment_name``.
        experiment_name: The folder below it.
        rows: ``"record"``, or ``"step"``: a row for each step, with a column ``step`` in front, and one number in each
            cell in place of a list of those of many steps.
    """

    ending: ClassVar[str] = ".csv"

    def __init__(
        self,
        filepath: str | Path | None = None,
        *,
        output_dir: str | Path | None = None,
        experiment_name: str | None = None,
        rows: str = "record",
    ) -> None:
        if rows not in ("record", "step"):
            raise OptionError(f"rows= of a CSVSink is 'record' or 'step'; got {rows!r}.")
        self._per_step = rows == "step"
        if filepath is None and (output_dir is None) != (experiment_name is None):
            raise OptionError("CSVSink requires either filepath or (output_dir + experiment_name).")
        super().__init__(filepath, output_dir=output_dir, experiment_name=experiment_name)
        self._names: dict[str, str] = {}  # the column of each metric
        self._place: dict[str, int] = {}  # of each column in a row
        self._width = 0  # columns in the header of the file

    def write(self, record: Record) -> None:
        """Write a row, or one for each step."""
        file, point = self._file or self._open_file(), record.point
        if file is None:
            self._drop()
            return
        rows = [self._row(place, point, metrics) for place, metrics in self._rows(record)]
        if len(self._place) > self._width > 0:
            self._write_wider(rows)
            return
        lines = b"".join(map(self._line, rows))
        if not self._width:
            lines = _joined(map(_quoted, self._place)) + lines
        file.write(lines)
        self._width = len(self._place)

    def _rows(self, record: Record) -> Iterable[tuple[dict[str, int], Mapping[str, Any]]]:
        """Return the places and metrics of each row."""
        epoch = {} if record.epoch is None else {"epoch": record.epoch}
        if not self._per_step:
            return [(epoch or {"step": record.position}, record.metrics)]
        found: dict[int, dict[str, Any]] = {}
        at = -1 if record.step is None else record.step
        for name, value in record.metrics.items():
            series = zip(value.steps, value, strict=True) if isinstance(value, StepSeries) else [(at, value)]
            for step, one in series:
                found.setdefault(step, {})[name] = one
        return [({"step": step, **epoch}, found[step]) for step in sorted(found)]

    def _row(self, place: Mapping[str, int], point: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the cells of a row by their columns, of which some may be new."""
        row: dict[str, Any] = {**place, "hook_point": point}
        for name, value in metrics.items():
            column = self._names.get(name)
            if column is None:
                column = self._names[name] = f"metric/{name}" if name in _PLACES else str(name)
            row[column] = repr(value) if type(value) is float else _quoted(_cell(value))
        if not row.keys() <= self._place.keys():
            for column in row:
                self._place.setdefault(column, len(self._place))
        return row

    def _line(self, row: Mapping[str, Any]) -> bytes:
        cells = [""] * len(self._place)
        for column, text in row.items():
            cells[self._place[column]] = str(text)
        return _joined(cells)

    def _write_wider(self, new: list[dict[str, Any]]) -> None:
        """Write the file again with all columns, and new rows; a reader sees the old one or the new one."""
        assert self.path is not None
        path = self.path

        def write(draft: Path) -> None:
            with draft.open("wb", buffering=1 << 18) as file, path.open(encoding="utf-8", newline="") as old:
                rows = csv.reader(old)
                more = [""] * (len(self._place) - len(next(rows, [])))
                file.write(_joined(map(_quoted, self._place)))
                file.writelines(_joined(map(_quoted, [*row, *more])) for row in rows)
                file.writelines(map(self._line, new))
            self._release()  # what is written from now on goes to the new file

        replace_file(path, write)
        self._width = len(self._place)
        self._open_file()

    def _forget(self) -> None:
        super()._forget()
        self._place, self._width = {}, 0


def _cell(value: Any) -> str:
    """Return what a cell holds: a dictionary as ``k:v;k:v``, a list as ``a;b``, deeper as JSON."""
    value = to_plain(value)
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ";".join(f"{key}:{_item(item)}" for key, item in value.items())
    return ";".join(map(_item, value)) if isinstance(value, list) else str(value)


def _item(value: Any) -> str:
    if type(value) is float:
        return repr(value)
    value = to_plain(value)
    return json_text(value) if isinstance(value, (Mapping, list)) else _cell(value)


def _joined(cells: Iterable[str]) -> bytes:
    return ",".join(cells).encode("utf-8", "backslashreplace") + b"\n"


def _quoted(text: str) -> str:
    """Return ``text`` as the csv module writes it; without calling it, numbers need half the time."""
    if _QUOTED.isdisjoint(text):
        return text
    buffer = StringIO()
    # With this line ending the module quotes \r as well as \n in a cell; a bare \r would end a row for its reader.
    csv.writer(buffer, lineterminator="\r\n").writerow([text])
    return buffer.getvalue()[:-2]
