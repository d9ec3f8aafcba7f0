"""Write a trace, as lines that are appended and safetensors files that appear whole, and read it back.

The trace's hooks call `TraceWriter`; users and `compare` call `read_trace`, which runs and unpickles nothing::

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
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.compare.key import Fingerprint, MeshPlacement, RowKeys, Value, ValueKey
from hookline.debug.compare.rows import RowTable
from hookline.errors import TraceError
from hookline.files import FileLock, lock_holder, replace_file, take_lock

__all__ = ["FORMAT", "VERSION", "RecordBatch", "TraceFolder", "TracePlace", "TraceWriter", "read_trace"]

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


# -- reading ----------------------------------------------------------------------------------------------------------

_COLUMNS: Final = ("place", "step", "call", "micro_batch", "recompute", "rows", "tensor")


@dataclass(slots=True)
class _RankLines:
    """What was found in the files of one rank."""

    folder: Path
    rank: int
    head: dict[str, Any] = field(default_factory=dict)
    places: dict[int, TracePlace] = field(default_factory=dict)
    rows: dict[int, RowTable] = field(default_factory=dict)
    keys_of_rows: dict[tuple[int, tuple[int, ...]], RowKeys | None] = field(default_factory=dict)
    """By the number of a table and a shape."""
    records: list[Value] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    is_complete: bool = False


class TraceFolder:
    """A trace that was read.

    Recipe::

        folder = read_trace("trace")
        print(folder.problems or "complete")
        for record in folder.records:
            if record.read is not None:
                print(record.label, record.tensor().abs().max())
    """

    def __init__(self, path: Path, head: dict[str, Any], ranks: dict[int, _RankLines], problems: list[str]) -> None:
        lines = [ranks[rank] for rank in sorted(ranks)]
        self.path = path
        self.head = head
        """The settings it was written with: ``kinds``, ``model``, …"""
        self.records: tuple[Value, ...] = tuple(record for each in lines for record in each.records)
        """All records, rank by rank, each in the order they were made."""
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))
        self.problems: tuple[str, ...] = tuple(problems)
        """What is wrong with the files, in words: cut lines, a writer that was killed, files that are missing. Records
        that could be read are there all the same."""
        self.notes: tuple[str, ...] = tuple(note for each in lines for note in each.notes)
        """What the writer has to say: what it left out and why (a spent budget, sparse tensors, parameters of another
        optimizer, a full disk), each once; and what the user has noted."""
        self.left_out: tuple[str, ...] = tuple(note for each in lines for note in each.left_out)
        """Those of the notes by which something is missing in the trace."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps there are records of."""
        return tuple(sorted({record.step for record in self.records}))

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        state = f", {len(self.problems)} problem(s)" if self.problems else ""
        return f"<TraceFolder {str(self.path)!r}: {len(self.records)} records, {len(self.ranks)} rank(s){state}>"


def read_trace(path: str | Path) -> TraceFolder:
    """Read a trace, also one whose writer was killed or is still at work.

    Recipe::

        folder = hookline.debug.read_trace("trace")
        print(folder, folder.problems)

    Args:
        path: The folder that ``trace(..., to=path)`` has written.
    """
    path = Path(path)
    problems: list[str] = []
    if not path.is_dir():
        raise TraceError(
            f"read_trace({str(path)!r}): there is no such folder. Give the folder that trace(to=) was given."
        )
    folders = {int(each.name[5:]): each for each in path.glob("rank_*") if each.is_dir() and each.name[5:].isdecimal()}
    head = _read_head(path, problems)
    if not folders and not head:
        raise TraceError(f"{path} is no trace: there is neither trace.json nor a folder rank_0 in it.")
    ranks = {rank: _read_rank(folder, rank, problems) for rank, folder in sorted(folders.items())}
    head = head or next((lines.head for lines in ranks.values() if lines.head), {})
    missing = sorted(set(range(int(head.get("ranks", 1)))) - set(ranks))
    if missing:
        problems.append(
            f"There is no folder of rank {', '.join(map(str, missing))}, of {head.get('ranks', 1)} rank(s)."
        )
    return TraceFolder(path, head, ranks, problems)


