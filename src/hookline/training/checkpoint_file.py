"""Write a checkpoint as one safetensors file, and read it back.

`Checkpoints` calls `write`, and `rank_checkpoint` calls `read`, with a tree of dictionaries, lists, numbers, tensors
and arrays. The tensors are numbered; the file's metadata holds the tree as JSON, in which a tensor is a number, and a
checksum over everything.
Nothing is pickled, and nothing that is read is run. What cannot be kept is refused by its place in the tree.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.errors import CheckpointError
from hookline.messages import type_name
from hookline.when import HookPoint

__all__ = ["Tensors", "digest", "read", "tree_as_json", "write"]

_KEY: Final = "hookline.checkpoint"
_VERSION: Final = 1
_LONGEST: Final = 2**24
"""Characters of JSON; a longer tree goes into a tensor too, since the format ends metadata at 100 MB."""
_MANY: Final = 32
"""From that many on, a list of numbers goes into a tensor: 8 bytes each, where JSON takes 20."""
_IN_PAIRS: Final = (torch.complex128, torch.complex32)
"""Types that the format does not know, kept as pairs of real numbers."""
_FACTORIES: Final[dict[str, type]] = {cls.__name__: cls for cls in (int, float, list, dict, set, str)}


def write(path: Path, tree: Mapping[str, Any]) -> int:
    """Write the tree, so that a file of that name is either whole or as it was; return the number of bytes.

    The bytes are on the disk when this returns (fsync): a machine that loses power has the file, or the one before.
    """
    from safetensors.torch import save_file

    tensors = Tensors()
    text = json.dumps(tree_as_json(tree, tensors, ""), allow_nan=False)
    numbered = tensors.numbered
    about = {_KEY: text, "version": str(_VERSION), "format": "pt"}
    if len(text) > _LONGEST:
        numbered["tree"] = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)
        about[_KEY] = ""
    about["checksum"] = str(_checksum(text, numbered))
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(numbered, beside, metadata=about)
        _to_disk(beside)
        beside.replace(path)
        with suppress(OSError):  # not every system can do this to a folder
            _to_disk(path.parent)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return path.stat().st_size


def read(path: Path, home: Callable[[torch.device], torch.device] | None = None) -> dict[str, Any]:
    """Return the tree; each tensor is on the device that it was on, or on the one that `home` returns for it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    if _KEY not in about:
        raise CheckpointError(f"{path} is no checkpoint of hookline: there is no {_KEY!r} in its metadata.")
    if about.get("version") != str(_VERSION):
        raise CheckpointError(
            f"{path} is of version {about.get('version')}, and this hookline reads {_VERSION}; update it."
        )
    text = about[_KEY] or (bytes(tensors["tree"].numpy()).decode("ascii") if "tree" in tensors else "")
    if str(_checksum(text, tensors)) != about.get("checksum"):
        raise CheckpointError(f"{path} is damaged: its checksum is another one than it was written with.")
    try:
        tree = Reader(tensors, home or (lambda device: device)).value(json.loads(text))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: its tree does not fit its tensors ({error!r}).") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is damaged: its tree is {type_name(tree)}, and not a dictionary.")
    return tree


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum of the tree, and of type, shape and bytes of every tensor; 1 GB takes about a second."""
    found = zlib.crc32(text.encode("ascii"))
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        if tensor.numel():
            found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def digest(tree: Any) -> int:
    """Return a number that two trees have in common only if they hold the same."""
    tensors = Tensors()
    text = json.dumps(tree_as_json(tree, tensors, ""), allow_nan=False)
    return _checksum(text, tensors.numbered)


# -- to JSON ---------------------------------------------------------------------------------------------------


class Tensors:
    """Number the tensors of a file, each piece of memory once."""

    def __init__(self) -> None:
        self.numbered: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self._memory: set[int] = set()
        self._alive: list[Tensor] = []

    def add(self, tensor: Tensor, path: str) -> str:
        """Return the number of a tensor."""
        _check(tensor, path)
        plain = tensor.detach()
        place = (plain.device, plain.data_ptr(), tuple(plain.shape), plain.stride(), plain.dtype, plain.is_conj())
        known = self._known.get(place) if plain.numel() else None  # tied weights have two names and one memory
        if known is None:
            known = str(len(self.numbered))
            self._known[place] = known
            self._alive.append(plain)  # so that no other tensor comes to lie there
            self.numbered[known] = self._writable(plain)
        return known

    def _writable(self, plain: Tensor) -> Tensor:
        """Return a contiguous copy in memory of its own: the format lets no two tensors share theirs."""
        host = plain.cpu().resolve_conj().resolve_neg()
        host = torch.view_as_real(host) if host.dtype in _IN_PAIRS else host
        storage = host.untyped_storage()
        if not host.is_contiguous() or storage.nbytes() != host.nbytes or storage.data_ptr() in self._memory:
            host = host.clone(memory_format=torch.contiguous_format)
        self._memory.add(host.untyped_storage().data_ptr())
        return host


def _check(tensor: Tensor, path: str) -> None:
    kind = ""
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"A checkpoint cannot hold {path}: it has no numbers yet. Next: run the model once.")
    if tensor.is_meta:
        kind = "a tensor on the meta device"
    elif type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        kind = f"a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"a tensor of layout {tensor.layout}, {tensor.dtype}"
    if kind:
        raise CheckpointError(f"A checkpoint cannot hold {path}: it is {kind}, and plain dense tensors can be saved.")


def tree_as_json(value: Any, tensors: Tensors, path: str, above: tuple[int, ...] = ()) -> Any:
    """Return `value` as JSON that says what it is: itself if JSON has it, else a list such as ["tuple", 1, 2]."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:  # a gradient of an embedding
        parts = [tree_as_json(part.detach(), tensors, path) for part in (value._indices(), value._values())]
        return ["sparse", *parts, list(value.shape), value.is_coalesced()]
    if isinstance(value, Tensor):
        return ["tensor", tensors.add(value, path or "it"), str(value.device), str(value.dtype).removeprefix("torch.")]
    simple = _simple_as_json(value, tensors, path)
    if simple is not None:
        return simple
    if id(value) in above:
        raise CheckpointError(f"A checkpoint cannot hold {path}: it contains itself.")
    return _container_as_json(value, tensors, path, (*above, id(value)))


