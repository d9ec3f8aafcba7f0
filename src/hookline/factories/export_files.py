"""Write and read the files of an export: safetensors shards that appear whole, and an index of what is in them.

``export`` and `export_activations` make an item of each output (`item_of`), and hand it to `Shards`. Users
call `read_export`, or make an `ActivationDataset`. A shard is held in memory until it is written as a whole, and only
then its lines go into the index: whatever kills the process, every file is whole and every line is true. Nothing is
pickled, and nothing that is read is run.
"""

from __future__ import annotations

import bisect
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.observe.tokens import ChosenTokens, Tokens, sent_to_host
from hookline.records.log import dumps

__all__ = [
    "SHARD_BYTES", "ActivationDataset", "ActivationItem", "ExportItem", "ExportRecord", "Shards", "can_store", "copied",
    "index_lines", "item_of", "read_export",
]  # fmt: skip

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
    chosen: ChosenTokens | None = None
    """Whose entries it has, one after the other; None if it is the whole output."""
    is_by_row: bool = False
    """Whether it has one entry for each request of the batch, not for each token, such as a pooled vector."""
    ready: Any = None
    """The event after which a copy from a GPU is complete."""


def item_of(
    module: str, call: int, tensor: Tensor, tokens: Tokens | None, *, last: bool = False, stage: str = "both"
) -> ExportItem | None:
    """Return what to write of an output: the entries of the chosen tokens; None if it has none of them."""
    if tokens is None:  # of (batch, sequence, features), padded on the left, the last column
        return ExportItem(module, call, tensor[:, -1:] if last and tensor.dim() == 3 else tensor)
    chosen = tokens.choose(last=last, stage=stage)
    if not chosen.rows:
        return None
    entries = chosen.pick(tensor)
    if entries is not None:
        return ExportItem(module, call, entries, chosen)
    if tokens.width is not None and tensor.dim() >= 2 and len(tensor) == len(tokens.requests):
        return ExportItem(module, call, tensor, chosen, is_by_row=True)
    return ExportItem(module, call, tensor) if stage in ("both", tokens.phase) else None


def copied(item: ExportItem) -> ExportItem:
    """Return the item with copies of its tensors on the host, complete once ``ready`` has happened."""
    tensor, chosen, ready = _copy_on_host(item.tensor), item.chosen, None
    if chosen is not None:  # engines use their buffers again
        chosen = replace(chosen, tokens=chosen.tokens.with_tensors(_copy_on_host))
    if item.tensor.is_cuda:
        make: Any = torch.cuda.Event
        ready = make(blocking=True)  # whoever waits for it does not spin
        ready.record(torch.cuda.current_stream(item.tensor.device))
    return replace(item, tensor=tensor, chosen=chosen, ready=ready)


def _copy_on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return sent_to_host(value) if value.is_cuda else value.to("cpu", copy=True)