def _read_head(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        head: Any = json.loads((path / "trace.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append("There is no trace.json; the settings are those in the files of the ranks.")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"trace.json cannot be read ({error}); the settings are those in the files of the ranks.")
        return {}
    _check_version(head, path / "trace.json")
    return dict(head)


def _check_version(head: Any, where: Path) -> None:
    """Raise unless this hookline can read the format."""
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceError(f"{where} is not of a trace: it does not say that its format is {FORMAT!r}.")
    if head.get("version") != VERSION:
        raise TraceError(
            f"{where} is of version {head.get('version')!r}, this hookline reads {VERSION}. Update hookline."
        )


def _read_rank(folder: Path, rank: int, problems: list[str]) -> _RankLines:
    found = _RankLines(folder, rank)
    files = sorted(folder.glob("records-*.jsonl"))
    if not files:
        problems.append(f"rank {rank}: there is no records-*.jsonl in {folder}.")
        return found
    for file in files:
        for number, line in _lines(file, rank, problems):
            try:
                _take(line, found, file)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"rank {rank}: line {number} of {file.name} is damaged ({error!r}); it was left out.")
    if not found.is_complete:
        problems.append(f"rank {rank}: the trace was not closed; its writer was killed, or is still writing.")
    return found


def _lines(file: Path, rank: int, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if text == b"\n":
                continue
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("no JSON object")
            except ValueError:
                how = "is cut off" if not text.endswith(b"\n") else "is no JSON"
                problems.append(f"rank {rank}: line {number} of {file.name} {how}; it was left out.")
                continue
            yield number, line


def _take(line: dict[str, Any], found: _RankLines, file: Path) -> None:
    """Add what one line says; a line that this version does not know is passed over."""
    if "head" in line:
        _check_version(line["head"], file)
        found.head = line["head"]
    elif "batch" in line:
        records = _records(line, found)
        while found.records and found.records[-1].order >= line["order"]:  # its writer was interrupted: it came again
            found.records.pop()
        found.records += records
    elif "place" in line:
        found.places[line["place"]] = _place(line)
    elif "rows" in line:
        fields = ("requests", "starts", "lengths", "positions")
        requests, starts, lengths, positions = (tuple(line[key]) for key in fields)
        table = RowTable(line["layout"], requests, starts, lengths, positions, line.get("width", 0))
        found.rows[line["rows"]] = table
    elif "note" in line:
        found.notes.append(line["note"])
        found.left_out += [line["note"]] if line.get("left_out") else []
    elif "end" in line:
        found.is_complete = True


def _place(line: dict[str, Any]) -> TracePlace:
    laid = line["placements"]
    placements = None if laid is None else MeshPlacement(**{key: tuple(value) for key, value in laid.items()})
    shape = tuple(line["shape"])
    return TracePlace(line["site"], line["kind"], line["leaf"], shape, line["dtype"], line["dims"], placements)


def _records(line: dict[str, Any], found: _RankLines) -> list[Value]:
    count, first = line["batch"], line["order"]
    numbers = _array(line["numbers"], "<f8", count, len(NUMBERS)).tolist()
    sketches = _array(line["sketches"], "<f4", count, -1).astype(np.float64).tolist()
    hashes = _array(line["hashes"], "<u8", count, 1).reshape(-1).tolist()
    columns = [line[key] if isinstance(line[key], list) else [line[key]] * count for key in _COLUMNS]
    if any(len(column) != count for column in columns):
        raise ValueError("columns of different lengths")
    records = []
    for index, (number, step, call, micro_batch, recompute, rows, tensor) in enumerate(zip(*columns, strict=True)):
        place = found.places[number]
        mean, norm, absmax, nan, inf = numbers[index]
        summary = (mean, norm, absmax, int(nan), int(inf), hashes[index], tuple(sketches[index]))
        key = ValueKey(found.rank, step, place.kind, place.site, place.leaf, call)
        records.append(
            Value(
                key,
                first + index,
                place.shape,
                place.dtype,
                read=None if tensor is None else partial(_stored_tensor, found.folder, tensor, key, place.dtype),
                fingerprint=Fingerprint(math.prod(place.shape), *summary),
                rows=None if rows is None else _row_keys(found, rows, place.shape),
                dims=place.dims,
                placements=place.placements,
                recompute=bool(recompute),
                micro_batch=micro_batch,
            )
        )
    return records


def _row_keys(found: _RankLines, number: int, shape: tuple[int, ...]) -> RowKeys | None:
    """Return whose the rows of a tensor of ``shape`` are, by the table of that number."""
    if (number, shape) not in found.keys_of_rows:
        found.keys_of_rows[number, shape] = found.rows[number].keys_for(shape)
    return found.keys_of_rows[number, shape]


def _stored_tensor(folder: Path, name: str, key: ValueKey, dtype: str) -> Tensor:
    """Return a tensor, mapped from its file: ``name`` is that of the file, and the key in it."""
    from safetensors import SafetensorError, safe_open

    file_name, _, number = name.partition("#")
    path = folder / file_name
    if file_name != Path(file_name).name:
        raise TraceError(f"{folder} names {file_name!r}, which is no file of its folder.")
    try:
        with safe_open(str(path), framework="pt") as file:
            found: Tensor = file.get_tensor(number)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}, with the tensor of {key.label}, cannot be read ({error}).") from error
    is_in_pairs = dtype in ("complex128", "complex32") and not found.is_complex()
    return torch.view_as_complex(found) if is_in_pairs else found


def _array(text: str, dtype: str, count: int, width: int) -> NDArray[Any]:
    flat = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return flat.reshape(count, width) if count else flat.reshape(0, max(width, 0))
