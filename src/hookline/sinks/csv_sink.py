"""Write metrics as a CSV table: a line per record, a column per metric.

The fan-out hands records to `CSVSink`, which appends rows to a `GrowingCSV`, a file that gains columns without being
rewritten for each. While the file is small it is replaced by a tidy one (temporary file, then rename). A larger file
has room after the header: empty lines, which `csv.DictReader`, pandas and R skip. A new column is written over the
first of them, by one small system call; only when the room is used up is the file copied, with twice the room. So n new
columns cost log n copies. At any moment the header names every cell of every row, also if the process is killed.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from hookline.errors import OptionError
from hookline.records.sink import Record, RowSink, StepSeries, free_paths
from hookline.records.values import column_name, json_text, to_plain, utf8_text

__all__ = ["CSVSink", "GrowingCSV"]

_PLACES: Final = ("step", "epoch", "hook_point")
"""Columns of every row that has them; no metric's."""
_NO_PLACE: Final = "CSVSink requires either filepath or (output_dir + experiment_name)"
_SMALL: Final = 16_384
"""Bytes up to which a file is replaced for each new column: about 50 µs."""
_ROOM: Final = 4_096
"""The least room for new columns."""
_QUOTED: Final = frozenset(',"\r\n')
_FLAGS: Final = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class CSVSink(RowSink["GrowingCSV"]):
    """One CSV file per strategy; its columns are ``epoch``, ``hook_point``, then metrics as they are first seen.

    Of a run that counts steps (``step_loop``, ``loop="step"``) the first column is ``step``, and there is no ``epoch``.

    Recipe::

        sink = hookline.sinks.CSVSink("metrics.csv")
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        print(sink.path.read_text())  # two lines: epoch,hook_point,norms/total and 0,POST_EPOCH,1.5

    Each row is written, by one system call, before ``emit`` returns. A metric that is new widens the header; rows from
    before it have empty cells there, or, until ``close``, end early, which every reader takes for empty. A dictionary
    is ``k:v;k:v``, a list ``a;b``, None an empty cell, NaN ``nan``; a metric called ``epoch`` or ``step`` has the
    column ``metric/epoch``, ``metric/step``. The file is never overwritten: if there is one, this one gets ``_1``,
    ``_2``, …

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
            raise OptionError(_NO_PLACE + ".")
        super().__init__(filepath, output_dir=output_dir, experiment_name=experiment_name)
        self._columns: dict[str, str] = {}

    def _write(self, record: Record) -> None:
        table = self._rows or self._open()
        if table is None:
            self._drop(f"{_NO_PLACE}, or a run_dir or strategy told by set_run_context().")
            return
        axis = {} if record.epoch is None else {"epoch": record.epoch}
        rows: list[tuple[dict[str, Any], Mapping[str, Any]]] = [(axis or {"step": record.position}, record.metrics)]
        if self._per_step:
            rows = [({"step": step, **axis}, metrics) for step, metrics in sorted(_by_step(record).items())]
        for row, metrics in rows:
            row["hook_point"] = record.point
            for name, value in metrics.items():
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = column_name(str(name), _PLACES)
                row[column] = value if type(value) is float else _cell_value(value)
            table.append(row)

    def _create(self, wanted: Path) -> GrowingCSV:
        return GrowingCSV.create(free_paths(wanted), ())  # the first record tells whether epochs or steps are counted

    def _reopen(self, path: Path, count: int) -> GrowingCSV:
        return GrowingCSV.open(path, count)


def _by_step(record: Record) -> dict[int, dict[str, Any]]:
    """Return the metrics of a record for each step; those that are no series at the step of the record."""
    found: dict[int, dict[str, Any]] = {}
    at = -1 if record.step is None else record.step
    for name, value in record.metrics.items():
        series = zip(value.steps, value, strict=True) if isinstance(value, StepSeries) else [(at, value)]
        for step, one in series:
            found.setdefault(step, {})[name] = one
    return found


def _cell_value(value: Any) -> Any:
    """Return what a cell holds: a number as it is, a dictionary as ``k:v;k:v``, a list as ``a;b``, deeper as JSON."""
    cls = type(value)
    if cls is float or cls is int:
        return value
    value = to_plain(value)
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ";".join(f"{utf8_text(str(key))}:{_item_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ";".join(map(_item_text, value))
    return utf8_text(value) if isinstance(value, str) else value


def _item_text(value: Any) -> str:
    if type(value) is float:
        return repr(value)
    value = to_plain(value)
    return json_text(value) if isinstance(value, (Mapping, list)) else utf8_text(str(_cell_value(value)))


class GrowingCSV:
    """A CSV file with named columns, which may gain columns; rows are dictionaries."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.rows = 0
        """How many there are, without the header."""
        self._place = {name: place for place, name in enumerate(columns)}
        self._header = 0  # bytes of the header without its newline
        self._room = 0  # empty lines after it
        self._end = 0  # bytes of the file
        self._is_ragged = False
        self._file = -1

    @classmethod
    def create(cls, paths: Iterable[Path], columns: Sequence[str]) -> GrowingCSV:
        """Make a new file at the first of ``paths`` where there is none."""
        for path in paths:
            try:
                file = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            table = cls(path, columns)
            table._file = file
            table._write(_join([*map(_quote, columns)]))
            table._header = table._end - 1
            return table
        raise FileExistsError("No path is free.")

    @classmethod
    def open(cls, path: Path, rows: int) -> GrowingCSV:
        """Open a file that this class has written, as it was after ``rows`` rows; cut off what comes later."""
        with path.open("rb") as file:
            lines = _read_rows(file)
            header = next(lines, b"")
            columns = next(csv.reader(io.StringIO(header.decode("utf-8", "replace"), newline="")), [])
            table = cls(path, columns)
            table._header = max(len(header) - 1, 0)
            table._end = len(header)
            for line in lines:
                if line == b"\n":
                    table._room += 1
                elif table.rows == rows:
                    break
                else:
                    table.rows += 1
                    table._is_ragged = True
                table._end += len(line)
        table._file = os.open(path, _FLAGS)
        os.ftruncate(table._file, table._end)
        return table

    def append(self, row: Mapping[str, Any]) -> None:
        """Write ``row`` by one system call, after the columns that are new."""
        place = self._place
        if not row.keys() <= place.keys():
            self._widen([name for name in row if name not in place])
            place = self._place
        cells = [""] * len(place)
        for name, value in row.items():
            cells[place[name]] = repr(value) if type(value) is float else _quote(value)
        line = _join(cells)
        self.rows += 1
        try:
            self._write(line)
        except Exception:
            self.rows -= 1
            raise

    def tidy(self) -> None:
        """Fill short rows up and remove the room."""
        if self._room or self._is_ragged:
            self._replace(0, pad=True)

    def close(self) -> None:
        """Tidy up, and close the file. May be called more than once."""
        if self._file >= 0:
            try:
                self.tidy()
            finally:
                os.close(self._file)
                self._file = -1

    def _widen(self, new: Sequence[str]) -> None:
        """Name columns in the header, before the first row that has them."""
        more = b"," + _join([*map(_quote, new)])[:-1]
        known, header = dict(self._place), self._header
        for name in new:
            self._place[name] = len(self._place)
        try:
            if self._end <= _SMALL:
                self._replace(0, pad=True)
            elif len(more) <= self._room:
                self._write_over_room(more)
            else:
                self._replace(max(_ROOM, 2 * self._header), pad=False)
        except BaseException:
            if self._header == header:  # else Ctrl-C came when it was done already
                self._place = known
            raise
        self._is_ragged = self._is_ragged or self._end > _SMALL

    def _write_over_room(self, more: bytes) -> None:
        # The newline behind is there already: it was the room's. Counted first, as Ctrl-C may come after the writing.
        place, self._header, self._room = self._header, self._header + len(more), self._room - len(more)
        try:
            os.pwrite(self._file, more, place)
        except OSError:
            self._header, self._room = place, self._room + len(more)
            raise

    def _replace(self, room: int, *, pad: bool) -> None:
        """Write the file anew beside it, then rename: a reader sees the old one or the new one."""
        beside = self.path.with_name(self.path.name + ".tmp")
        header = _join([*map(_quote, self._place)])
        file = -1
        try:
            with beside.open("wb", buffering=1 << 18) as new, self.path.open("rb", buffering=1 << 18) as old:
                new.write(header + b"\n" * room)
                old.seek(self._header + 1 + self._room)
                _copy(old, new, len(self._place) if pad else None)
                end = new.tell()
            file = os.open(beside, _FLAGS)
            os.replace(beside, self.path)
        finally:
            if file >= 0 and not beside.exists():  # it is in its place, also if Ctrl-C came just then
                # Before the old one is closed: its number may soon be that of another open file.
                file, self._file, self._end, self._header, self._room = self._file, file, end, len(header) - 1, room
                self._is_ragged = self._is_ragged and not pad
            beside.unlink(missing_ok=True)
            if file >= 0:
                os.close(file)

    def _write(self, line: bytes) -> None:
        """Append all of ``line``, or raise `OSError` and leave nothing of it: a full disk leaves no half row."""
        # Asked of the system: Ctrl-C may have come between the writing of the row before and any counting.
        end, done = os.fstat(self._file).st_size, 0
        try:
            while done < len(line):
                done += os.pwrite(self._file, line[done:] if done else line, end + done)
        except OSError:
            if done:
                os.ftruncate(self._file, end)
            raise
        self._end = end + len(line)


