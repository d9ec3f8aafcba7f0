"""Reading an export back: every tensor with what the index says of it.

Takes a folder that ``export`` has written, or is writing; hands out one record after the other. Nothing is pickled, and
nothing that is read is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.errors import OptionError

__all__ = ["ExportRecord", "read_export"]


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One exported tensor."""

    module: str
    call: int
    """Which call of the module it is from, from 0."""
    request: str | None
    """Whose it is; None if nobody told, and then the tensor is all of the output."""
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    """Of these tokens in their sequence."""
    phase: str | None
    """``"prefill"``, ``"decode"``, or None."""
    tensor: Tensor


def read_export(folder: str | Path) -> Iterator[ExportRecord]:
    """All tensors of an export, file by file, in the order they were written.

    Recipe::

        for record in read_export("states"):
            print(record.module, record.request, record.positions, record.tensor.shape)

    Only what is complete is read: a file that a killed process has left half-written has another name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise OptionError(f"read_export({str(folder)!r}): there is no such folder.")
    for index in sorted(folder.glob("index-*.jsonl")):
        yield from _read(folder, index)


def _read(folder: Path, index: Path) -> Iterator[ExportRecord]:
    shard: Any = None
    name = ""
    for line in _lines(index):
        if line["shard"] != name:
            name = line["shard"]
            if name != Path(name).name:
                raise OptionError(f"{index} names {name!r}, which is no file of its folder.")
            shard = _opened(folder / name)
        yield ExportRecord(
            line["module"],
            line["call"],
            line["request"],
            tuple(line["tokens"]),
            tuple(line["positions"]),
            line["phase"],
            shard.get_tensor(line["key"]),
        )


def _opened(shard: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(shard), framework="pt")
    except (OSError, SafetensorError) as error:
        raise OptionError(f"read_export: {shard} cannot be read, though it was complete once ({error}).") from None


def _lines(index: Path) -> Iterator[dict[str, Any]]:
    for line in index.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # else it is still being written, or never will be
            yield json.loads(line)
