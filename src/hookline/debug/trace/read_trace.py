"""Read a trace back: records in call order, tensors when asked for, and what is wrong with the files.

Users and the comparison of traces call `read_trace`. Nothing that is read is run, and nothing is pickled.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.trace.trace_files import FORMAT, NUMBERS, VERSION
from hookline.debug.trace.trace_record import Fingerprint, MeshPlacement, RowKeys, RowTable, TraceRecord
from hookline.errors import TraceError

__all__ = ["TraceFolder", "read_trace"]

_COLUMNS: Final = ("place", "step", "call", "micro_batch", "recompute", "rows", "tensor")


@dataclass(slots=True)
class _RankLines:
    """What was found in the files of one rank."""

    head: dict[str, Any] = field(default_factory=dict)
    places: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: dict[int, RowTable] = field(default_factory=dict)
    records: list[TraceRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    is_complete: bool = False


class TraceFolder:
    """A trace that was read.

    Recipe::

        folder = read_trace("trace")
        print(folder.problems or "complete")
        for record in folder.records:
            if record.tensor is not None:
                print(record.label, folder.tensor(record).abs().max())
    """

    def __init__(self, path: Path, head: dict[str, Any], ranks: dict[int, _RankLines], problems: list[str]) -> None:
        self.path = path
        self.head = head
        """The settings it was written with: ``kinds``, ``model``, …"""
        self.records: tuple[TraceRecord, ...] = tuple(
            record for rank in sorted(ranks) for record in ranks[rank].records
        )
        """All records, rank by rank, each in the order they were made."""
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))
        self.problems: tuple[str, ...] = tuple(problems)
        """What is wrong with the files, in words: cut lines, a writer that was killed, files that are missing. Records
        that could be read are there all the same."""
        self.notes: tuple[str, ...] = tuple(note for rank in sorted(ranks) for note in ranks[rank].notes)
        """What the writer has to say: what it left out and why (a spent budget, sparse tensors, parameters of another
        optimizer, a full disk), each once; and what the user has noted."""
        self.left_out: tuple[str, ...] = tuple(note for rank in sorted(ranks) for note in ranks[rank].left_out)
        """Those of the notes by which something is missing in the trace."""
        self._rows = {rank: lines.rows for rank, lines in ranks.items()}

    def tensor(self, record: TraceRecord) -> Tensor:
        """Return the stored tensor of a record, mapped from the file; `TraceError` if there is none."""
        from safetensors import SafetensorError, safe_open

        if record.tensor is None:
            raise TraceError(
                f"No tensor is stored for {record.label}, only its fingerprint. Trace again with tensors= naming it."
            )
        name, _, key = record.tensor.partition("#")
        path = self.path / f"rank_{record.rank}" / name
        if name != Path(name).name:
            raise TraceError(f"{self.path} names {name!r}, which is no file of its folder.")
        try:
            with safe_open(str(path), framework="pt") as file:
                found: Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise TraceError(f"{path}, with the tensor of {record.label}, cannot be read ({error}).") from error
        paired = record.dtype in ("complex128", "complex32") and not found.is_complex()
        return torch.view_as_complex(found) if paired else found

    def row_keys(self, record: TraceRecord) -> RowKeys | None:
        """Return whose the rows of a record's tensor are; None if nobody has said, or it has no such rows."""
        table = None if record.rows is None else self._rows[record.rank].get(record.rows)
        return None if table is None else table.keys_for(record.shape)

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
    found = _RankLines()
    files = sorted(folder.glob("records-*.jsonl"))
    if not files:
        problems.append(f"rank {rank}: there is no records-*.jsonl in {folder}.")
        return found
    for file in files:
        for number, line in _lines(file, rank, problems):
            try:
                _take(line, found, rank, file)
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


def _take(line: dict[str, Any], found: _RankLines, rank: int, file: Path) -> None:
    """Add what one line says; a line that this version does not know is passed over."""
    if "head" in line:
        _check_version(line["head"], file)
        found.head = line["head"]
    elif "batch" in line:
        records = _records(line, found, rank)
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


def _place(line: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in line.items() if key in ("site", "kind", "leaf", "dtype", "layer", "dims")}
    laid = line["placements"]
    if laid is not None:
        laid = MeshPlacement(**{key: tuple(value) for key, value in laid.items()})
    return {**fields, "shape": tuple(line["shape"]), "placements": laid}


def _records(line: dict[str, Any], found: _RankLines, rank: int) -> list[TraceRecord]:
    count, first = line["batch"], line["order"]
    numbers = _array(line["numbers"], "<f8", count, len(NUMBERS)).tolist()
    sketches = _array(line["sketches"], "<f4", count, -1).astype(np.float64).tolist()
    hashes = _array(line["hashes"], "<u8", count, 1).reshape(-1).tolist()
    columns = {key: line[key] if isinstance(line[key], list) else [line[key]] * count for key in _COLUMNS}
    if any(len(column) != count for column in columns.values()):
        raise ValueError("columns of different lengths")
    records = []
    for index in range(count):
        own = {key: column[index] for key, column in columns.items()}
        place = found.places[own.pop("place")]
        mean, norm, absmax, nan, inf = numbers[index]
        size = 1
        for each in place["shape"]:
            size *= each
        print_ = Fingerprint(size, mean, norm, absmax, int(nan), int(inf), hashes[index], tuple(sketches[index]))
        own["recompute"] = bool(own["recompute"])
        records.append(TraceRecord(**place, **own, order=first + index, rank=rank, fingerprint=print_))
    return records


def _array(text: str, dtype: str, count: int, width: int) -> NDArray[Any]:
    flat = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return flat.reshape(count, width) if count else flat.reshape(0, max(width, 0))
