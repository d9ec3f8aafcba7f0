"""Launch the programs of `triton_fingerprint`, which read a tensor on a GPU once for its whole fingerprint.

`fingerprint_on_device` calls `launch` where `can_launch` says so; elsewhere torch's operators do the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.trace.sketch_tables import COLUMNS, ROWS, WIDTH, DeviceTables

__all__ = ["can_launch", "launch"]

_READ: Final = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAM_ROWS: Final = 32
"""Rows of 1,021 numbers for each program: 130 KB of float32. A block of 256 rows has a whole number of programs."""
_GROUPS: Final = 16


def can_launch(flat: Tensor) -> bool:
    """Return whether the programs can read this tensor: usual numbers, at an address of whole words."""
    return flat.dtype in _READ and flat.device.type == "cuda" and _has_triton() and flat.data_ptr() % 8 == 0


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _programs() -> Any:
    return importlib.import_module("hookline.debug.trace.triton_fingerprint")


def launch(flat: Tensor, tables: DeviceTables, numbers_out: Tensor, hash_out: Tensor) -> None:
    """Write the fingerprint of a flat tensor into a row, without waiting for the device."""
    count, size = flat.numel(), flat.element_size()
    programs = -(-count // (_PROGRAM_ROWS * COLUMNS))
    found = torch.empty(programs, 32, dtype=torch.float64, device=flat.device)
    hashes = torch.empty(programs, dtype=torch.int64, device=flat.device)
    num_words, num_bytes = divmod(count * size, 8)
    memory = flat.view(torch.uint8)
    words = memory[: num_words * 8].view(torch.int64)
    blocks = tables.block_signs(-(-count // (ROWS * COLUMNS)))
    kernels = _programs()
    with _on(flat.device):
        kernels.read_rows[(programs,)](
            flat, words, tables.signs, blocks, tables.odd, found, hashes, count, num_words,
            ROWS=_PROGRAM_ROWS, BLOCK_ROWS=ROWS, GROUPS=_GROUPS, WIDTH=WIDTH, WORDS=_PROGRAM_ROWS * COLUMNS * size // 8,
        )  # fmt: skip
        kernels.merge_programs[(1,)](
            found, hashes, memory[num_words * 8 :] if num_bytes else memory, tables.odd, numbers_out, hash_out,
            programs, count, num_words, num_bytes, ROWS=64,
        )  # fmt: skip


def _on(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
