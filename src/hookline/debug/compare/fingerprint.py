"""Find the fingerprint of a tensor: on the CPU as plain numbers, on other devices as a row that is read later.

`TraceRecorder` calls this at every firing. Both ways define the same: numbers are taken in the order of their indices,
whatever the strides, eight at a time, which a GPU reads by one instruction. 251 such eights make a row. Each number has
a random sign, the bits of a hash of its eight; signed sums of every sixteenth eight of a row make a group. 251 is
prime, so that a difference in one row, one feature or one head of a tensor spreads over all groups. Signs come again
after 32 rows, a block, and there each block and group has one more. The hash adds up 8-byte words of all rows by
column, and multiplies these by odd numbers; additions wrap around, so that no order of them matters.

On one core, 262,144 float32: extremes 123 µs, sum and squares 154, sketch 291, hash 135.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel
from hookline.observe.watch.kernel import is_available, kernel_types, on_device
from hookline.observe.watch.pending import PendingTensors
from hookline.observe.watch.row import extremes

EIGHTS: Final = 251
COLUMNS: Final = 8 * EIGHTS
ROWS: Final = 32
"""Of a block. Their signs, 257 KB, stay in the cache of a core; those of 256 rows took twice as long to read."""
BLOCK: Final = COLUMNS * ROWS
GROUPS: Final = 16
_SUMMED: Final = 1 << 18
"""So many numbers are added up in float32."""
_TINY: Final = 1e-30
"""Sums of squares below this may have lost numbers that are too small to be squared in float32."""


def _mixed(numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return a hash of each number (Ellis's lowbias32); that of 0 is 0."""
    found = numbers ^ (numbers >> np.uint32(16))
    for factor in (0x21F0AAAD, 0xD35A2D97):
        found = found * np.uint32(factor)
        found = found ^ (found >> np.uint32(15))
    return found


def _numbers_to(end: int) -> NDArray[np.uint32]:
    return np.arange(end, dtype=np.uint32)


