"""Write a trace, as lines that are appended and safetensors files that appear whole, and read it back.

`TraceRecorder` calls `TraceWriter`; users and `compare` call `read_trace`, which runs and unpickles nothing::

    TRACE/rank_0/records.jsonl              one JSON object per line, see below
    TRACE/rank_0/tensors-000000.safetensors tensors of one batch of records, by their numbers

The first line has ``head``, the format and settings. A line with ``place`` gives a number to site, kind, leaf, shape
and dtype; one with ``rows`` gives one to a table of rows. A line with ``batch`` has many records by columns: places,
steps, calls, and their numbers as base64 (``numbers`` float64, ``sketches`` float32, ``hashes`` uint64), since writing
each number as text would take longer than finding it. A line with ``note`` is for people, with ``left_out`` true of
something that is missing, and one with ``end`` is the last of a trace that was closed. Each batch is handed to the
system in one call: whatever kills the process, at most one line is cut.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.compare.key import Fingerprint, MeshPlacement, RowKeys, Value, ValueKey
from hookline.debug.compare.rows import RowTable
from hookline.errors import TraceError
from hookline.files import replace_file

FORMAT: Final = "hookline.trace"
VERSION: Final = 2
_RECORDS: Final = "records.jsonl"


@dataclass(frozen=True, slots=True)
class TracePlace:
    """What many records have in common."""

    site: str
    kind: str
    leaf: str
    shape: tuple[int, ...]
    dtype: str
    placements: MeshPlacement | None = None


TraceRecord: TypeAlias = tuple[int, int, int, int | None, int | None]
"""One tensor that passed a site: the number of the place, as `TraceWriter.number` has it, step, call, the number of the
rows, and its number among the tensors that are written with it; None where there is none.
"""


class TraceWriter:
    """Append to the folder of one rank, which must not hold a trace yet.

    Args:
        folder: The folder of the trace, of all ranks.
        rank: The rank of this process.
        head: Settings to keep: ``kinds``, and whatever the reader should know.
    """

    def __init__(self, folder: Path, rank: int, head: Mapping[str, Any]) -> None:
        self.folder = folder
        self.bytes = 0
        """How many bytes were written, of lines and tensors."""
        self._own = folder / f"rank_{rank}"
        self._numbers: dict[TracePlace | RowTable, int] = {}
        self._pending: list[dict[str, Any]] = []
        """Lines that go out with the next batch."""
        self._order = 0
        self._files = 0
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            self._file = (self._own / _RECORDS).open("xb", buffering=0)
            self._append({"head": {"format": FORMAT, "version": VERSION, "rank": rank, **head}})
        except FileExistsError:
            raise TraceError(f"{self._own} has a trace already. Give another folder, or delete this one.") from None
        except OSError as error:
            raise TraceError(
                f"A trace cannot be written to {folder} ({error}). Give a folder that can be made and written to."
            ) from error

    @property
    def is_open(self) -> bool:
        """Return whether more can be written."""
        return not self._file.closed

    def number(self, what: TracePlace | RowTable) -> int:
        """Return the number of a place or a table of rows; a new one is written with the next batch."""
        number = self._numbers.get(what)
        if number is None:
            number = len(self._numbers)
            self._pending.append({"place" if isinstance(what, TracePlace) else "rows": number, **asdict(what)})
            self._numbers[what] = number  # last: Ctrl-C in between leaves no number without its line
        return number

    def add_records(
        self,
        records: Sequence[TraceRecord],
        numbers: NDArray[np.float64],
        hashes: NDArray[np.uint64],
        tensors: Sequence[Tensor],
    ) -> None:
        """Append records, which get running numbers in their order, and store their tensors.

        ``numbers`` has a row for each: mean, norm, absmax, NaN, Inf and the sketch.
        """
        line = {
            "batch": len(records),
            "order": self._order,
            "file": self._add_tensors(tensors) if tensors else None,
            **{name: [one[column] for one in records] for column, name in enumerate(_COLUMNS)},
            "numbers": _base64(numbers[:, :5], "<f8"),
            "sketches": _base64(numbers[:, 5:], "<f4"),
            "hashes": _base64(hashes, "<u8"),
        }
        self._append(*self._pending, line)
        self._order += len(records)  # a batch that Ctrl-C has cut comes again, with the same numbers
        self._pending.clear()

    def _add_tensors(self, tensors: Sequence[Tensor]) -> str:
        from safetensors.torch import save_file

        name = f"tensors-{self._files:06d}.safetensors"
        self._files += 1
        numbered = {str(number): _storable(each) for number, each in enumerate(tensors)}
        replace_file(self._own / name, lambda draft: save_file(numbered, draft))
        self.bytes += (self._own / name).stat().st_size
        return name

    def add_note(self, text: str, *, is_left_out: bool) -> None:
        """Append a sentence for people, and whether it is of something that is missing in the trace."""
        self._append({"note": text, "left_out": is_left_out})

    def close(self, *, is_complete: bool = True) -> None:
        """End the file, with a mark if the trace is complete; may be called again."""
        try:
            if is_complete and self.is_open:
                self._append(*self._pending, {"end": self._order})
        finally:
            self._file.close()

    def _append(self, *lines: dict[str, Any]) -> None:
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines).encode()
        done = 0
        while done < len(text):
            done += os.write(self._file.fileno(), text[done:])
        self.bytes += len(text)


def _base64(values: NDArray[Any], dtype: str) -> str:
    with np.errstate(over="ignore"):  # sums of a run that diverges can be too large for a sketch
        return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _storable(tensor: Tensor) -> Tensor:
    """Return a tensor as safetensors takes it: in memory of its own; complex128 and complex32 as pairs."""
    found = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(found) if found.dtype in (torch.complex128, torch.complex32) else found


# -- reading ----------------------------------------------------------------------------------------------------------

_COLUMNS: Final = ("place", "step", "call", "rows", "tensor")


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

    def __init__(self, path: Path, ranks: Sequence[_RankLines], problems: list[str]) -> None:
        self.path = path
        self.head = next((each.head for each in ranks if each.head), {})
        """The settings it was written with: ``kinds``, ``model``, …"""
        self.records: tuple[Value, ...] = tuple(record for each in ranks for record in each.records)
        """All records, rank by rank, each in the order they were made."""
        self.ranks: tuple[int, ...] = tuple(each.rank for each in ranks)
        self.problems: tuple[str, ...] = tuple(problems)
        """What is wrong with the files, in words: cut lines, a writer that was killed, files that are missing. Records
        that could be read are there all the same."""
        self.notes: tuple[str, ...] = tuple(note for each in ranks for note in each.notes)
        """What the writer has to say: what it left out and why, each once; and what the user has noted."""
        self.left_out: tuple[str, ...] = tuple(note for each in ranks for note in each.left_out)
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
    if not path.is_dir():
        raise TraceError(
            f"read_trace({str(path)!r}): there is no such folder. Give the folder that trace(to=) was given."
        )
    own = [each.parent for each in path.glob(f"rank_*/{_RECORDS}")]
    folders = {int(each.name[5:]): each for each in own if each.name[5:].isdecimal()}
    if not folders:
        raise TraceError(f"{path} is no trace: there is no rank_0/{_RECORDS} in it.")
    problems: list[str] = []
    found = TraceFolder(path, [_read_rank(folders[rank], rank, problems) for rank in sorted(folders)], problems)
    count = int(found.head.get("ranks", 1))
    missing = sorted(set(range(count)) - set(folders))
    if missing:
        found.problems += (f"There is no folder of rank {', '.join(map(str, missing))}, of {count} rank(s).",)
    return found


def _read_rank(folder: Path, rank: int, problems: list[str]) -> _RankLines:
    found = _RankLines(folder, rank)
    for number, line in _lines(folder / _RECORDS, rank, problems):
        try:
            _take(line, found)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"rank {rank}: line {number} of {_RECORDS} is damaged ({error!r}); it was left out.")
    if not found.is_complete:
        problems.append(f"rank {rank}: the trace was not closed; its writer was killed, or is still writing.")
    return found


def _lines(file: Path, rank: int, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
            except ValueError:
                how = "is cut off" if not text.endswith(b"\n") else "is no JSON"
                problems.append(f"rank {rank}: line {number} of {file.name} {how}; it was left out.")
            else:
                yield number, line


def _take(line: dict[str, Any], found: _RankLines) -> None:
    """Add what one line says; a line that this version does not know is passed over."""
    if "head" in line:
        found.head = _checked_head(line["head"], found.folder)
    elif "batch" in line:
        records = _records(line, found)
        while found.records and found.records[-1].order >= line["order"]:  # its writer was interrupted: it came again
            found.records.pop()
        found.records += records
    elif "place" in line:
        number = line.pop("place")
        found.places[number] = _place(line)
    elif "rows" in line:
        number = line.pop("rows")
        found.rows[number] = RowTable(**{key: _tupled(value) for key, value in line.items()})
    elif "note" in line:
        found.notes.append(line["note"])
        found.left_out += [line["note"]] if line["left_out"] else []
    elif "end" in line:
        found.is_complete = True


def _checked_head(head: Any, folder: Path) -> dict[str, Any]:
    """Return the head; raise unless this hookline can read the format."""
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceError(f"{folder} is not of a trace: it does not say that its format is {FORMAT!r}.")
    if head.get("version") != VERSION:
        raise TraceError(
            f"{folder} is of version {head.get('version')!r}, this hookline reads {VERSION}. Update hookline."
        )
    return head


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _place(line: dict[str, Any]) -> TracePlace:
    laid = line.pop("placements")
    placements = None if laid is None else MeshPlacement(**{key: tuple(value) for key, value in laid.items()})
    return TracePlace(**{key: _tupled(value) for key, value in line.items()}, placements=placements)


def _records(line: dict[str, Any], found: _RankLines) -> list[Value]:
    count = line["batch"]
    numbers = _array(line["numbers"], "<f8", count).tolist()
    sketches = _array(line["sketches"], "<f4", count).astype(np.float64).tolist()
    hashes = _array(line["hashes"], "<u8", count).reshape(-1).tolist()
    columns = zip(*(line[name] for name in _COLUMNS), strict=True)
    records = []
    for index, (number, step, call, rows, tensor) in enumerate(columns):
        place = found.places[number]
        mean, norm, absmax, nan, inf = numbers[index]
        summary = (mean, norm, absmax, int(nan), int(inf), hashes[index], tuple(sketches[index]))
        key = ValueKey(found.rank, step, place.kind, place.site, place.leaf, call)
        file = None if tensor is None else found.folder / Path(line["file"]).name
        records.append(
            Value(
                key,
                line["order"] + index,
                place.shape,
                place.dtype,
                read=None if file is None else partial(_stored_tensor, file, tensor, key, place.dtype),
                fingerprint=Fingerprint(math.prod(place.shape), *summary),
                rows=None if rows is None else _row_keys(found, rows, place.shape),
                placements=place.placements,
            )
        )
    return records


def _row_keys(found: _RankLines, number: int, shape: tuple[int, ...]) -> RowKeys | None:
    """Return whose the rows of a tensor of ``shape`` are, by the table of that number."""
    if (number, shape) not in found.keys_of_rows:
        found.keys_of_rows[number, shape] = found.rows[number].keys_for(shape)
    return found.keys_of_rows[number, shape]


def _stored_tensor(path: Path, number: int, key: ValueKey, dtype: str) -> Tensor:
    """Return a tensor, mapped from its file, where it has that number."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            found: Tensor = file.get_tensor(str(number))
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}, with the tensor of {key.label}, cannot be read ({error}).") from error
    is_in_pairs = dtype in ("complex128", "complex32") and not found.is_complex()
    return torch.view_as_complex(found) if is_in_pairs else found


def _array(text: str, dtype: str, count: int) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).reshape(count, -1)
