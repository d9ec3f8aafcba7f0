"""A checkpoint as one safetensors file, and back.

Takes a tree of dictionaries, lists, numbers and tensors from `Saving`, hands it back to it. The tensors are numbered;
the file's metadata holds the tree as JSON, in which a tensor is a number, and a checksum over everything. Nothing is
pickled, and nothing that is read is run.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hookline.errors import CheckpointError
from hookline.messages import type_name
from hookline.training.checkpoints.checkpoint_tree import Reader, Tensors, tree_as_json

__all__ = ["read", "write"]

_KEY: Final = "hookline.checkpoint"
_VERSION: Final = 1
_LONGEST: Final = 2**24
"""Characters of JSON; a longer tree goes into a tensor too, since the format ends metadata at 100 MB."""


def write(path: Path, tree: Mapping[str, Any]) -> int:
    """Write it, so that a file of that name is either whole or as it was; how many bytes.

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
    """The tree; each tensor is on the device that it was on, or where ``home`` says for that."""
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
    """Over the tree, and the type, shape and bytes of every tensor; 1 GB takes about a second."""
    found = zlib.crc32(text.encode("ascii"))
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        if tensor.numel():
            found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found
