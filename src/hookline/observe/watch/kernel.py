"""Add the statistics of many tensors on a GPU to their rows in a few launches, and count their exponents.

One launch reads up to 256 tensors of one type and alignment, and one more adds what was found to rows (`StatRow` of
engine.py).

`StatsEngine` makes one `Kernel` for each device and calls `take`, `count`, `add_found` and `prepare`; for compiled code
`GraphHandover` (graph.py) calls `prepare`, `divisor`, `row_tables` and `add_rows`. The fingerprints of
``debug.compare`` use the helpers (`is_available`, `on_device`, `kernel_types`). Nothing waits for the device and
nothing comes back from it; one small table goes up through pinned memory.

The programs are in triton_programs.py. A job is one tensor to read; a tile is 4 × `width_of` numbers; a chunk is the
tiles that one program reads; a slot is what one program has found. The number of chunks depends on the size of a tensor
alone. So its numbers are the same to the last bit whichever tensors it is taken together with, and in every run.

Training takes the same memory at each step. Where all tensors lie at the addresses of an earlier step, the table is on
the device already and the launches are known: the host only makes them. Not for a CUDA graph that is being recorded
(`StatsEngine.kernel` gives none then): the table would have to be the same in each replay.

Programs read tables and arguments by position. The order of the fields of a job, of the columns of a row (row.py) and
of the arguments stands there a second time: change both files together. In the shares of `row_tables` the three fields
behind the address are the first three of `Share` (sites/compiled/op_schemas.py), which `GraphHandover` hands on.
`add_rows` and `add_found` take five parts in the order of `_by_row` of graph.py. A new program is a function there, its
warps in `_WARPS`, a `_launch` here with the constants it is compiled with, and a case in
tests/observe/watch/test_kernel.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from hookline.observe.watch.pending import Streams
from hookline.observe.watch.row import Layout, flat_view

if TYPE_CHECKING:
    from hookline.observe.watch.engine import StatRow

JOBS: Final = 256
"""How many tensors fit one launch: a program finds its own by looking at the table in one go, two entries a thread."""
FIELDS: Final = 6
"""Of a job: first program, number of programs, address, size, tiles per program, address of the scale or 0.
`triton_programs.FIELDS` has to be the same; the tables of ``debug.compare.fingerprint`` have as many fields."""
_ALIGNMENT: Final = 16
"""The bytes that a thread reads at a time."""
_CALLS: Final = 128
"""How many sets of tensors are remembered: a step of GPT-2 with 300 modules has about 20, and one more for each place
whose tensors cannot wait."""
_WARPS: Final = {"reduce_chunks": 4, "merge_slots": 4, "fold_rows": 16, "count_exponents": 8}
"""Per program. An H200 counts the exponents of 100 million numbers in bfloat16 in 0.375 ms, by four warps in 0.389, by
16 in 0.564."""
_THREADS: Final = 128
"""Per program that reduces: 32 per warp. Each reads 16 bytes at a time."""
_LEAST_TILES: Final = 4
"""Tiles of a program, at least; a tile has 8 KiB for four warps. Fewer, and starting programs takes the time."""
_MOST_PROGRAMS: Final = 2048
"""For one tensor. More, and merging their slots takes long."""
_MERGED: Final = 256
"""How many slots a merging program takes at a time."""
_ROWS_AT_A_TIME: Final = 2048
"""Rows of compiled code that a program takes at a time."""
_COUNTED: Final = 4096
"""Numbers whose exponents are counted at a time; a program ends with up to 256 atomic additions."""
# By dtype, the part of the PTX instructions (min.NaN.bf16x2) that compare two numbers at a time.
_PAIRS: Final = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
_NARROW: Final = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16)
READ: Final = frozenset({*_NARROW, torch.float64, torch.int32, torch.int64})
"""The types that programs read; narrow ones are added up in float32."""


def is_read_in_place(tensor: Tensor) -> bool:
    """Return whether programs can read the tensor where it lies: by its address, size and type alone."""
    return tensor.dtype in READ and tensor.is_contiguous() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """Return the numbers of any tensor as one contiguous tensor of a dtype that is read; copy only if needed."""
    if is_read_in_place(tensor):
        return tensor
    # A kernel knows the first address alone: `sum` gives an expanded gradient, all of whose numbers are one in memory.
    flat, dtype = flat_view(tensor.detach()).contiguous(), tensor.dtype
    if dtype in READ:
        return flat
    if dtype is torch.bool:
        return flat.view(torch.uint8)
    if dtype.is_complex:
        return flat.abs()
    return flat.float() if dtype.is_floating_point else flat.double()


def width_of(element_size: int) -> int:
    """Return how many numbers a program reads by one instruction."""
    return max(_THREADS * _ALIGNMENT // element_size, 32)


@functools.lru_cache(maxsize=4096)
def division(size: int, element_size: int) -> tuple[int, int]:
    """Return how many programs read a tensor of ``size`` numbers, and how many tiles each."""
    num_tiles = -(-size // (4 * width_of(element_size)))
    tiles = max(_LEAST_TILES, -(-num_tiles // _MOST_PROGRAMS))
    return -(-num_tiles // tiles), tiles


KernelInput: TypeAlias = "tuple[Tensor, StatRow, Any]"
"""A tensor as `readable` gives it, the row its statistics go to, and what its numbers are divided by: a tensor of one
number, unread, a number, or None."""
ExponentInput: TypeAlias = tuple[Tensor, Tensor, Any]
"""A tensor as `readable` gives it, the bins that its numbers are counted in, and what they are divided by."""
_Use: TypeAlias = tuple[int, int, int, torch.dtype, int]
"""One tensor to read: its address and size, the address of its scale or 0, its type; and the address of its row."""
_Launch: TypeAlias = tuple[str, tuple[Any, ...], tuple[int, int, int], tuple[int, ...]]
"""The name of a program, the constants it is compiled with, its grid and arguments."""
_Item = TypeVar("_Item", bound=tuple[Any, ...])


class Kernel:
    """Adds the statistics of tensors on one device to rows of one layout. Threads may share it."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._width = layout.width
        self._num_added = len(layout.added)
        # The program counts a power of two of thresholds; those that are too many are infinite.
        self._over = 1 << (len(layout.thresholds) - 1).bit_length() if layout.thresholds else 0
        spare = [torch.inf] * (self._over - len(layout.thresholds))
        self._thresholds = torch.tensor([*layout.thresholds, *spare], dtype=torch.float64, device=device)
        self._device = device
        self._stream = Streams(device).now
        self._slots: dict[int, Tensor] = {}
        """By stream, the memory for partial results: launches on one stream follow each other."""
        self._calls: dict[tuple[Any, ...], Callable[[], None]] = {}
        """What was worked out for several tensors, by all that it depends on; the latest comes last."""
        self._compiled: dict[tuple[str, tuple[Any, ...]], Any] = {}
        """Programs by their names and constants: launching one takes a third of finding it."""
        self._lock = threading.RLock()
        """Held while launches that share slots are made."""

    def take(self, items: Sequence[KernelInput]) -> None:
        """Add the statistics of each tensor to its row, on the current stream."""
        with on_device(self._device):
            for batch in rounds_of(items, by=1):
                uses, divisors = self._uses(batch)
                key = self._stream(), *uses
                with self._lock:
                    call = self._calls.pop(key, None) or self._work_out(uses)
                    self._calls[key] = call
                    if len(self._calls) > _CALLS:
                        del self._calls[next(iter(self._calls))]
                    call()
                del divisors  # they live until they are read

    def prepare(self, items: Sequence[KernelInput]) -> Callable[[], None]:
        """Return a call that adds the statistics of these tensors to their rows, as they are then, where they are now.

        The table lies on the device from now on, and programs are found once: the host has two launches to make. Make
        the calls on the stream that is current now. A scale has to lie at the same address at each: it is not kept.
        """
        with self._lock, on_device(self._device):
            calls = [self._work_out(self._uses(batch)[0]) for batch in rounds_of(items, by=1)]

        def run() -> None:
            with self._lock, on_device(self._device):
                for call in calls:
                    call()

        return run

    def row_tables(self, shares: Sequence[tuple[int, int, int, int]]) -> list[Tensor]:
        """Return tables for `add_rows`, which tell what belongs to which row.

        A share is the address of the row of a place, and which rows that compiled code has found belong to it: the
        first, how many, and how many numbers each stands for.
        """
        return [self._upload([number for share in some for number in share]) for some in rounds_of(shares, by=0)]

    def add_rows(self, table: Tensor, found: Sequence[Tensor], scale: Any) -> None:
        """Add what compiled code has found by row to as many places as ``table`` tells of; see ``fold_rows``."""
        divisors: dict[int, Tensor] = {}
        addresses = [part.data_ptr() for part in found]
        arguments = (table.data_ptr(), *addresses, self._address_of(scale, divisors), self._num_added)
        with on_device(self._device):
            self._launch("fold_rows", (_ROWS_AT_A_TIME,), (table.numel() // 4, 3, 1), arguments)

    def add_found(self, items: Sequence[tuple[StatRow, list[Tensor], int]], scale: Any) -> None:
        """Add what compiled code has found by row in several tensors, not yet joined in one buffer.

        An item is the row of a place, the five parts found, and how many numbers an entry stands for.
        """
        shares: list[tuple[int, int, int, int]] = []
        begin = 0
        for row, found, each in items:
            count = found[0].numel()
            shares.append((row.address, begin, count, each))
            begin += count
        joined = [torch.cat(parts) for parts in zip(*(found for _, found, _ in items), strict=True)]
        for table in self.row_tables(shares):
            self.add_rows(table, joined, scale)

    def count(self, items: Sequence[ExponentInput]) -> None:
        """Count each tensor in its bins, on the current stream; all are of one type. Not for a CUDA graph."""
        with on_device(self._device):
            for some in _in_parts(items, JOBS):
                jobs: list[int] = []
                divisors: dict[int, Tensor] = {}
                first = 0
                for flat, bins, scale in some:
                    size = flat.numel()
                    share = _COUNTED * max(_LEAST_TILES, -(-size // (_COUNTED * _MOST_PROGRAMS)))
                    at = self._address_of(scale, divisors)
                    jobs += (first, bins.data_ptr(), flat.data_ptr(), size, share, at)
                    first += -(-size // share)
                table = self._upload(jobs)
                constants = kernel_types()[some[0][0].dtype][0], JOBS, _COUNTED
                if first:
                    self._launch("count_exponents", constants, (first, 1, 1), (table.data_ptr(), len(some)))

    def _upload(self, numbers: list[int]) -> Tensor:
        """Copy numbers to the device without waiting; torch keeps the pinned memory until the copy is through."""
        pin = self._device.type == "cuda"
        pinned = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=pin)
        pinned.numpy()[:] = numbers  # 50 µs for 1,500; torch.tensor(numbers) takes 300
        return pinned.to(self._device, non_blocking=True)

    def divisor(self, scale: Any) -> Tensor:
        """Return a scale as programs read it: itself if it is on the device in float32."""
        if isinstance(scale, Tensor):
            return scale.detach().to(self._device, torch.float32, non_blocking=True)
        return torch.full((), float(scale), dtype=torch.float32, device=self._device)

    # -- working out launches ----------------------------------------------------------------------------

    def _uses(self, items: Sequence[KernelInput]) -> tuple[list[_Use], dict[int, Tensor]]:
        """Return what is read, and scales that have to live until then."""
        divisors: dict[int, Tensor] = {}
        uses: list[_Use] = []
        for flat, row, scale in items:
            uses.append((flat.data_ptr(), flat.numel(), self._address_of(scale, divisors), flat.dtype, row.address))
        return uses, divisors

    def _address_of(self, scale: Any, divisors: dict[int, Tensor]) -> int:
        """Return where programs find a scale, 0 for none; ``divisors`` keeps it."""
        if scale is None:
            return 0
        if id(scale) not in divisors:
            divisors[id(scale)] = self.divisor(scale)
        return divisors[id(scale)].data_ptr()

    def _work_out(self, uses: Sequence[_Use]) -> Callable[[], None]:
        """Put on the device which program reads what, and return the call that launches them; no row may come twice.

        The first part of the table has a job for each tensor, the second the address of each row and its job's number.
        """
        groups: dict[tuple[torch.dtype, bool], dict[tuple[int, int, int], list[int]]] = {}
        for address, size, scale, dtype, row in uses:
            jobs = groups.setdefault((dtype, address % _ALIGNMENT == 0), {})
            # Several places often see the same tensor: it is read once.
            jobs.setdefault((address, size, scale), []).append(row)
        table: list[int] = []
        rows: list[int] = []
        parts: list[tuple[tuple[torch.dtype, bool], int, int, int, int]] = []
        slot = number = 0
        for group, jobs in groups.items():
            for some in _in_parts(list(jobs.items()), JOBS):
                begin, first = number, slot
                for (address, size, scale), addresses in some:
                    programs, tiles = division(size, group[0].itemsize)
                    table += (slot, programs, address, size, tiles, scale)
                    for row in addresses:
                        rows += (row, number)
                    slot += programs
                    number += 1
                if slot > first:  # else they are empty
                    parts.append((group, begin, len(some), first, slot - first))
        uploaded, slots = self._upload(table + rows), self._slots_for(slot)
        at, to, limits = uploaded.data_ptr(), slots.data_ptr(), self._thresholds.data_ptr()
        launches: list[_Launch] = []
        for group, begin, count, first, programs in parts:
            arguments = (at + begin * FIELDS * 8, count, to, slot, first, self._num_added, limits)
            launches.append(("reduce_chunks", self._constants_of(*group), (programs, 1, 1), arguments))
        merged = (at, at + len(table) * 8, to, slot, self._num_added)
        launches.append(("merge_slots", (_MERGED,), (len(rows) // 2, self._width, 1), merged))
        return self._call_of(launches, (uploaded, slots))

    def _constants_of(self, dtype: torch.dtype, aligned: bool) -> tuple[Any, ...]:
        """Return the constants of ``reduce_chunks`` for tensors of a type, which are ``aligned`` to 16 bytes or not."""
        compared = _PAIRS.get(dtype) if aligned and not self._over and _compares_pairs(self._device) else None
        pairs = [f"{each}.NaN.{compared} $0, $1, $2;" if compared else "" for each in ("min", "max")]
        return *kernel_types()[dtype], aligned, *pairs, self._over, JOBS, width_of(dtype.itemsize)

    def _slots_for(self, programs: int) -> Tensor:
        stream, size = self._stream(), self._width * max(programs, 1)
        slots = self._slots.get(stream)
        if slots is None or slots.numel() < size:
            slots = self._slots[stream] = torch.empty(2 * size, dtype=torch.float64, device=self._device)
        return slots

    # -- launching ---------------------------------------------------------------------------------------

    def _call_of(self, launches: Sequence[_Launch], held: tuple[Tensor, ...]) -> Callable[[], None]:
        """Return the call that makes launches; ``held`` is the memory that they use, which lives as long as the call.

        Programs are looked up at the first call: that takes the host longer than the launches themselves.
        """
        bound: list[tuple[Any, tuple[Any, ...]]] = []

        def call(held: tuple[Tensor, ...] = held) -> None:
            for run, arguments in bound:
                run(*arguments)
            if not bound:
                for launch in launches:
                    self._launch(*launch)
                programs = [self._compiled[name, constants] for name, constants, _, _ in launches]
                if None not in programs:
                    bound[:] = [
                        (program[grid], (*arguments, *constants))
                        for program, (_, constants, grid, arguments) in zip(programs, launches, strict=True)
                    ]

        return call

    def _launch(
        self, name: str, constants: tuple[Any, ...], grid: tuple[int, int, int], arguments: tuple[int, ...]
    ) -> None:
        compiled = self._compiled.get((name, constants))
        if compiled is not None:
            compiled[grid](*arguments, *constants)
            return
        program = program_named(name)[grid]
        compiled = program(*arguments, *constants, num_warps=_WARPS[name], enable_fp_fusion=True)
        self._compiled[name, constants] = compiled  # None of the interpreter, which tests use


def _in_parts(whole: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield slices of at most ``size`` items."""
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


def rounds_of(items: Sequence[_Item], by: int) -> Sequence[Sequence[_Item]]:
    """Return batches in which no row, which is at place ``by`` of an item, comes twice.

    Two programs must not add to the same one at a time.
    """
    if len({item[by] for item in items}) == len(items):
        return [items] if items else []
    seen: dict[Any, int] = {}
    rounds: list[list[_Item]] = []
    for item in items:
        number = seen[item[by]] = seen.get(item[by], -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    return rounds


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which programs are launched on ``device``."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


@functools.cache
def is_available(device: torch.device) -> bool:
    """Return whether there is a kernel for the device: an NVIDIA or AMD GPU, and Triton, which torch installs."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@functools.cache
def _compares_pairs(device: torch.device) -> bool:
    """Return whether the device compares two numbers of 16 bits by one instruction, as NVIDIA's do since Hopper."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def kernel_types() -> dict[torch.dtype, tuple[Any, Any]]:
    """Return for each dtype its name in Triton, and the dtype it is added up in."""
    tl: Any = importlib.import_module("triton.language")
    return {dtype: (getattr(tl, str(dtype).removeprefix("torch.")), tl.float32 if dtype in _NARROW else tl.float64)
            for dtype in READ}  # fmt: skip


@functools.cache
def program_named(name: str) -> Any:
    """Return a program in Triton."""
    return getattr(importlib.import_module("hookline.observe.watch.triton_programs"), name)
