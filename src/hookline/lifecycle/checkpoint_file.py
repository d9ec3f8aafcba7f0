"""Write a tree of plain values and tensors as one file, and read it back: checkpoints, and states of hooks.

`Checkpoints`, the adapters of accelerate and transformers, and ``check_hook`` call `write` and `read`; ``runs.session``
reads a checkpoint back to check it, ``lifecycle.managed_hooks`` takes reference weights from one. The file is what
torch.save writes, with a checksum behind it. It is read by torch's reader that runs no code, so a new type of value
needs an entry in `_READABLE`, and a case in `to_savable` that makes it of such entries. Of a tensor that ranks hold in
parts, the part of this rank is written; ``place_parts`` of training/checkpoints.py reads `PART` and "shape". A value
that cannot be kept raises, with its place.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.serialization import config

from hookline.errors import CheckpointError, ResumeError
from hookline.files import replace_file
from hookline.messages import type_name
from hookline.when import HookPoint

_MARK: Final = b"hookline.checkpoint."
"""Comes after what torch.save wrote; after it come the version and 4 bytes of CRC-32."""
_VERSION: Final = b"4"
"""Of the format, and of the tree that a run writes (training/checkpoints.py). Count it up when either changes so that
older files cannot be read: they are then refused with an error that says so."""
_END: Final = len(_MARK + _VERSION) + 4
PART: Final = "\x1flocal"
"""The key of this rank's part of a sharded tensor, in the dictionary that stands for the tensor in a file."""
_BLOCK: Final = 2**20
"""Bytes that are read at once for the checksum."""
_MOST_BITS: Final = 2000
"""Of a whole number that is written as it is, as torch's reader takes 255 bytes at most; longer ones go as text."""
_FACTORIES: Final = (None, int, float, list, dict, set, str)
"""What a defaultdict may make of a missing key; anything else is code."""
_PLAIN: Final = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, range, torch.dtype, torch.device, HookPoint,
})  # fmt: skip


# -- the file --------------------------------------------------------------------------------------------------------


def write(path: Path, tree: Mapping[str, Any]) -> int:
    """Write the tree, so that a file of that name is either whole or as it was; return the number of bytes.

    The bytes are on the disk when this returns (fsync): a machine that loses power has the file, or the one before.
    """
    savable = to_savable(tree)

    def write_draft(draft: Path) -> None:
        with _Summed(io.FileIO(draft, "wb")) as file:
            _save(savable, file)
            file.write(_MARK + _VERSION + file.crc.to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write_draft)
    with suppress(OSError):  # not every system can do this to a folder
        sync_folder(path.parent)
    return path.stat().st_size


class _Summed(io.BufferedWriter):
    """A file with the checksum of what was written to it; 1 GB takes about half a second."""

    crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)


def _save(savable: Any, file: io.BufferedWriter) -> None:
    """Write ``savable`` by torch.save."""
    try:
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # torch does not read it
            torch.save(savable, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # a full disk: torch says that it is somewhere else in the file
            raise error.__context__ from None
        raise CheckpointError(f"A checkpoint cannot be written: {error}") from error


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk (fsync), so that new files keep their names after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, home: Callable[[torch.device], torch.device] = lambda device: device) -> dict[str, Any]:
    """Return the tree; each tensor is on the device that it was on, or on the one that `home` returns for it."""

    def place(storage: Any, location: str) -> Any:
        device = home(torch.device(location))
        return storage if device.type == "cpu" else storage.to(device=device)

    try:
        _check_sum(path)
        # An open file: of a path, torch would go by its ending.
        with torch.serialization.safe_globals(_READABLE), path.open("rb") as file:
            tree = torch.load(file, map_location=place, weights_only=True)
    except (CheckpointError, ResumeError):
        raise
    except Exception as error:  # torch's own have no common class
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is no checkpoint of hookline: it holds {type_name(tree)}.")
    return tree


def is_checkpoint(path: Path) -> bool:
    """Return whether `write` made the file, of this version or another."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
        return file.read().startswith(_MARK)


def _check_sum(path: Path) -> None:
    """Raise if the file is of another version, or not, byte by byte, what was written."""
    found = 0
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - _END
        file.seek(0)
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            found = zlib.crc32(block, found)
            left -= len(block)
        end = file.read()
    if not end.startswith(_MARK):
        raise CheckpointError(f"{path} is no checkpoint of hookline, or its end is missing.")
    version = end[len(_MARK) : -4]
    if version != _VERSION and version.isdigit():
        raise ResumeError(
            f"{path} is a checkpoint of version {version.decode()}, and this hookline reads version "
            f"{_VERSION.decode()}. Next: continue with the hookline that wrote it, or begin a run in another folder."
        )
    if end != _MARK + _VERSION + found.to_bytes(4, "little"):
        raise CheckpointError(f"{path} is damaged: its checksum is another one than it was written with.")


# -- the tree --------------------------------------------------------------------------------------------------------


class _Made:
    """Stand for a value: torch.save writes it as a call of ``make`` with ``parts``, which the reader makes again.

    ``make`` has to be one that torch's reader knows, or be in `_READABLE`.
    """

    def __init__(self, make: Callable[..., Any], *parts: Any) -> None:
        self._call = make, parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def is_sharded(tensor: Any) -> bool:
    """Return whether ranks hold a tensor in parts."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def part_of(tensor: Any) -> dict[str, Any]:
    """Return this rank's part of a sharded tensor, with the shape of the whole."""
    return {PART: tensor.to_local().detach(), "shape": list(tensor.shape)}


