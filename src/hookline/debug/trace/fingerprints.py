"""Find the fingerprint of a tensor: on the CPU as plain numbers, on other devices as a row that stays there.

`TraceRecorder` calls this at every firing. Both ways define the same: numbers are taken in the order of their indices,
whatever the strides. The sketch goes by blocks of 256 × 1,021 numbers. Within a block a fixed table of signs
multiplies the numbers, columns are added up and gathered into groups; each block and group has one more sign. 1,021 is
prime, so that a difference in one row or one feature of a tensor spreads over all groups. The hash adds up 8-byte words
in 1,021 columns, and multiplies these by odd numbers; additions wrap around, so that no order of them matters.

On one core, 262,144 float32: extremes 69 µs, sum and squares 85, sketch 98, hash 61.
"""

from __future__ import annotations

import functools
import math
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.debug.trace.fingerprint_kernel import can_launch, launch
from hookline.debug.trace.sketch_tables import BLOCK, COLUMNS, ROWS, WIDTH, DeviceTables, SketchTables

__all__ = [
    "DeviceTables",
    "FoundNumbers",
    "SketchTables",
    "fingerprint_on_cpu",
    "fingerprint_on_device",
    "sketch_tables",
]

_TINY: Final = 1e-30
"""Sums of squares below this may have lost numbers that are too small to be squared in float32."""


class FoundNumbers(NamedTuple):
    """The fingerprint of one tensor, as numbers."""

    numbers: tuple[float, float, float, int, int]
    """Mean, norm, absmax, NaN, Inf."""
    hash: int
    sketch: NDArray[np.float64]


@functools.cache
def sketch_tables() -> SketchTables:
    """Return the signs of all traces."""
    return SketchTables()


def fingerprint_on_cpu(tensor: Tensor, tables: SketchTables) -> FoundNumbers:
    """Return the fingerprint of a dense tensor that is on the CPU."""
    flat = _flat(tensor)
    numbers = _as_real(flat)
    count = numbers.numel()
    if not count:
        return FoundNumbers((0.0, 0.0, 0.0, 0, 0), 0, np.zeros(len(tables.starts)))
    high, low = numbers.amax().item(), numbers.amin().item()
    nan = inf = 0
    if not (math.isfinite(high) and math.isfinite(low)):
        nan = int(numbers.isnan().sum())
        inf = int(numbers.isinf().sum())
        numbers = torch.nan_to_num(numbers, 0.0, 0.0, 0.0)
        high, low = numbers.amax().item(), numbers.amin().item()
    total, squares = _moments(numbers, max(high, -low))
    found = (total / count, math.sqrt(squares), max(high, -low), nan, inf)
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers near 1e38 the sums are infinite, or NaN
        return FoundNumbers(found, _hash(flat, tables), _sketch(numbers.numpy(), tables))


def _moments(numbers: Tensor, absmax: float) -> tuple[float, float]:
    """Return sum and sum of squares."""
    total = squares = 0.0
    for block in (numbers,) if numbers.numel() <= BLOCK else torch.split(numbers, BLOCK):
        total += block.sum().item()
        squares += torch.dot(block, block).item()
    if numbers.dtype is not torch.float64 and (squares < _TINY or not math.isfinite(squares + total)) and absmax:
        return _moments(numbers.double(), absmax)  # too small, or too large, for float32
    return total, squares


