"""Write and read the files of an export: safetensors shards that appear whole, and an index of what is in them.

``export`` and `export_activations` make an item of each output (`item_of`), and hand its pieces to `Shards`. Users
call `read_export`, or make an `ActivationDataset`. A shard is held in memory until it is written as a whole, and only
then its lines go into the index: whatever kills the process, every file is whole and every line is true. Nothing is
pickled, and nothing that is read is run.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.messages import counted
from hookline.observe.tokens import Tokens
from hookline.records.log import dumps

__all__ = [
    "SHARD_BYTES",
    "ActivationDataset",
    "ActivationItem",
    "ExportItem",
    "ExportRecord",
    "Shards",
    "can_store",
    "index_lines",
    "item_of",
    "pieces_of",
    "read_export",
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


@dataclass(slots=True)
class ExportItem:
    """One output that is to be written: whole, or the entries of some tokens."""

    module: str
    call: int
    tensor: Tensor
    tokens: Tokens | None = None
    """Whose entries it has; None if it is the whole output."""
    rows: tuple[int, ...] = ()
    """Which requests of ``tokens`` it has entries of, one after the other."""
    last: bool = False
    """Whether it has the last token of each alone."""
    is_by_row: bool = False
    """Whether it has one entry for each request, not for each token, such as a pooled vector."""
    ready: Any = None
    """On a GPU, the event after which the tensor is complete."""

    @property
    def bytes(self) -> int:
        """Return the size of the tensor."""
        return self.tensor.nbytes


def item_of(
    module: str, call: int, tensor: Tensor, tokens: Tokens | None, *, last: bool = False, stage: str = "both"
) -> ExportItem | None:
    """Return what to write of an output: the entries of the chosen tokens; None if it has none of them."""
    if tokens is None:  # of (batch, sequence, features), padded on the left, the last column
        return ExportItem(module, call, tensor[:, -1:] if last and tensor.dim() == 3 else tensor)
    chosen = tokens.choose(last=last, stage=stage)
    entries = chosen.pick(tensor)
    if not chosen.rows:
        return None
    if entries is not None:
        return ExportItem(module, call, entries, tokens, chosen.rows, last)
    if tokens.width is not None and tensor.dim() >= 2 and len(tensor) == len(tokens.requests):
        return ExportItem(module, call, tensor, tokens, chosen.rows, is_by_row=True)
    return ExportItem(module, call, tensor) if stage in ("both", tokens.phase) else None


ExportPiece: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A tensor, and what the index says of it."""


def pieces_of(item: ExportItem) -> Iterator[ExportPiece]:
    """Yield the pieces of an output that is on the CPU: one for each request, or the whole."""
    tokens, begin = item.tokens, 0
    if tokens is None:
        yield _piece(item, item.tensor)
        return
    ids, starts = _numbers(tokens.ids), list(accumulate(tokens.lengths, initial=0))
    for row in item.rows:
        request, phase = tokens.requests[row] or None, tokens.phases[row]
        if item.is_by_row:
            yield _piece(item, item.tensor[row], request, phase=phase)
            continue
        length, start = tokens.lengths[row], starts[row]
        skipped = length - 1 if item.last else 0
        own = item.tensor[begin : begin + length - skipped]
        begin += len(own)
        positions = _positions(tokens, row, start)[skipped:]
        yield _piece(item, own, request, ids[start + skipped : start + length], positions, phase)


def _positions(tokens: Tokens, row: int, start: int) -> Sequence[int]:
    first, length = tokens.firsts[row], tokens.lengths[row]
    return _numbers(tokens.positions)[start : start + length] if first is None else range(first, first + length)


def _numbers(values: Tensor | Sequence[int] | None) -> list[int]:
    if isinstance(values, Tensor):
        return [int(value) for value in values.flatten().tolist()]
    return list(values or ())


def _piece(
    item: ExportItem,
    tensor: Tensor,
    request: str | None = None,
    tokens: Sequence[int] = (),
    positions: Sequence[int] = (),
    phase: str | None = None,
) -> ExportPiece:
    return tensor, {
        "module": item.module,
        "call": item.call,
        "request": request,
        "tokens": list(tokens),
        "positions": list(positions),
        "phase": phase,
    }


# -- writing ---------------------------------------------------------------------------------------------------------


class Shards:
    """Write the files of one hook into a folder, which several hooks and processes may share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._number, self._index = _claim_number(folder)
        self._count = 0
        self.tensors = self.bytes = 0
        """What was added, and not dropped."""
        self._begin()

    def _begin(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._lines: list[bytes] = []
        self.size = 0
        """The bytes of tensors that are held."""
        self._since = float("inf")

    @property
    def age(self) -> float:
        """Return for how many seconds tensors have been held; less than 0 without any."""
        return time.monotonic() - self._since

    def add(self, pieces: Iterable[ExportPiece]) -> None:
        """Hold tensors, which are on the CPU, until their file is written."""
        for tensor, line in pieces:
            self._since = min(self._since, time.monotonic())
            key = f"{line['module']}#{len(self._lines)}"
            # A copy: the format refuses tensors that share memory, as the rows of a batch do.
            self._held[key] = tensor.clone(memory_format=torch.contiguous_format)
            self._lines.append(dumps({**line, "shard": self._name, "key": key}) + b"\n")
            self.size += tensor.nbytes
            self.bytes += tensor.nbytes
            self.tensors += 1

    def complete(self) -> None:
        """Write a file of what is held, and its lines to the index."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._held:
            return
        try:
            replace_file(self._folder / self._name, lambda draft: save_file(self._held, draft))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self._index.writelines(self._lines)
        self._index.flush()
        self._count += 1
        self._begin()

    def close(self) -> None:
        """Drop what is held, and close the index."""
        self.tensors -= len(self._held)
        self.bytes -= self.size
        self._begin()
        with contextlib.suppress(OSError):  # what a full disk did not take is tried once more
            self._index.close()

    @property
    def _name(self) -> str:
        return _SHARD.format(number=self._number, count=self._count)