def _simple_as_json(value: Any, tensors: Tensors, path: str) -> Any:
    """Return the JSON of a value that is no container; None for a container."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_as_json(value, tensors, path)
    if isinstance(value, HookPoint):
        return ["point", value.name]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if type(value) in (bytes, bytearray):
        return [type(value).__name__, base64.b64encode(value).decode("ascii")]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if type(value) is range:
        return ["range", value.start, value.stop, value.step]
    return ["path", str(value)] if isinstance(value, Path) else None


def _array_as_json(value: Any, tensors: Tensors, path: str) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise CheckpointError(f"A checkpoint cannot hold {path}: it is an array of {array.dtype}, not of numbers.")
    tag = "array" if isinstance(value, np.ndarray) else "scalar"
    raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else torch.empty(0)
    return [tag, tensors.add(raw, path), array.dtype.str, list(array.shape)]


def _container_as_json(value: Any, tensors: Tensors, path: str, above: tuple[int, ...]) -> Any:
    def item(key: Any, one: Any) -> Any:
        return tree_as_json(one, tensors, f"{path}.{key}" if path else str(key), above)

    if isinstance(value, Mapping):
        return _mapping_as_json(value, item, path)
    if isinstance(value, torch.Size):
        return ["size", *value]
    if type(value) not in (list, tuple, set, frozenset, deque) and not isinstance(value, list):
        raise CheckpointError(
            f"A checkpoint cannot hold {path}: it is {type_name(value)}. Numbers, texts, tensors, arrays, and lists, "
            "tuples, sets and dictionaries of these can be saved."
        )
    many = _numbers_as_json(value, tensors, path) if isinstance(value, list) else None
    if many is not None:
        return many
    items = [item(index, one) for index, one in enumerate(value)]
    if isinstance(value, deque):
        return ["deque", value.maxlen, *items]
    return ["list" if isinstance(value, list) else type(value).__name__, *items]


def _numbers_as_json(value: list[Any], tensors: Tensors, path: str) -> Any:
    """Return a long list of floats, or of 64-bit integers, as a tensor; None for other lists."""
    classes = set(map(type, value)) if len(value) >= _MANY else set()
    if classes == {float}:
        return ["floats", tensors.add(torch.tensor(value, dtype=torch.float64), path)]
    if classes == {int} and min(value) >= -(2**63) and max(value) < 2**63:
        return ["ints", tensors.add(torch.tensor(value, dtype=torch.int64), path)]
    return None


def _mapping_as_json(value: Mapping[Any, Any], item: Callable[[Any, Any], Any], path: str) -> Any:
    tag: list[Any] = ["dict"]
    if isinstance(value, defaultdict):
        name = getattr(value.default_factory, "__name__", None)
        if value.default_factory is not None and _FACTORIES.get(str(name)) is not value.default_factory:
            raise CheckpointError(f"A checkpoint cannot hold {path}: it is a defaultdict of {name}, which is code.")
        tag = ["defaultdict", name]
    elif isinstance(value, Counter):
        tag = ["counter"]
    elif isinstance(value, OrderedDict):
        tag = ["ordered"]
    if all(type(key) is str for key in value):
        return [*tag, {key: item(key, one) for key, one in value.items()}]
    return [*tag, [[item(f"key {key!r}", key), item(key, one)] for key, one in value.items()]]


# -- and back ----------------------------------------------------------------------------------------------------


class Reader:
    """Make a tree of JSON and tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], home: Callable[[torch.device], torch.device]) -> None:
        self._tensors = tensors
        self._home = home
        self._placed: dict[tuple[str, str], Tensor] = {}

    def value(self, about: Any) -> Any:
        """Return the value that a piece of JSON stands for."""
        if not isinstance(about, list):
            return about
        tag, *parts = about
        if tag == "tensor":
            return self._tensor(*parts)
        if tag == "sparse":
            indices, values, size, coalesced = parts
            return torch.sparse_coo_tensor(
                self.value(indices), self.value(values), size, is_coalesced=coalesced, check_invariants=True
            )
        if tag in _MAPPINGS:
            return self._mapping(tag, parts)
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](map(self.value, parts))
        if tag == "deque":
            return deque(map(self.value, parts[1:]), maxlen=parts[0])
        if tag in ("floats", "ints"):
            return self._tensors[parts[0]].tolist()
        if tag in ("array", "scalar"):
            number, dtype, shape = parts
            array = np.frombuffer(self._tensors[number].numpy().tobytes(), dtype).reshape(shape).copy()
            return array if tag == "array" else array[()]
        return _SIMPLE[tag](*parts)

    def _tensor(self, number: str, device: str, dtype: str) -> Tensor:
        """Return a tensor, one object for all its places in the tree."""
        found = self._placed.get((number, device))
        if found is None:
            found = self._tensors[number]
            if _dtype(dtype) in _IN_PAIRS:
                found = torch.view_as_complex(found)
            found = self._placed[number, device] = found.to(self._home(torch.device(device)))
        return found

    def _mapping(self, tag: str, parts: list[Any]) -> Any:
        given = parts[-1].items() if isinstance(parts[-1], dict) else [(self.value(k), one) for k, one in parts[-1]]
        items = {key: self.value(one) for key, one in given}
        if tag == "defaultdict":
            return defaultdict(None if parts[0] is None else _FACTORIES[parts[0]], items)
        return _MAPPINGS[tag](items)


_MAPPINGS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": dict, "ordered": OrderedDict, "counter": Counter, "defaultdict": dict,
}  # fmt: skip
_CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size,
}  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no type of numbers")
    return found


_SIMPLE: Final[dict[str, Callable[..., Any]]] = {
    "float": float,
    "point": HookPoint.of,
    "dtype": _dtype,
    "device": torch.device,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "range": range,
    "path": Path,
}