_Piece: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A tensor, and what the index says of it."""


def _pieces_of(item: ExportItem) -> Iterator[_Piece]:
    """Yield the pieces of an output: one for each request, or the whole."""
    line = {"module": item.module, "call": item.call, "request": None, "tokens": [], "positions": [], "phase": None}
    chosen = item.chosen
    if chosen is None:
        yield item.tensor, line
        return
    tokens, begin = chosen.tokens, 0
    for row in chosen.rows:
        of_request = {**line, "request": tokens.requests[row] or None, "phase": tokens.phases[row]}
        if item.is_by_row:
            yield item.tensor[row], of_request
            continue
        own = tokens.of_request(row)
        first, length = own.firsts[0], own.lengths[0]
        positions = _numbers(own.positions) if first is None else list(range(first, first + length))
        skipped = length - 1 if chosen.last else 0
        end = begin + length - skipped
        told = {"tokens": _numbers(own.ids)[skipped:], "positions": positions[skipped:]}
        yield item.tensor[begin:end], of_request | told
        begin = end


def _numbers(values: Tensor | Sequence[int] | None) -> list[int]:
    return [int(value) for value in (values.flatten().tolist() if isinstance(values, Tensor) else values or ())]


# -- writing ---------------------------------------------------------------------------------------------------------


class Shards:
    """Write the files of one hook into a folder, which several hooks and processes may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: Path | None = None
        self._number = self._count = 0
        self.tensors = self.bytes = 0
        """What is in complete files."""
        self._begin()

    def _begin(self) -> None:
        self._held: list[_Piece] = []
        self.outputs = self.size = 0
        """The items that are held, and the bytes of their tensors."""
        self._since = float("inf")

    @property
    def age(self) -> float:
        """Return for how many seconds tensors have been held; less than 0 without any."""
        return time.monotonic() - self._since

    def add(self, item: ExportItem) -> None:
        """Hold the tensors of an item, which are on the CPU, until their file is written: at its full size, now."""
        self.outputs += 1
        self._since = min(self._since, time.monotonic())
        for tensor, line in _pieces_of(item):
            # A copy: the format refuses tensors that share memory, as the rows of a batch do.
            self._held.append((tensor.clone(memory_format=torch.contiguous_format), line))
            self.size += tensor.nbytes
        if self.size >= SHARD_BYTES:
            self.complete()

    def complete(self) -> None:
        """Write a file of what is held, and its lines to the index."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._held:
            return
        if self._index is None:
            self._number, self._index = _claim_index(self._folder)
        name = _SHARD.format(number=self._number, count=self._count)
        keys = [f"{line['module']}#{place}" for place, (_, line) in enumerate(self._held)]
        tensors = dict(zip(keys, (tensor for tensor, _ in self._held), strict=True))
        try:
            replace_file(self._folder / name, lambda draft: save_file(tensors, draft))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        lines = [dumps({**line, "shard": name, "key": key}) for key, (_, line) in zip(keys, self._held, strict=True)]
        with self._index.open("ab") as index:  # all at once: whoever is interrupted writes the file again
            index.write(b"".join(line + b"\n" for line in lines))
        self._count += 1
        self.tensors += len(self._held)
        self.bytes += self.size
        self._begin()


def _claim_index(folder: Path) -> tuple[int, Path]:
    """Return a number that no other hook has in this folder, and its index, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        index = folder / _INDEX.format(number=number)
        try:
            index.touch(exist_ok=False)
        except FileExistsError:
            continue
        break
    return number, index


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
    shard: Any = None
    name = ""
    for line in index_lines(Path(folder)):
        if line["shard"] != name:
            name = line["shard"]
            shard = _open_shard(Path(folder) / name)
        told = {key: line[key] for key in ("module", "call", "request", "phase")}
        tokens, positions = tuple(line["tokens"]), tuple(line["positions"])
        yield ExportRecord(**told, tokens=tokens, positions=positions, tensor=shard.get_tensor(line["key"]))


def index_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the indices of a folder say of each tensor, in the order they were written."""
    if not folder.is_dir():
        raise OptionError(f"{str(folder)!r} holds no export: there is no such folder.")
    for index in sorted(folder.glob("index-*.jsonl")):
        for text in index.read_bytes().splitlines(keepends=True):
            if not text.endswith(b"\n"):  # it is still being written, or never will be
                continue
            line = json.loads(text)
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
        lines = [line for line in index_lines(self.folder) if line["positions"] and line["request"] is not None]
        there = sorted({line["module"] for line in lines})
        self.modules = [name for name in there if module is None or fnmatchcase(name, module)]
        """The modules that are in it."""
        if not self.modules or (module is None and len(self.modules) > 1):
            shown = ", ".join(map(repr, there[:6])) + (", …" if len(there) > 6 else "")
            raise OptionError(
                f"The export in {self.folder} has several modules, or not the one that is asked for; choose one by "
                f"module=: it has {shown or 'nothing that is by token and request'}."
            )
        names = [requests] if isinstance(requests, str) else ["*"] if requests is None else requests
        self._lines = [
            line
            for line in lines
            if line["module"] in self.modules and any(fnmatchcase(line["request"], name) for name in names)
        ]
        self._ends = list(accumulate(len(line["positions"]) for line in self._lines))
        self._shards: dict[str, Any] = {}

    def __len__(self) -> int:
        """Return how many tokens there are."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> ActivationItem:
        """Return one token."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
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
