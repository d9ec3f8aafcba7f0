"""Write and read the files of an export: safetensors shards that appear whole, and an index of what is in them.

`ExportQueue` calls `pieces_of` and `Shards` in its writing thread; users call `read_export`. A shard is held in memory
until it is written as a whole, and only then its lines go into the index: whatever kills the process, every file is
whole and every line is true. Nothing is pickled, and nothing that is read is run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.observe.tokens import Tokens
from hookline.records.log import dumps

if TYPE_CHECKING:
    from hookline.factories.export_queue import ExportItem

__all__ = [
    "SHARD_BYTES",
    "ExportRecord",
    "Shards",
    "WrittenSoFar",
    "can_store",
    "index_lines",
    "open_shard",
    "pieces_of",
    "read_export",
    "summary_of",
    "written_so_far",
]

_INDEX: Final = "index-{number:03d}.jsonl"
_SUFFIX: Final = ".safetensors"
_SHARD: Final = "export-{number:03d}-{count:06d}" + _SUFFIX
SHARD_BYTES: Final = 64 << 20
"""How large a shard grows."""
_DTYPES: Final = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


def can_store(tensor: Tensor) -> bool:
    """Return whether the format knows the tensor's dtype."""
    return tensor.dtype in _DTYPES


class Shards:
    """Write the files of one hook into a folder, which several hooks and processes may share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._number, self._index = _claim_number(folder)
        self.count = 0
        """How many shards are complete."""
        self._tensors = self._bytes = 0
        """What is in them."""
        self._begin()

    def _begin(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._lines: list[bytes] = []
        self._size = 0

    @property
    def tensors(self) -> int:
        """Return how many tensors were added, in complete shards or not."""
        return self._tensors + len(self._lines)

    @property
    def bytes(self) -> int:
        """Return how many bytes those are."""
        return self._bytes + self._size

    @property
    def is_open(self) -> bool:
        """Return whether there is a shard that is not complete."""
        return bool(self._held)

    def add(self, key: str, tensor: Tensor, line: dict[str, Any]) -> None:
        """Hold a tensor, which is on the CPU, until its shard is complete; ``line`` is what the index says of it."""
        # A copy: the format refuses tensors that share memory, as the rows of a batch do.
        self._held[key] = tensor.clone(memory_format=torch.contiguous_format)
        self._lines.append(dumps({**line, "shard": self._name(), "key": key}) + b"\n")
        self._size += tensor.numel() * tensor.element_size()
        if self._size >= SHARD_BYTES:
            self.complete()

    def complete(self) -> None:
        """Write the shard, and its lines to the index."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._held:
            return
        try:
            replace_file(self.folder / self._name(), lambda draft: save_file(self._held, draft))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self._index.writelines(self._lines)
        self._index.flush()
        self.count += 1
        self._tensors += len(self._lines)
        self._bytes += self._size
        self._begin()

    def close(self) -> None:
        """Complete the last shard."""
        try:
            self.complete()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop a shard that is not complete, and close the index."""
        with contextlib.suppress(OSError):  # what a full disk did not take is tried once more
            self._index.close()
        self._begin()

    def _name(self) -> str:
        return _SHARD.format(number=self._number, count=self.count)


def _claim_number(folder: Path) -> tuple[int, BinaryIO]:
    """Return a number that no other hook has in this folder, and its index, open."""
    number = 0
    while True:
        try:
            return number, (folder / _INDEX.format(number=number)).open("xb")
        except FileExistsError:
            number += 1


# -- pieces: an output by request ------------------------------------------------------------------------------------


class _ExportPiece(NamedTuple):
    """A tensor of an export, its key, and its line in the index."""

    key: str
    tensor: Tensor
    line: dict[str, Any]


def pieces_of(item: ExportItem, tensor: Tensor) -> Iterator[_ExportPiece]:
    """Yield the pieces of an output: the tokens of each request; its last, if there is no other; else its row."""
    rows = item.rows
    entries = None if rows is None or item.is_last else rows.by_token(tensor)
    is_by_row = rows is not None and rows.width is not None and tensor.dim() >= 2 and len(tensor) == len(rows.requests)
    if rows is None or (entries is None and not is_by_row):
        yield _piece(item, 0, tensor, phase=None if rows is None else rows.phase)
        return
    ids, begin = _numbers(rows.ids), 0
    for row, length in enumerate(rows.lengths):
        tokens, positions = ids[begin : begin + length], _positions(rows, row, begin)
        request, phase, begin = rows.requests[row] or None, rows.phases[row], begin + length
        if entries is not None:
            first = max(length - 1, 0) if item.wants_last else 0
            own = entries[rows.begins[row] + first : rows.begins[row] + length]
            yield _piece(item, row, own, request, tokens[first:], positions[first:], phase)
        elif tensor.dim() == 3 and tensor.shape[1] == 1:
            yield _piece(item, row, tensor[row], request, tokens[-1:], positions[-1:], phase)
        else:  # one entry for each request that is not by token, as a pooled vector or attention weights
            yield _piece(item, row, tensor[row], request, phase=phase)


def _positions(rows: Tokens, row: int, begin: int) -> Sequence[int]:
    first, length = rows.firsts[row], rows.lengths[row]
    return _numbers(rows.positions)[begin : begin + length] if first is None else range(first, first + length)


def _numbers(values: Tensor | Sequence[int] | None) -> list[int]:
    if isinstance(values, Tensor):
        return [int(value) for value in values.flatten().tolist()]
    return list(values or ())


def _piece(
    item: ExportItem,
    row: int,
    tensor: Tensor,
    request: str | None = None,
    tokens: Sequence[int] = (),
    positions: Sequence[int] = (),
    phase: str | None = None,
) -> _ExportPiece:
    line = {
        "module": item.module,
        "call": item.call,
        "request": request,
        "tokens": list(tokens),
        "positions": list(positions),
        "phase": phase,
    }
    return _ExportPiece(f"{item.module}#{item.call}#{row}", tensor, line)


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One exported tensor."""

    module: str
    call: int
    """Which call of the module it is from, from 0."""
    request: str | None
    """Which request it is of; None if that is unknown, and then the tensor is all of the output."""
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    """Of these tokens in their sequence."""
    phase: str | None
    """``"prefill"``, ``"decode"``, or None."""
    tensor: Tensor


