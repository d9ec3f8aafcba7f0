"""Read a trace back: records in call order, tensors when asked for, and what is wrong with the files.

Users and the comparison of traces call `read_trace`. Nothing that is read is run, and nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.compare.files import FORMAT, NUMBERS, VERSION, TracePlace
from hookline.debug.compare.key import Fingerprint, MeshPlacement, RowKeys, Value, ValueKey
from hookline.debug.compare.rows import RowTable
from hookline.errors import TraceError

__all__ = ["TraceFolder", "read_trace"]

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
        found.rows[line["rows"]] = RowTable(line["layout"], *(tuple(line[key]) for key in fields))
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
