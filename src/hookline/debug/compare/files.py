"""Write the files of one rank's trace: lines that are appended, and safetensors files that appear whole.

The trace's hooks call `TraceWriter`; `read_trace` reads what it writes::

    TRACE/trace.json                        the name and version of the format
    TRACE/rank_0/records-000.jsonl          one JSON object per line, see below
    TRACE/rank_0/tensors-000000.safetensors tensors, by the keys that records name

The first line has ``head``, the settings. A line with ``place`` gives a number to site, kind, leaf, shape and dtype;
one with ``rows`` gives one to a table of rows. A line with ``batch`` has many records by columns: places, steps, calls,
and their numbers as base64 (``numbers`` float64, ``sketches`` float32, ``hashes`` uint64), since writing each number as
text would take longer than finding it. A line with ``note`` is for people, with ``left_out`` true of something that is
missing, and one with ``end`` is the last of a trace that was closed. Each batch is handed to the system in one call:
whatever kills the process, at most one line is cut. What Ctrl-C or a full disk has cut ends where the next line begins;
a batch that comes again has the same ``order``.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.compare.key import MeshPlacement
from hookline.debug.compare.rows import RowTable
from hookline.errors import TraceError
from hookline.files import FileLock, lock_holder, replace_file, take_lock

__all__ = ["FORMAT", "VERSION", "RecordBatch", "TracePlace", "TraceWriter"]

FORMAT: Final = "hookline.trace"
VERSION: Final = 1
NUMBERS: Final = ("mean", "norm", "absmax", "nan", "inf")
"""The columns of ``numbers``."""
_RECORDS: Final = "records-000.jsonl"
_TENSORS: Final = "tensors-{number:06d}.safetensors"
_LOCK: Final = "writer.lock"


@dataclass(frozen=True, slots=True)
class TracePlace:
    """What many records have in common."""

    site: str
    kind: str
    leaf: str
    shape: tuple[int, ...]
    dtype: str
    dims: str | None = None
    placements: MeshPlacement | None = None


@dataclass(slots=True)
class RecordBatch:
    """Records by columns; all are of one length."""

    place: list[int]
    """Numbers from `TraceWriter.place_number`."""
    step: list[int]
    call: list[int]
    micro_batch: list[int]
    recompute: list[int]
    rows: list[int | None]
    """Numbers from `TraceWriter.rows_number`."""
    tensor: list[str | None]
    """Keys from `TraceWriter.add_tensors`."""
    numbers: NDArray[np.float64]
    """Of shape (records, 5), by `NUMBERS`."""
    sketches: NDArray[np.float32]
    """Of shape (records, groups)."""
    hashes: NDArray[np.uint64]


class TraceWriter:
    """Append to the folder of one rank; one process at a time, and to no trace that is there already.

    Args:
        folder: The folder of the trace, of all ranks.
        rank: The rank of this process.
        head: Settings to keep: ``kinds``, and whatever the reader should know.
    """

    def __init__(self, folder: Path, rank: int, head: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rank = rank
        self.bytes = 0
        """How many bytes were written, of lines and tensors."""
        self._own = folder / f"rank_{rank}"
        self._places: dict[TracePlace, int] = {}
        self._rows: dict[RowTable, int] = {}
        self._pending: list[dict[str, Any]] = []
        """Lines that go out with the next batch."""
        self._order = 0
        self._files = 0
        self._file = -1
        self._is_cut = False
        """Whether a line was begun and not ended."""
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._begin(head)
        except OSError as error:
            raise TraceError(
                f"A trace cannot be written to {folder} ({error}). Give a folder that can be made and written to."
            ) from error

    def _take_lock(self) -> FileLock:
        lock = take_lock(self._own / _LOCK)
        if lock is None:
            raise TraceError(
                f"{self._own} is being written by process {lock_holder(self._own / _LOCK)}. Give each process a folder "
                "of its own, or start them as ranks of one run (torchrun)."
            )
        return lock

    def _begin(self, head: Mapping[str, Any]) -> None:
        """Make the file of records; if that fails, let others at the folder."""
        try:
            self._file = self._new_file()
            write_head(self.folder, head)
            self._append({"head": {"format": FORMAT, "version": VERSION, "rank": self.rank, **head}})
        except BaseException:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._lock.release()
            raise

    def _new_file(self) -> int:
        try:
            return os.open(self._own / _RECORDS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError:
            raise TraceError(f"{self._own} has a trace already. Give another folder, or delete this one.") from None

    @property
    def is_open(self) -> bool:
        """Return whether more can be written."""
        return self._file >= 0

    def place_number(self, place: TracePlace) -> int:
        """Return the number of a place; a new one is written with the next batch."""
        number = self._places.get(place)
        if number is None:
            number = len(self._places)
            self._pending.append({"place": number, **asdict(place)})
            self._places[place] = number  # last: Ctrl-C in between leaves no number without its line
        return number

    def rows_number(self, table: RowTable) -> int:
        """Return the number of a table of rows; a new one is written with the next batch."""
        number = self._rows.get(table)
        if number is None:
            number = len(self._rows)
            self._pending.append({"rows": number, **asdict(table)})
            self._rows[table] = number
        return number

    def add_tensors(self, tensors: Sequence[Tensor]) -> list[str]:
        """Write a safetensors file of tensors, which lie on the CPU; return their keys, for records."""
        from safetensors.torch import save_file

        name = _TENSORS.format(number=self._files)
        self._files += 1
        numbered = {str(number): _plain(each) for number, each in enumerate(tensors)}
        replace_file(self._own / name, lambda draft: save_file(numbered, draft))
        self.bytes += (self._own / name).stat().st_size
        return [f"{name}#{number}" for number in range(len(tensors))]

    def add_records(self, batch: RecordBatch) -> None:
        """Append records, which get running numbers in their order."""
        count = len(batch.place)
        line = {
            "batch": count,
            "order": self._order,
            "place": batch.place,
            **{
                key: _short(getattr(batch, key))
                for key in ("step", "call", "micro_batch", "recompute", "rows", "tensor")
            },
            "numbers": _base64(batch.numbers, "<f8"),
            "sketches": _base64(batch.sketches, "<f4"),
            "hashes": _base64(batch.hashes, "<u8"),
        }
        self._append(*self._pending, line)
        self._order += count  # a batch that Ctrl-C has cut comes again, with the same numbers
        self._pending.clear()

    def add_note(self, text: str, *, is_left_out: bool) -> None:
        """Append a sentence for people, and whether it is of something that is missing in the trace."""
        self._append({"note": text, "left_out": is_left_out, "order": self._order})

    def close(self) -> None:
        """Mark the trace as complete and let others at the folder; may be called again."""
        if self._file < 0:
            return
        try:
            self._append(*self._pending, {"end": self._order})
        finally:
            os.close(self._file)
            self._file = -1
            self._lock.release()

    def discard(self) -> None:
        """Close, and remove what this rank has written, so that another trace may begin here."""
        self.close()
        shutil.rmtree(self._own, ignore_errors=True)
        if not any(self.folder.glob("rank_*")):
            (self.folder / "trace.json").unlink(missing_ok=True)
            with suppress(OSError):  # something else lies in it
                self.folder.rmdir()

    def _append(self, *lines: dict[str, Any]) -> None:
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines).encode()
        if self._is_cut:
            text = b"\n" + text
        self._is_cut = True
        done = 0
        while done < len(text):
            done += os.write(self._file, text[done:])
        self._is_cut = False
        self.bytes += len(text)


def write_head(folder: Path, head: Mapping[str, Any]) -> None:
    """Write ``trace.json``, unless another rank was here before."""
    about = {"format": FORMAT, "version": VERSION, **head}
    part = folder / f"trace.json.{os.getpid()}.part"
    part.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    try:
        os.link(part, folder / "trace.json")  # fails if it is there; a reader never finds half of it
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        part.replace(folder / "trace.json")
    part.unlink(missing_ok=True)


def _short(column: list[Any]) -> Any:
    """Return one value for a column that has no other."""
    return column[0] if column and column.count(column[0]) == len(column) else column


def _base64(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode("ascii")


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as the format takes it: in memory of its own; complex128 and complex32 as pairs."""
    found = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(found) if found.dtype in (torch.complex128, torch.complex32) else found
