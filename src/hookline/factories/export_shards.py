"""Shards of an export: safetensors files that appear whole, and lines that say what is in them.

Takes tensors in the memory of the host from the writing thread, hands files to a folder. A shard grows under a
temporary name and gets its own when it is complete, and only then its lines go into the index: whatever kills the
process, every file is whole and every line is true.

The header of a safetensors file comes first and may end in blanks, so room for it is left, and tensors are written as
they come, small ones by the MiB: by system calls, which let other threads run, and without holding a shard in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hookline.sinks.metric_values import dumps

__all__ = ["INDEX", "SUFFIX", "Shards", "storable"]

INDEX: Final = "index-{number:03d}.jsonl"
SUFFIX: Final = ".safetensors"
_SHARD: Final = "export-{number:03d}-{count:06d}" + SUFFIX
_ROOM: Final = (1 << 18) - 8
"""Bytes for the header: 1,500 tensors or so; the file's first 8 bytes are its length."""
_SMALL: Final = 1 << 16
"""Bytes of a tensor that is written together with others."""
_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def storable(tensor: Tensor) -> bool:
    """Whether the format knows the tensor's dtype."""
    return tensor.dtype in _DTYPES


class Shards:
    """The files of one hook in a folder, which several hooks and processes may share."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._shard_bytes = shard_bytes
        self._number, self._index = _claimed(folder)
        self.count = 0
        """How many shards are complete."""
        self._tensors = self._bytes = 0
        """What is in them."""
        self._file = -1
        self._begin()

    def _begin(self) -> None:
        self._header: dict[str, Any] = {}
        self._header_bytes = 2
        self._lines: list[bytes] = []
        self._small = bytearray()
        """What is not written yet: system calls for many small tensors take longer than the tensors."""
        self._size = 0

    @property
    def tensors(self) -> int:
        """How many tensors are in files, complete or not."""
        return self._tensors + len(self._lines)

    @property
    def bytes(self) -> int:
        """How many bytes those are."""
        return self._bytes + self._size

    @property
    def is_open(self) -> bool:
        """Whether there is something that is in no complete shard yet."""
        return self._file >= 0

    def add(self, key: str, tensor: Tensor, line: dict[str, Any]) -> None:
        """Write a tensor, which is contiguous and on the CPU; ``line`` is what the index says of it."""
        if self._file < 0:
            self._file = os.open(self._partial(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.lseek(self._file, 8 + _ROOM, os.SEEK_SET)
        self._align(tensor.element_size())
        numbers: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        self._put(key, _DTYPES[tensor.dtype], list(tensor.shape), memoryview(numbers))
        self._lines.append(dumps({**line, "shard": self._name(), "key": key}) + b"\n")
        if self._size >= self._shard_bytes or self._header_bytes > _ROOM - 4096:
            self.complete()

    def _put(self, key: str, dtype: str, shape: list[int], memory: memoryview) -> None:
        if len(memory) < _SMALL:
            self._small += memory
        if len(memory) >= _SMALL or len(self._small) >= 16 * _SMALL:
            self._write_small()
        if len(memory) >= _SMALL:
            _write(self._file, memory)
        end = self._size + len(memory)
        self._header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [self._size, end]}
        self._header_bytes += len(json.dumps({key: self._header[key]}))
        self._size = end

    def _write_small(self) -> None:
        if self._small:
            _write(self._file, memoryview(self._small))
            self._small = bytearray()

    def _align(self, width: int) -> None:
        """Fill up with bytes that nobody asks for, so that a reader can map the tensor as it lies."""
        missing = -self._size % width
        if missing:
            self._put(f"_blank.{self._size}", "U8", [missing], memoryview(bytes(missing)))

    def complete(self) -> None:
        """Give the shard its name, and say what is in it."""
        if self._file < 0:
            return
        self._write_small()
        header = json.dumps(self._header, separators=(",", ":")).encode().ljust(_ROOM)
        os.lseek(self._file, 0, os.SEEK_SET)
        _write(self._file, memoryview(_ROOM.to_bytes(8, "little") + header))
        os.close(self._file)
        self._file = -1
        os.replace(self._partial(), self.folder / self._name())
        _write(self._index, memoryview(b"".join(self._lines)))
        self.count += 1
        self._tensors += len(self._lines)
        self._bytes += self._size
        self._begin()

    def close(self) -> None:
        """Complete the last shard."""
        try:
            self.complete()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Let go of the files; what is in no complete shard goes."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._partial())
        for file in (self._file, self._index):
            if file >= 0:
                os.close(file)
        self._file = self._index = -1
        self._begin()

    def _name(self) -> str:
        return _SHARD.format(number=self._number, count=self.count)

    def _partial(self) -> Path:
        return self.folder / f"{self._name()}.part"


def _claimed(folder: Path) -> tuple[int, int]:
    """A number that nobody else has in this folder, and its index, open."""
    number = 0
    while True:
        try:
            path = folder / INDEX.format(number=number)
            return number, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError:
            number += 1


def _write(file: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.write(file, memory[done:])
