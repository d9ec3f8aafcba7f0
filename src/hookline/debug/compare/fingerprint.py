"""Find the fingerprint of a tensor: on the CPU as plain numbers, on other devices as a row that is read later.

`TraceRecorder` calls this at every firing. Both ways define the same: numbers are taken in the order of their indices,
whatever the strides. The sketch goes by blocks of 256 × 1,021 numbers. Within a block a fixed table of signs
multiplies the numbers, columns are added up and gathered into groups; each block and group has one more sign. 1,021 is
prime, so that a difference in one row or one feature of a tensor spreads over all groups. The hash adds up 8-byte words
in 1,021 columns, and multiplies these by odd numbers; additions wrap around, so that no order of them matters.

On one core, 262,144 float32: extremes 69 µs, sum and squares 85, sketch 98, hash 61.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.observe.watch.kernel import is_available, kernel_types, on_device

__all__ = ["DeviceFingerprints", "FoundNumbers", "fingerprint_on_cpu"]

COLUMNS: Final = 1021
ROWS: Final = 256
BLOCK: Final = COLUMNS * ROWS
WIDTH: Final = 64
"""How many neighbouring columns make a group."""
GROUPS: Final = -(-COLUMNS // WIDTH)
_STARTS: Final = np.arange(0, COLUMNS, WIDTH)
_TINY: Final = 1e-30
"""Sums of squares below this may have lost numbers that are too small to be squared in float32."""


class _SketchTables:
    """The random signs of all traces, so that any two can be compared."""

    def __init__(self) -> None:
        made = np.random.Generator(np.random.Philox(0))
        self.signs: NDArray[np.float32] = (made.integers(0, 2, (ROWS, COLUMNS)) * 2 - 1).astype(np.float32)
        self.odd: NDArray[np.uint64] = made.integers(0, 1 << 64, COLUMNS, dtype=np.uint64) | np.uint64(1)
        self.signs_double: NDArray[np.float64] = self.signs.astype(np.float64)


@functools.cache
def _tables() -> _SketchTables:
    return _SketchTables()


@functools.cache
def _block_signs(blocks: int) -> NDArray[np.float64]:
    """Return a sign for each of so many blocks and each group."""
    made = np.random.Generator(np.random.Philox(key=1 << 64))
    signs: NDArray[np.float64] = (made.integers(0, 2, (blocks, GROUPS)) * 2 - 1).astype(np.float64)
    signs[0] = 1.0
    return signs


class FoundNumbers(NamedTuple):
    """The fingerprint of one tensor, as numbers."""

    numbers: tuple[float, float, float, int, int]
    """Mean, norm, absmax, NaN, Inf."""
    hash: int
    sketch: NDArray[np.float64]


def fingerprint_on_cpu(tensor: Tensor) -> FoundNumbers:
    """Return the fingerprint of a dense tensor that is on the CPU."""
    flat = _flat(tensor)
    numbers = _as_real(flat)
    count = numbers.numel()
    if not count:
        return FoundNumbers((0.0, 0.0, 0.0, 0, 0), 0, np.zeros(GROUPS))
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
        return FoundNumbers(found, _hash(flat), _sketch(numbers.numpy()))


def _moments(numbers: Tensor, absmax: float) -> tuple[float, float]:
    """Return sum and sum of squares."""
    total = squares = 0.0
    for block in (numbers,) if numbers.numel() <= BLOCK else torch.split(numbers, BLOCK):
        total += block.sum().item()
        squares += torch.dot(block, block).item()
    if numbers.dtype is not torch.float64 and (squares < _TINY or not math.isfinite(squares + total)) and absmax:
        return _moments(numbers.double(), absmax)  # too small, or too large, for float32
    return total, squares


def _sketch(numbers: NDArray[np.floating]) -> NDArray[np.float64]:
    count = numbers.size
    if count <= BLOCK:
        return _sketch_of_block(numbers)
    signs = _block_signs(-(-count // BLOCK))
    blocks = range(0, count, BLOCK)
    found = [_sketch_of_block(numbers[begin : begin + BLOCK]) for begin in blocks]
    return np.asarray((np.stack(found) * signs).sum(0))


def _sketch_of_block(numbers: NDArray[np.floating]) -> NDArray[np.float64]:
    signs = _tables().signs if numbers.dtype == np.float32 else _tables().signs_double
    rows, rest = divmod(numbers.size, COLUMNS)
    if rows:
        whole = numbers[: rows * COLUMNS].reshape(rows, COLUMNS)
        columns = np.einsum("rc,rc->c", whole, signs[:rows])
    else:
        columns = np.zeros(COLUMNS, numbers.dtype)
    if rest:
        columns[:rest] += numbers[rows * COLUMNS :] * signs[rows, :rest]
    return np.add.reduceat(columns, _STARTS, dtype=np.float64)


def _hash(flat: Tensor) -> int:
    words, odd = _words(flat), _tables().odd
    rows, rest = divmod(words.size, COLUMNS)
    if not rows:
        return int(np.dot(words, odd[:rest]))
    columns = np.add.reduce(words[: rows * COLUMNS].reshape(rows, COLUMNS), axis=0)
    columns[:rest] += words[rows * COLUMNS :]
    return int(np.dot(columns, odd))


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
    flat = tensor.reshape(-1).contiguous()
    # A single number of an expanded tensor counts as contiguous with a stride of 0, and could not be read as bytes.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def _as_real(flat: Tensor) -> Tensor:
    """Return the numbers as float32, or float64 where float32 does not hold them."""
    dtype = flat.dtype
    if dtype is torch.float32 or dtype is torch.float64:
        return flat
    return flat.float() if dtype.is_floating_point else flat.double()


# -- other devices: no number comes to the host before it is asked for --------------------------------------------

_CAPACITY: Final = 4096
"""Fingerprints that a device holds before somebody has to read them."""
_SLOTS: Final = 1 << 16
"""What programs have found before it is merged: 16 MiB, half a step of GPT-2 small."""
_SLOT_WIDTH: Final = 32
_PROGRAM_ROWS: Final = 16
"""Rows of 1,021 numbers for each program; a block of 256 rows has a whole number of programs. 6 million numbers in
bfloat16 on an H200 take 16 µs; 22 with 32 rows, 19 with 8."""
_MERGED: Final = 64
"""Slots that a merging program takes at a time."""
_READ: Final = (torch.float32, torch.bfloat16, torch.float16)


class DeviceFingerprints:
    """The fingerprints of tensors on one stream of one device, in rows there until they are read.

    On a GPU each takes one launch of a program that was compiled before (Triton's own way of launching takes five
    times as long), and many are merged by one more; elsewhere torch's operators do the same.
    """

    def __init__(self, device: torch.device, *, by_programs: bool | None = None) -> None:
        self._device = device
        self._by_programs = is_available(device) if by_programs is None else by_programs
        self._signs = torch.from_numpy(_tables().signs).to(device)
        self._odd = torch.from_numpy(_tables().odd.view(np.int64)).to(device)
        self._block_signs: dict[int, Tensor] = {}
        self._numbers = torch.zeros(_CAPACITY, 5 + GROUPS, dtype=torch.float64, device=device)
        self._hashes = torch.zeros(_CAPACITY, dtype=torch.int64, device=device)
        self._slots = torch.empty(0, _SLOT_WIDTH, dtype=torch.float64, device=device)
        self._used_slots = 0
        self._jobs: list[int] = []
        """Of each tensor that is not merged yet: first slot, number of slots, number of numbers, row."""
        self._compiled: dict[Any, Any] = {}
        self.used = 0
        """How many rows are taken."""

    @property
    def is_full(self) -> bool:
        """Return whether the rows have to be read before another is added."""
        return self.used == _CAPACITY

    def add(self, tensor: Tensor) -> int:
        """Find the fingerprint of a dense tensor; return the number of its row.

        Only operators that do not wait for the device, and none that autocast would run in another precision.
        """
        row = self.used
        self.used += 1
        flat = tensor if tensor.is_contiguous() and tensor.dtype in _READ and not tensor.is_neg() else _flat(tensor)
        if not flat.numel():
            self._numbers[row], self._hashes[row] = 0.0, 0
        elif self._by_programs and flat.dtype in _READ and flat.data_ptr() % 8 == 0:
            with on_device(self._device):
                self._launch(flat, row)
        else:
            self._by_operators(flat, row)
        return row

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return numbers (mean, norm, absmax, NaN, Inf, sketch) and hashes of all rows, which stay until `forget`."""
        with on_device(self._device):
            self._merge()
        rows = self.used
        return self._numbers[:rows].cpu().numpy(), self._hashes[:rows].cpu().numpy().view(np.uint64)

    def forget(self) -> None:
        """Begin anew."""
        self.used, self._used_slots = 0, 0
        self._jobs.clear()

    def _signs_of(self, blocks: int) -> Tensor:
        found = self._block_signs.get(blocks)
        if found is None:
            found = self._block_signs[blocks] = torch.from_numpy(_block_signs(blocks)).to(self._device)
        return found

    # -- by programs ---------------------------------------------------------------------------------------

    def _launch(self, flat: Tensor, row: int) -> None:
        count = flat.numel()
        programs = -(-count // (_PROGRAM_ROWS * COLUMNS))
        if self._used_slots + programs > len(self._slots):
            self._merge()
            if programs > len(self._slots):
                self._slots = self._slots.new_empty(max(_SLOTS, programs), _SLOT_WIDTH)
        first = self._used_slots
        self._used_slots += programs
        self._jobs += (first, programs, count, row)
        blocks = self._signs_of(-(-count // BLOCK))
        slots = self._slots.data_ptr() + first * _SLOT_WIDTH * 8
        tables = self._signs.data_ptr(), blocks.data_ptr(), self._odd.data_ptr()
        constants = kernel_types()[flat.dtype][0], flat.element_size(), _PROGRAM_ROWS, ROWS, GROUPS, WIDTH
        self._run("read_rows", programs, (flat.data_ptr(), *tables, slots, count), constants)

    def _merge(self) -> None:
        if self._jobs:
            at = torch.tensor(self._jobs).to(self._device, non_blocking=True)
            given = (at.data_ptr(), self._slots.data_ptr(), self._numbers.data_ptr(), self._hashes.data_ptr())
            self._run("merge_slots", len(self._jobs) // 4, given, (_MERGED,))
        self._jobs, self._used_slots = [], 0

    def _run(self, name: str, programs: int, given: tuple[int, ...], constants: tuple[Any, ...]) -> None:
        grid = programs, 1, 1
        compiled = self._compiled.get((name, constants))
        if compiled is not None:
            compiled[grid](*given, *constants)
            return
        programs_of = importlib.import_module("hookline.debug.compare.triton_fingerprint")
        self._compiled[name, constants] = getattr(programs_of, name)[grid](*given, *constants)  # None: interpreted

    # -- by torch's operators ------------------------------------------------------------------------------

    def _by_operators(self, flat: Tensor, row: int) -> None:
        flat = flat.reshape(-1)
        numbers = _as_real(flat)
        finite = torch.nan_to_num(numbers, 0.0, 0.0, 0.0)
        found = [
            finite.sum(dtype=torch.float64) / numbers.numel(),
            torch.linalg.vector_norm(finite, dtype=torch.float64),
            torch.maximum(finite.amax(), -finite.amin()).double(),
            numbers.isnan().sum(dtype=torch.float64),
            numbers.isinf().sum(dtype=torch.float64),
        ]
        self._numbers[row, :5] = torch.stack(found)
        self._numbers[row, 5:] = self._sketch(finite)
        memory = flat.view(torch.uint8)
        words = torch.nn.functional.pad(memory, (0, -memory.numel() % (8 * COLUMNS))).view(torch.int64)
        self._hashes[row] = (words.view(-1, COLUMNS).sum(0) * self._odd).sum()

    def _sketch(self, numbers: Tensor) -> Tensor:
        count = numbers.numel()
        blocks = -(-count // BLOCK)
        rows = min(ROWS, -(-count // COLUMNS))
        padded = torch.nn.functional.pad(numbers, (0, blocks * rows * COLUMNS - count))
        columns = (padded.view(blocks, rows, COLUMNS) * self._signs[:rows]).sum(1, dtype=torch.float64)
        groups = torch.nn.functional.pad(columns, (0, -COLUMNS % WIDTH)).view(blocks, -1, WIDTH).sum(2)
        return (groups * self._signs_of(blocks)).sum(0)
