"""Write metrics as a long table in Parquet files: a row per value.

A `Reader` hands records to `ParquetSink`, which writes batches of rows by pyarrow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

from hookline.files import replace_file
from hookline.records.log import utf8_text
from hookline.records.sink import FileSink, Record
from hookline.records.values import json_text, number, values_in

_PART: Final = 50_000
"""Rows of a file: about 1 MB, which take 20 ms of the training thread to write."""
_SECONDS: Final = 10.0
"""How long rows wait at most, if more records come; then the last file, which is not full, is written again."""
_EXACT: Final = 2**53
_COLUMNS: Final = ("name", "value", "text", "step", "epoch", "point", "strategy", "rank", "time")


class ParquetSink(FileSink):
    """A folder of Parquet files per strategy, which readers take for one table, with a row for each value.

    Recipe::

        sink = hookline.sinks.ParquetSink("metrics.parquet")
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        sink.close()
        pandas.read_parquet("metrics.parquet")  # name, value, text, step, epoch, point, strategy, rank, time

    Of step metrics each value has its own row and step. Numbers are in ``value``, strings and lists (as JSON) in
    ``text``. Rows are written 50,000 at a time or after ten seconds, each file whole or not at all: a killed process
    leaves all files readable and loses what waited, which the log still has. A folder is never overwritten: if there
    is one, this one gets ``_1``, ``_2``, …
    """

    package: ClassVar[str | None] = "pyarrow"
    extra: ClassVar[str | None] = "parquet"
    ending: ClassVar[str] = ".parquet"

    is_folder: ClassVar[bool] = True

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path)
        self._waiting: list[tuple[Any, ...]] = []
        self._since = 0.0
        self._number = 0  # of the last file
        self._tables: list[Any] = []  # in the last file

    def write(self, record: Record) -> None:
        """Add the rows of a record; write those that wait if there are many or they have waited long."""
        self._import("pyarrow.parquet")
        if self._open_path() is None:
            self._drop()
            return
        # Written before the record is added: one that is given again, as the disk was full, must not be there twice.
        if len(self._waiting) >= _PART or time.monotonic() - self._since >= _SECONDS:
            self.flush()
        if not self._waiting:
            self._since = time.monotonic()
        strategy = None if record.strategy is None else utf8_text(record.strategy)
        same = (record.epoch, utf8_text(record.point), strategy, record.rank, float(record.time))
        self._waiting += [(name, *_cells(value), step, *same) for name, value, step in values_in(record)]

    def flush(self) -> None:
        """Write the rows that wait; the last file is written again until it is full."""
        if not self._waiting or self.path is None:
            return
        import pyarrow
        from pyarrow import parquet

        tables = [*self._tables, _table(self._waiting)]
        whole = pyarrow.concat_tables(tables)
        part = self.path / f"part-{self._number:05d}.parquet"  # readers skip its draft, whose name begins with a dot
        replace_file(part, lambda draft: parquet.write_table(whole, draft, compression="zstd"))
        self._waiting, self._tables = [], tables
        if sum(map(len, tables)) >= _PART:
            self._number, self._tables = self._number + 1, []

    def _forget(self) -> None:
        super()._forget()
        self._waiting, self._tables, self._number = [], [], 0


def _cells(value: Any) -> tuple[float | None, str | None]:
    """Return the number and the text of ``value``; both for an integer that is too large to be exact."""
    if type(value) is float:
        return value, None
    found = number(value)
    if found is not None:
        exact = not isinstance(value, int) or -_EXACT <= value <= _EXACT
        return found, None if exact else hex(value)  # decimal digits of a very long number take minutes
    if isinstance(value, str):
        return None, utf8_text(value)
    return None, None if value is None else json_text(value)


def _table(rows: Iterable[tuple[Any, ...]]) -> Any:
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    types = dict(zip(_COLUMNS, (text, real, text, whole, whole, text, text, pa.int32(), real), strict=True))
    arrays = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types.values(), strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(list(types.items())))
