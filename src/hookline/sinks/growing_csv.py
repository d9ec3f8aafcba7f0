"""A CSV file that grows to the right without being written anew for each new column.

Takes rows from `CSVSink`. How a header grows: while the file is small it is replaced by a tidy one (temporary file,
then rename). Beyond that the header is followed by room, which is empty lines: `csv.DictReader`, pandas and R skip
them. A new column is written over the first of them, by one small system call, and only when the room is used up is
the file copied, with twice the room; so n new columns cost log n copies, not n. At any moment the header names every
cell of every row, also if the process is killed.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

__all__ = ["TableFile"]

_SMALL: Final = 16_384
"""Bytes up to which a file is replaced for each new column: about 50 µs."""
_ROOM: Final = 4_096
"""The least room for new columns."""


class TableFile:
    """A CSV file with named columns; rows are dictionaries."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.rows = 0
        """How many there are, the header apart."""
        self._place = {name: place for place, name in enumerate(columns)}
        self._header = 0  # bytes of the header without its newline
        self._room = 0  # empty lines after it
        self._end = 0  # bytes of the file
        self._ragged = False
        self._file = -1

    @classmethod
    def create(cls, paths: Iterable[Path], columns: Sequence[str]) -> TableFile:
        """A new file, at the first of these paths where there is none."""
        for path in paths:
            try:
                file = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            table = cls(path, columns)
            table._file = file
            table._write(_line([*map(_cell, columns)]))
            table._header = table._end - 1
            return table
        raise FileExistsError("No path is free.")

    @classmethod
    def open(cls, path: Path, rows: int) -> TableFile:
        """A file of ours, as it was after that many rows; what comes later is cut off."""
        with path.open("rb") as file:
            lines = _records(file)
            header = next(lines, b"")
            table = cls(path, _cells(header))
            table._header = max(len(header) - 1, 0)
            table._end = len(header)
            for line in lines:
                if line == b"\n":
                    table._room += 1
                elif table.rows == rows:
                    break
                else:
                    table.rows += 1
                    table._ragged = True
                table._end += len(line)
        table._file = os.open(path, _FLAGS)
        os.ftruncate(table._file, table._end)
        return table

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row, by one system call; columns that are new come first."""
        place = self._place
        if not row.keys() <= place.keys():
            self._widen([name for name in row if name not in place])
            place = self._place
        cells = [""] * len(place)
        for name, value in row.items():
            cells[place[name]] = repr(value) if type(value) is float else _cell(value)
        line = _line(cells)
        self.rows += 1
        try:
            self._write(line)
        except Exception:
            self.rows -= 1
            raise

    def tidy(self) -> None:
        """Fill short rows up and take the room away, if there are any."""
        if self._room or self._ragged:
            self._replace(0, pad=True)

    def close(self) -> None:
        """Tidy up, and let go of the file; once or more often."""
        if self._file >= 0:
            try:
                self.tidy()
            finally:
                os.close(self._file)
                self._file = -1

    # -- the header -------------------------------------------------------------------------------------------

    def _widen(self, new: Sequence[str]) -> None:
        """Name columns before the first row that has them."""
        more = b"," + _line([*map(_cell, new)])[:-1]
        known, header = dict(self._place), self._header
        for name in new:
            self._place[name] = len(self._place)
        try:
            if self._end <= _SMALL:
                self._replace(0, pad=True)
            elif len(more) <= self._room:
                self._write_over(more)
            else:
                self._replace(max(_ROOM, 2 * self._header), pad=False)
        except BaseException:
            if self._header == header:  # else Ctrl-C came when it was done already
                self._place = known
            raise
        self._ragged = self._ragged or self._end > _SMALL

    def _write_over(self, more: bytes) -> None:
        # The newline behind is there already: it was the room's. Counted first, as Ctrl-C may come after the writing.
        place, self._header, self._room = self._header, self._header + len(more), self._room - len(more)
        try:
            os.pwrite(self._file, more, place)
        except OSError:
            self._header, self._room = place, self._room + len(more)
            raise

    def _replace(self, room: int, *, pad: bool) -> None:
        """Write the file anew beside it, then put it in its place: a reader sees the old one or the new one."""
        beside = self.path.with_name(self.path.name + ".tmp")
        header = _line([*map(_cell, self._place)])
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
                # Before the old one is closed: its number may soon be that of somebody else's file.
                file, self._file, self._end, self._header, self._room = self._file, file, end, len(header) - 1, room
                self._ragged = self._ragged and not pad
            beside.unlink(missing_ok=True)
            if file >= 0:
                os.close(file)

    # -- bytes ------------------------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        """All of it, or an `OSError` and nothing: a disk that is full leaves no half row."""
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


_SPECIAL: Final = frozenset(',"\r\n')
_FLAGS: Final = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _line(cells: Sequence[str]) -> bytes:
    return ",".join(cells).encode("utf-8", "backslashreplace") + b"\n"


def _cell(value: Any) -> str:
    """A value as the csv module writes it, asked only where it would quote: numbers need half the time without it."""
    text = str(value)
    if _SPECIAL.isdisjoint(text):
        return text
    buffer = io.StringIO()
    # With this ending the module quotes both of its signs in a cell; a bare \r would end a row for its reader.
    csv.writer(buffer, lineterminator="\r\n").writerow([text])
    return buffer.getvalue()[:-2]


def _cells(line: bytes) -> list[str]:
    return next(csv.reader(io.StringIO(line.decode("utf-8", "replace"), newline="")), [])


def _records(file: IO[bytes]) -> Iterator[bytes]:
    """The rows as they stand, each with its newline, which may not be its only one; not a half-written last one."""
    whole = b""
    for line in file:
        whole += line
        if whole.count(b'"') % 2 == 0:
            if whole.endswith(b"\n"):
                yield whole
            whole = b""


def _copy(old: IO[bytes], new: IO[bytes], width: int | None) -> None:
    """The rest of a file; with a width, rows that are shorter are filled up."""
    if width is None:
        while block := old.read(1 << 20):
            new.write(block)
        return
    for line in _records(old):
        if line == b"\n":
            continue
        # Every other piece between quotes stands in quotes, and its commas part nothing.
        count = 1 + sum(piece.count(b",") for piece in line.split(b'"')[::2])
        new.write(line if count >= width else line[:-1] + b"," * (width - count) + b"\n")