class _Tables:
    """What all fingerprints of a dtype have in common, so that any two can be compared."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        bits = _mixed(_numbers_to(ROWS * EIGHTS))[:, None] >> (31 - _numbers_to(8))
        self.signs: NDArray[np.floating] = (1.0 - 2.0 * (bits & 1)).astype(dtype).reshape(ROWS, COLUMNS)
        self.groups: NDArray[np.floating] = np.eye(GROUPS, dtype=dtype)[np.arange(COLUMNS) // 8 % GROUPS]
        """By column and group: whether the column is in the group."""


_tables = functools.cache(_Tables)


@functools.cache
def _odd() -> NDArray[np.uint64]:
    """Return what the words of the columns are multiplied by."""
    halves = _mixed(_numbers_to(2 * COLUMNS) + np.uint32(1)).astype(np.uint64).reshape(2, COLUMNS)
    odd: NDArray[np.uint64] = halves[0] << np.uint64(32) | halves[1] | np.uint64(1)
    return odd


@functools.lru_cache(64)
def _block_signs(blocks: int) -> NDArray[np.float64]:
    """Return a sign for each of so many blocks and each group."""
    bits = _mixed(_numbers_to(blocks))[:, None] >> _numbers_to(GROUPS) & 1
    return 1.0 - 2.0 * bits.astype(np.float64)


class FoundNumbers(NamedTuple):
    """The fingerprint of one tensor, as numbers."""

    numbers: tuple[float, float, float, int, int]
    """Mean, norm, absmax, NaN, Inf."""
    hash: int
    sketch: NDArray[np.float64]
    memory: tuple[int, int, torch.dtype]
    """Where its numbers stood, how many, and of what type."""


def fingerprint_on_cpu(tensor: Tensor, last: FoundNumbers | None = None) -> FoundNumbers:
    """Return the fingerprint of a dense tensor that is on the CPU.

    ``last`` is that of the tensor before: it holds for the same memory with the same hash, as often what a module
    returns is what its last child has returned. A version would not do, as ``.data`` is written to without a new one.
    """
    flat = _flat(tensor)
    memory, found_hash = (flat.data_ptr(), flat.numel(), flat.dtype), _hash(flat)
    if last is not None and last.memory == memory and last.hash == found_hash:
        return last
    numbers = _as_real(flat)
    count = numbers.numel()
    if not count:
        return FoundNumbers((0.0, 0.0, 0.0, 0, 0), 0, np.zeros(GROUPS), memory)
    low, high = extremes(numbers)
    nan = inf = 0
    if not (math.isfinite(high) and math.isfinite(low)):
        nan = int(numbers.isnan().sum())
        inf = int(numbers.isinf().sum())
        numbers = torch.nan_to_num(numbers, 0.0, 0.0, 0.0)
        low, high = extremes(numbers)
    total, squares = _moments(numbers, max(high, -low))
    found = (total / count, math.sqrt(squares), max(high, -low), nan, inf)
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers near 1e38 the sums are infinite, or NaN
        return FoundNumbers(found, found_hash, _sketch(numbers.numpy()), memory)


def _moments(numbers: Tensor, absmax: float) -> tuple[float, float]:
    """Return sum and sum of squares."""
    total = squares = 0.0
    for block in (numbers,) if numbers.numel() <= _SUMMED else torch.split(numbers, _SUMMED):
        total += block.sum().item()
        squares += torch.dot(block, block).item()
    if numbers.dtype is not torch.float64 and (squares < _TINY or not math.isfinite(squares + total)) and absmax:
        return _moments(numbers.double(), absmax)  # too small, or too large, for float32
    return total, squares


def _sketch(numbers: NDArray[np.floating]) -> NDArray[np.float64]:
    tables = _tables(numbers.dtype)
    blocks, beyond = divmod(numbers.size, BLOCK)
    columns = np.zeros((blocks + (beyond > 0), COLUMNS), numbers.dtype)
    whole, last = numbers[: blocks * BLOCK].reshape(blocks, ROWS, COLUMNS), numbers[blocks * BLOCK :]
    np.einsum("brc,rc->bc", whole, tables.signs, out=columns[:blocks])
    if beyond:
        rows, rest = divmod(beyond, COLUMNS)
        np.einsum("rc,rc->c", last[: rows * COLUMNS].reshape(rows, COLUMNS), tables.signs[:rows], out=columns[-1])
        columns[-1, :rest] += last[rows * COLUMNS :] * tables.signs[rows, :rest]
    return np.asarray(((columns @ tables.groups) * _block_signs(len(columns))).sum(0))


def _hash(flat: Tensor) -> int:
    words = _words(flat)
    odd = _odd()[: EIGHTS * flat.element_size()]
    rows, rest = divmod(words.size, odd.size)
    columns = np.add.reduce(words[: rows * odd.size].reshape(rows, odd.size), axis=0)
    columns[:rest] += words[rows * odd.size :]
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

_JOBS: Final = 256
"""How many tensors fit one launch."""
_PROGRAM_ROWS: Final = 16
"""A program takes so many rows, or a multiple."""
_MOST_PROGRAMS: Final = 2048
"""For one tensor. More, and merging their slots takes long."""
_SLOT_WIDTH: Final = 32
_MERGED: Final = 256
"""Slots that a merging program takes at a time."""
_COMPILED: Final = {"num_warps": 8, "maxnreg": 80}
"""As many registers as let three programs share a multiprocessor."""
_READ: Final = (torch.float32, torch.bfloat16, torch.float16)


class DeviceFingerprints:
    """The fingerprints of tensors on one device, in rows there until they are read.

    On a GPU programs find those of many tensors at once, which `PendingTensors` holds until then; elsewhere torch's
    operators do the same.
    """

    capacity = 4096
    """Fingerprints that a device holds before somebody has to read them."""

    def __init__(self, device: torch.device, *, by_programs: bool | None = None) -> None:
        self._device = device
        self._by_programs = is_available(device) if by_programs is None else by_programs
        self.pending = PendingTensors(self._find, device)
        """The tensors whose rows are still to be found, each with the number of its row."""
        self._numbers = torch.zeros(self.capacity, 5 + GROUPS, dtype=torch.float64, device=device)
        self._hashes = torch.zeros(self.capacity, dtype=torch.int64, device=device)
        self._compiled: dict[Any, Any] = {}
        self.found: set[int] = set()
        """The rows that have a fingerprint; all but those whose tensor was changed first, and those with `errors`."""
        self.errors: dict[int, Exception] = {}
        """Why rows have no fingerprint, where it is not that their tensor was changed."""
        self.used = 0
        """How many rows are taken; at `capacity` they have to be read before another is."""

    def add(self, place: Any, tensor: Tensor) -> int:
        """Find the fingerprint of a dense tensor, now or later; return the number of its row.

        Only operators that do not wait for the device, and none that autocast would run in another precision.
        """
        row = self.used
        self.used += 1
        if self._by_programs:
            self.pending.take(place, tensor, row)
        else:
            self._find([(place, tensor, row)])
        return row

    def end_pass(self) -> None:
        """Find those of all tensors that wait: a forward or backward pass is over."""
        self.pending.flush()

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return numbers (mean, norm, absmax, NaN, Inf, sketch) and hashes by row, which stay until `forget`.

        Those of rows that are not `found` mean nothing.
        """
        self.end_pass()
        return self._numbers[: self.used].cpu().numpy(), self._hashes[: self.used].cpu().numpy().view(np.uint64)

    def forget(self) -> None:
        """Begin anew."""
        self.pending.forget()
        self.found.clear()
        self.errors.clear()
        self.used = 0

    def _find(self, notes: Sequence[tuple[Any, Tensor, int]]) -> None:
        """Find the fingerprints of tensors as they are now, on the current stream; no error ends the run."""
        try:
            self._find_all(notes)
            self.found.update(row for _, _, row in notes)
        except Exception as error:  # at the end of a pass there is nobody but the run to catch it
            self.errors.update((row, error) for _, _, row in notes)

    def _find_all(self, notes: Sequence[tuple[Any, Tensor, int]]) -> None:
        by_type: dict[torch.dtype, list[tuple[Tensor, int, int]]] = {}
        with torch.no_grad(), on_device(self._device):
            for _, tensor, row in notes:
                # A view with a sign to come is one of complex numbers: every other one in memory, or a single one.
                is_plain = tensor.dtype in _READ and tensor.is_contiguous() and tensor.numel() > 1
                flat = tensor if is_plain else _flat(tensor)
                count = flat.numel()
                if not count:
                    self._numbers[row], self._hashes[row] = 0.0, 0
                elif self._by_programs and flat.dtype in _READ:
                    if count % 8 or flat.data_ptr() % 16:
                        flat = torch.nn.functional.pad(flat.flatten(), (0, -count % 8))
                    by_type.setdefault(flat.dtype, []).append((flat, count, row))
                else:
                    self._by_operators(flat, row)
            for dtype, tensors in by_type.items():
                for begin in range(0, len(tensors), _JOBS):
                    some = tensors[begin : begin + _JOBS]
                    try:
                        self._by_program(dtype, some)
                    except Exception as error:  # no compiler for C, for instance
                        self._give_up_programs(error)
                        for flat, count, row in some:
                            self._by_operators(flat.flatten()[:count], row)

    # -- by programs ---------------------------------------------------------------------------------------

    def _by_program(self, dtype: torch.dtype, tensors: Sequence[tuple[Tensor, int, int]]) -> None:
        jobs: dict[tuple[int, int], tuple[int, ...]] = {}
        again: list[tuple[int, ...]] = []
        slots = 0
        for flat, count, row in tensors:
            address = flat.data_ptr()
            known = jobs.get((address, count))
            if known is not None:  # several sites often see the same tensor: it is read once
                again.append((*known[:5], row))
                continue
            rows = -(-count // COLUMNS)
            each = _PROGRAM_ROWS * -(-rows // (_PROGRAM_ROWS * _MOST_PROGRAMS))
            programs = -(-rows // each)
            jobs[address, count] = slots, programs, address, count, each, row
            slots += programs
        table = torch.from_numpy(np.array([*jobs.values(), *again])).to(self._device, non_blocking=True)
        found = torch.empty(slots, _SLOT_WIDTH, dtype=torch.float64, device=self._device)
        at, to = table.data_ptr(), found.data_ptr()
        constants = kernel_types()[dtype][0], dtype.itemsize, _JOBS
        self._run("read_rows", slots, (at, len(jobs), to), constants)
        self._run("merge_slots", len(table), (at, to, self._numbers.data_ptr(), self._hashes.data_ptr()), (_MERGED,))

    def _give_up_programs(self, error: Exception) -> None:
        self._by_programs = False
        warnings.warn(
            f"Fingerprints on {self._device} are found by operations of torch, which takes several times as long: the "
            f"Triton programs do not work here ({type(error).__name__}: {error}).",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )

    def _run(self, name: str, programs: int, given: tuple[int, ...], constants: tuple[Any, ...]) -> None:
        grid = programs, 1, 1
        compiled = self._compiled.get((name, constants))
        if compiled is not None:
            compiled[grid](*given, *constants)
            return
        program = getattr(importlib.import_module("hookline.debug.compare.triton_fingerprint"), name)
        self._compiled[name, constants] = program[grid](*given, *constants, **_COMPILED)  # None: interpreted

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
        memory, odd = flat.view(torch.uint8), self._device_tables[2][: EIGHTS * flat.element_size()]
        words = torch.nn.functional.pad(memory, (0, -memory.numel() % (8 * odd.numel()))).view(torch.int64)
        self._hashes[row] = (words.view(-1, odd.numel()).sum(0) * odd).sum()

    def _sketch(self, numbers: Tensor) -> Tensor:
        signs, in_group, _ = self._device_tables
        count = numbers.numel()
        blocks = -(-count // BLOCK)
        rows = min(ROWS, -(-count // COLUMNS))
        padded = torch.nn.functional.pad(numbers, (0, blocks * rows * COLUMNS - count))
        columns = (padded.view(blocks, rows, COLUMNS) * signs[:rows]).sum(1, dtype=torch.float64)
        of_blocks = torch.from_numpy(_block_signs(blocks)).to(self._device, non_blocking=True)
        return ((columns @ in_group) * of_blocks).sum(0)

    @functools.cached_property
    def _device_tables(self) -> tuple[Tensor, ...]:
        """The signs, which columns are in which groups, and the odd numbers."""
        tables = _tables(np.dtype(np.float32))
        found = tables.signs, tables.groups.astype(np.float64), _odd().view(np.int64)
        return tuple(torch.from_numpy(each).to(self._device) for each in found)