def _join(cells: Sequence[str]) -> bytes:
    return ",".join(cells).encode("utf-8", "backslashreplace") + b"\n"


def _quote(value: Any) -> str:
    """Return ``value`` as the csv module writes it; without calling it, numbers need half the time."""
    text = str(value)
    if _QUOTED.isdisjoint(text):
        return text
    buffer = io.StringIO()
    # With this line ending the module quotes \r as well as \n in a cell; a bare \r would end a row for its reader.
    csv.writer(buffer, lineterminator="\r\n").writerow([text])
    return buffer.getvalue()[:-2]


def _read_rows(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each row with its newline, which may not be its only one; not a half-written last row."""
    whole = b""
    for line in file:
        whole += line
        if whole.count(b'"') % 2 == 0:
            if whole.endswith(b"\n"):
                yield whole
            whole = b""


def _copy(old: IO[bytes], new: IO[bytes], width: int | None) -> None:
    """Copy the rest of ``old``; with ``width``, fill shorter rows up to that many cells."""
    if width is None:
        while block := old.read(1 << 20):
            new.write(block)
        return
    for line in _read_rows(old):
        if line == b"\n":
            continue
        # Every second piece between quotes is quoted text, and its commas separate nothing.
        count = 1 + sum(piece.count(b",") for piece in line.split(b'"')[::2])
        new.write(line if count >= width else line[:-1] + b"," * (width - count) + b"\n")