def read_export(folder: str | Path) -> Iterator[ExportRecord]:
    """Yield all tensors of an export, file by file, in the order they were written.

    Recipe::

        for record in read_export("states"):
            print(record.module, record.request, record.positions, record.tensor.shape)

    Only complete files are read: one that a killed process has left half-written has another name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise OptionError(f"read_export({str(folder)!r}): there is no such folder.")
    shard: Any = None
    name = ""
    for line in index_lines(folder):
        if line["shard"] != name:
            name = line["shard"]
            shard = open_shard(folder / name)
        yield ExportRecord(
            line["module"],
            line["call"],
            line["request"],
            tuple(line["tokens"]),
            tuple(line["positions"]),
            line["phase"],
            shard.get_tensor(line["key"]),
        )


def index_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the indices of a folder say of each tensor, in the order they were written."""
    for index in sorted(folder.glob("index-*.jsonl")):
        for line in _lines(index):
            if line["shard"] != Path(line["shard"]).name:
                raise OptionError(f"{index} names {line['shard']!r}, which is no file of its folder.")
            yield line


@dataclass(frozen=True, slots=True)
class WrittenSoFar:
    """What the complete files of a folder hold."""

    bytes: int
    pieces: frozenset[tuple[str, str, int]]
    """Module, request and first position of every tensor that has them."""
    begun: dict[tuple[str, str], int]
    """By module and request, the `summary_of` its first tensor."""

    def has(self, line: dict[str, Any]) -> bool:
        """Return whether the tensor that ``line`` describes is there."""
        return bool(line["positions"]) and (line["module"], line["request"], line["positions"][0]) in self.pieces


def written_so_far(folder: Path) -> WrittenSoFar:
    """Return what earlier exports have left in a folder; nothing if there is none."""
    lines = [line for line in index_lines(folder) if line["request"] is not None and line["positions"]]
    shards = {line["shard"] for line in index_lines(folder)}
    try:
        written = sum(_data_bytes(folder / shard) for shard in shards)
    except OSError as error:
        raise OptionError(f"A file of the export is in the index, and lost ({error}); choose another folder.") from None
    return WrittenSoFar(
        written,
        frozenset((line["module"], line["request"], line["positions"][0]) for line in lines),
        {(line["module"], line["request"]): summary_of(line["tokens"], line["positions"]) for line in reversed(lines)},
    )


def _data_bytes(shard: Path) -> int:
    """Return how many bytes of tensors a file has: what is behind its header, whose length comes first."""
    with shard.open("rb") as file:
        return shard.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def summary_of(tokens: Sequence[int], positions: Sequence[int]) -> int:
    """Return a number that differs for other tokens or positions: what is on disk may be too much to keep in memory."""
    return hash((tuple(tokens), tuple(positions)))


def open_shard(shard: Path) -> Any:
    """Open a complete file; raise if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(shard), framework="pt")
    except (OSError, SafetensorError) as error:
        raise OptionError(f"read_export: {shard} cannot be read, though it was complete once ({error}).") from None


def _lines(index: Path) -> Iterator[dict[str, Any]]:
    for line in index.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # else it is still being written, or never will be
            try:
                yield json.loads(line)
            except ValueError as error:
                raise OptionError(f"{index} has a broken line ({error}); it is not as the export wrote it.") from None