def _claim_number(folder: Path) -> tuple[int, BinaryIO]:
    """Return a number that no other hook has in this folder, and its index, open."""
    number = 0
    while True:
        try:
            return number, (folder / _INDEX.format(number=number)).open("xb")
        except FileExistsError:
            number += 1


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
            shard = _open_shard(folder / name)
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


def _open_shard(shard: Path) -> Any:
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


# -- a dataset of torch --------------------------------------------------------------------------------------------


class ActivationItem(TypedDict):
    """One token of an export."""

    activation: Tensor
    """(features)"""
    token: int
    position: int
    request: str
    module: str


class ActivationDataset(Dataset[ActivationItem]):
    """Give the activations of an export, token by token, in the order in which they were written.

    Recipe::

        dataset = ActivationDataset("states", module="model.layers.8")
        for batch in torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2):
            batch["activation"]  # (64, features); also "token", "position", "request", "module"
        activations, tokens = dataset.tensors()  # for train_probe

    The index is read when it is made; activations are read from the files one by one, and not kept. Outputs that were
    not by token are left out.

    Args:
        folder: What an export has written; files that it is still writing are not seen.
        module: Which module, by name or pattern; may be left out if there is one.
        requests: The name of a request or a pattern, or several, to choose among them.
    """

    def __init__(
        self, folder: str | Path, *, module: str | None = None, requests: str | Sequence[str] | None = None
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise OptionError(f"ActivationDataset({str(folder)!r}): there is no such folder.")
        lines = [line for line in index_lines(self.folder) if line["positions"] and line["request"] is not None]
        self.modules = sorted(
            {line["module"] for line in lines if module is None or fnmatchcase(line["module"], module)}
        )
        """The modules that are in it."""
        self._check_modules(module, sorted({line["module"] for line in lines}))
        names = [requests] if isinstance(requests, str) else requests
        self._lines = [
            line
            for line in lines
            if line["module"] in self.modules
            and (names is None or any(fnmatchcase(line["request"], each) for each in names))
        ]
        self._ends = list(accumulate(len(line["positions"]) for line in self._lines))
        self._shards: dict[str, Any] = {}

    def _check_modules(self, asked: str | None, there: list[str]) -> None:
        shown = ", ".join(map(repr, there[:6])) + (", …" if len(there) > 6 else "")
        if not self.modules:
            what = f"no module {asked!r}" if asked is not None else "nothing that is by token and request"
            raise OptionError(f"The export in {self.folder} has {what}; it has {shown or 'no complete file'}.")
        if asked is None and len(self.modules) > 1:
            raise OptionError(f"The export in {self.folder} has several modules; choose by module=: {shown}.")

    def __repr__(self) -> str:
        requests = counted(len({line["request"] for line in self._lines}), "request")
        where = repr(self.modules[0]) if len(self.modules) == 1 else counted(len(self.modules), "module")
        return f"<ActivationDataset of {counted(len(self), 'token')} in {requests}, {where}>"

    def __len__(self) -> int:
        """Return how many tokens there are."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> ActivationItem:
        """Return one token."""
        if isinstance(index, slice):
            raise TypeError("One token at a time: dataset[0]; dataset.tensors() returns all of them.")
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"There are {len(self)} tokens, and none has the index {index}.")
        number = bisect.bisect_right(self._ends, place)
        line = self._lines[number]
        row = place - (self._ends[number] - len(line["positions"]))
        return {
            "activation": self._shard(line["shard"]).get_slice(line["key"])[row],
            "token": line["tokens"][row] if line["tokens"] else -1,
            "position": line["positions"][row],
            "request": line["request"],
            "module": line["module"],
        }

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all activations (tokens, features) and all token ids (tokens), in memory."""
        parts = [self._shard(line["shard"]).get_tensor(line["key"]) for line in self._lines]
        ids = [token for line in self._lines for token in (line["tokens"] or [-1] * len(line["positions"]))]
        return torch.cat(parts) if parts else torch.empty(0), torch.tensor(ids, dtype=torch.int64)

    def _shard(self, name: str) -> Any:
        if name not in self._shards:
            self._shards[name] = _open_shard(self.folder / name)
        return self._shards[name]

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: a worker of a DataLoader opens its own."""
        return {**self.__dict__, "_shards": {}}