def to_savable(
    value: Any, path: str = "", above: tuple[int, ...] = (), dtypes: dict[int, torch.dtype] | None = None
) -> Any:
    """Return `value` as torch.save can write it and `read` can read it; raise `CheckpointError` with its place.

    The other arguments are for the recursion: the ids of the containers around `value`, and the dtype of each memory
    (by address) that was met so far.
    """
    known = {} if dtypes is None else dtypes
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return _Made(int, hex(value), 16)
    if type(value) in _PLAIN:
        return value
    if type(value) is torch.Size:
        return _Made(torch.Size, tuple(value))
    if is_sharded(value):
        value = part_of(value)
    if isinstance(value, Tensor):
        return _savable_tensor(value, path, known)
    if isinstance(value, (np.ndarray, np.generic)):
        return _savable_array(value, path)
    if isinstance(value, PurePath):
        return _Made(Path, str(value))
    if id(value) in above:
        raise CheckpointError(f"A checkpoint cannot hold {path}: it contains itself.")

    def inside(key: Any, item: Any) -> Any:
        return to_savable(item, f"{path}.{key}" if path else str(key), (*above, id(value)), known)

    if isinstance(value, Mapping):
        items = {inside(f"key {key!r}", key): inside(key, item) for key, item in value.items()}
        if not isinstance(value, defaultdict):
            return {OrderedDict: OrderedDict, Counter: Counter}.get(type(value), dict)(items)
        if value.default_factory not in _FACTORIES:
            raise CheckpointError(f"A checkpoint cannot hold {path}: its default is {value.default_factory}, code.")
        return _Made(defaultdict, value.default_factory, items)
    if type(value) not in (tuple, set, frozenset) and not isinstance(value, (list, deque)):
        raise CheckpointError(
            f"A checkpoint cannot hold {path}: it is {type_name(value)}. Numbers, texts, tensors, arrays, and lists, "
            "tuples, sets and dictionaries of these can be saved."
        )
    if set(map(type, value)) == {int} and max(map(int.bit_length, value)) <= _MOST_BITS:
        parts = list(value)  # without a call for each: a random stream has 625 numbers
    else:
        parts = [inside(index, item) for index, item in enumerate(value)]
    if isinstance(value, deque):
        return _Made(deque, parts, value.maxlen)
    return parts if isinstance(value, list) else type(value)(parts)


def _savable_tensor(tensor: Tensor, path: str, dtypes: dict[int, torch.dtype]) -> Tensor:
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"A checkpoint cannot hold {path}: it has no numbers yet. Next: run the model once.")
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not tensor.is_meta
    if not is_plain or tensor.is_quantized or tensor.layout not in (torch.strided, torch.sparse_coo):
        raise CheckpointError(
            f"A checkpoint cannot hold {path}: it is a {type(tensor).__name__} of {tensor.dtype} with layout "
            f"{tensor.layout} on {tensor.device}, and plain tensors with numbers can be saved."
        )
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        return plain
    memory = plain.untyped_storage()
    # Of a part, torch would write all the memory that it is a part of; the same memory as two dtypes it refuses.
    if memory.nbytes() != plain.nbytes or dtypes.setdefault(memory.data_ptr(), plain.dtype) != plain.dtype:
        return plain.clone(memory_format=torch.contiguous_format)
    return plain


def _savable_array(value: Any, path: str) -> _Made:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise CheckpointError(f"A checkpoint cannot hold {path}: it is an array of {array.dtype}, not of numbers.")
    raw = torch.tensor(np.frombuffer(array.tobytes(), np.uint8))
    return _Made(_array, raw, array.dtype.str, array.shape, isinstance(value, np.generic))


def _array(raw: Tensor, dtype: str, shape: tuple[int, ...], is_scalar: bool) -> Any:
    array = np.frombuffer(raw.numpy().tobytes(), dtype).reshape(shape).copy()
    return array[()] if is_scalar else array


_READABLE: Final[list[Any]] = [
    Path, HookPoint, frozenset, range, deque, defaultdict, int, float, list, dict, str, _array
]  # fmt: skip
"""What a file may name besides what torch's reader knows; none of it runs code of the file."""