def _sketch(numbers: NDArray[np.floating], tables: SketchTables) -> NDArray[np.float64]:
    count = numbers.size
    if count <= BLOCK:
        return _sketch_of_block(numbers, tables)
    signs = tables.block_signs(-(-count // BLOCK))
    blocks = range(0, count, BLOCK)
    found = [_sketch_of_block(numbers[begin : begin + BLOCK], tables) for begin in blocks]
    return np.asarray((np.stack(found) * signs).sum(0))


def _sketch_of_block(numbers: NDArray[np.floating], tables: SketchTables) -> NDArray[np.float64]:
    signs = tables.signs if numbers.dtype == np.float32 else tables.signs_double
    rows, rest = divmod(numbers.size, COLUMNS)
    if rows:
        whole = numbers[: rows * COLUMNS].reshape(rows, COLUMNS)
        columns = np.einsum("rc,rc->c", whole, signs[:rows])
    else:
        columns = np.zeros(COLUMNS, numbers.dtype)
    if rest:
        columns[:rest] += numbers[rows * COLUMNS :] * signs[rows, :rest]
    return np.add.reduceat(columns, tables.starts, dtype=np.float64)


def _hash(flat: Tensor, tables: SketchTables) -> int:
    words = _words(flat)
    rows, rest = divmod(words.size, COLUMNS)
    if not rows:
        return int(np.dot(words, tables.odd[:rest]))
    columns = np.add.reduce(words[: rows * COLUMNS].reshape(rows, COLUMNS), axis=0)
    columns[:rest] += words[rows * COLUMNS :]
    return int(np.dot(columns, tables.odd))


def _words(flat: Tensor) -> NDArray[np.uint64]:
    """Return the memory of a tensor in words of 8 bytes, the last one filled up with zeros."""
    memory: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    beyond = memory.size % 8
    if beyond:
        memory = np.concatenate([memory, np.zeros(8 - beyond, np.uint8)])
    return memory.view(np.uint64)


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in one dimension, in the order of their indices; complex ones in pairs."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.reshape(-1).contiguous()  # one number that is repeated is no copy yet


def _as_real(flat: Tensor) -> Tensor:
    """Return the numbers as float32, or float64 where float32 does not hold them."""
    dtype = flat.dtype
    if dtype is torch.float32 or dtype is torch.float64:
        return flat
    return flat.float() if dtype.is_floating_point else flat.double()


# -- other devices: no number comes to the host before it is asked for --------------------------------------------


def fingerprint_on_device(tensor: Tensor, tables: DeviceTables, numbers_out: Tensor, hash_out: Tensor) -> None:
    """Write the fingerprint of a dense tensor into a row: mean, norm, absmax, NaN, Inf, sketch; and the hash.

    Only operators that do not wait for the device, and none that autocast would run in another precision.
    """
    flat = _flat(tensor)
    if not flat.numel():
        return
    if can_launch(flat):
        launch(flat, tables, numbers_out, hash_out)
        return
    numbers = _as_real(flat)
    count = numbers.numel()
    nan = numbers.isnan()
    inf = numbers.isinf()
    finite = torch.nan_to_num(numbers, 0.0, 0.0, 0.0)
    found = torch.stack(
        [
            finite.sum(dtype=torch.float64) / count,
            torch.linalg.vector_norm(finite, dtype=torch.float64),
            torch.maximum(finite.amax(), -finite.amin()).double(),
            nan.sum(dtype=torch.float64),
            inf.sum(dtype=torch.float64),
        ]
    )
    numbers_out[:5] = found
    numbers_out[5:] = _device_sketch(finite, tables)
    hash_out.copy_(_device_hash(flat, tables))


def _device_sketch(numbers: Tensor, tables: DeviceTables) -> Tensor:
    count = numbers.numel()
    blocks = -(-count // BLOCK)
    rows = min(ROWS, -(-count // COLUMNS))
    padded = torch.nn.functional.pad(numbers, (0, blocks * rows * COLUMNS - count))
    columns = (padded.view(blocks, rows, COLUMNS) * tables.signs[:rows]).sum(1, dtype=torch.float64)
    groups = torch.nn.functional.pad(columns, (0, -COLUMNS % WIDTH)).view(blocks, -1, WIDTH).sum(2)
    if blocks == 1:
        return groups[0]
    return (groups * tables.block_signs(blocks)).sum(0)


def _device_hash(flat: Tensor, tables: DeviceTables) -> Tensor:
    memory = flat.view(torch.uint8)
    words = torch.nn.functional.pad(memory, (0, -memory.numel() % (8 * COLUMNS))).view(torch.int64)
    return (words.view(-1, COLUMNS).sum(0) * tables.odd).sum()
