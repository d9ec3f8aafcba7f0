"""Add the statistics of many tensors on a GPU to their rows, in two launches.

The engine calls it. The programs in `triton_programs` read each tensor once, and add what they found to rows. Nothing
waits for the device and nothing comes back from it; one small table goes up through pinned memory, and for a single
tensor not even that, so a single one may be taken while a CUDA graph is recorded. Training takes the same memory at
each step: where all tensors lie as they lay once, the table is on the device already, and nothing is worked out.

The number of chunks of a tensor depends on its size alone: its numbers are the same to the last bit whichever tensors
it is taken together with, and in every run.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from hookline.observe.watch.pending import streams_of
from hookline.observe.watch.reduce import flat_view
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.observe.watch.place import StatRow
    from hookline.observe.watch.row import Layout

__all__ = [
    "READ",
    "ExponentInput",
    "ExponentKernel",
    "FoundByRow",
    "Kernel",
    "KernelInput",
    "KernelTables",
    "Tuning",
    "is_available",
    "kernel_input",
    "kernel_types",
    "on_device",
    "program_named",
    "readable",
]

JOBS: Final = 256
"""How many tensors fit one launch: a program finds its own by looking at the table in one go, two entries a thread."""
FIELDS: Final = 6
"""Of a job: first program, number of programs, address, size, tiles per program, address of the scale or 0."""
ALIGNMENT: Final = 16
"""The bytes that a thread reads at a time."""
_TABLES: Final = 64
"""How many tables are remembered: a step of GPT-2 with 300 modules has about 20."""
_OVERS: Final = 4
"""How many thresholds one launch counts; each four more take one more launch that reads the tensors again."""
_OVER_AT: Final = 8
"""The column of the first threshold."""
_FOLDED: Final = 32768
_FOLDED_AT_A_TIME: Final = 8192
_FOLDING_WARPS: Final = 16
"""Rows that one program adds up, at a time, and by how many warps; more rows are divided among several."""
_TILE: Final = 4096
"""Numbers that a program takes at a time: 16 a thread."""
_COUNTING_WARPS: Final = 8
"""Per program. 100 million numbers in bfloat16 on an H200 take 0.375 ms, by four warps 0.389, by 16 0.564."""
_LEAST_TILES: Final = 4
_MOST_PROGRAMS: Final = 2048
"""At least so many tiles a program, at most so many programs a tensor: each ends with up to 256 atomic additions."""
HALVES: Final = frozenset({torch.bfloat16, torch.float16})
READ: Final = frozenset(
    {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


def readable(tensor: Tensor) -> Tensor:
    """Return the numbers of any tensor as one contiguous tensor of a dtype that is read; copy only if needed."""
    dtype = tensor.dtype
    if dtype in READ and tensor.is_contiguous() and not tensor.is_neg():
        return tensor  # where it lies and how many there are is all that counts
    # A kernel knows the first address alone: `sum` gives an expanded gradient, all of whose numbers are one in memory.
    flat = flat_view(tensor.detach()).contiguous()
    if dtype in READ:
        return flat
    if dtype is torch.bool:
        return flat.view(torch.uint8)
    if dtype.is_complex:
        return flat.abs()
    return flat.float() if dtype.is_floating_point else flat.double()


@dataclass(frozen=True, slots=True)
class Tuning:
    """The division of work, by device; none of it changes a number by more than rounding."""

    warps: int = 4
    """Per program."""
    threads: int = 128
    """Per program: 32 per warp. Each reads 16 bytes at a time."""
    least_tiles: int = 4
    """A tile is what a program reads at a time (8 KiB for four warps). Fewer, and starting programs takes the time."""
    most_programs: int = 2048
    """For one tensor. More, and merging their slots takes long."""
    merged: int = 256
    """How many slots a merging program takes at a time."""

    def width(self, element_size: int) -> int:
        """Return how many numbers a program reads by one instruction."""
        return max(self.threads * ALIGNMENT // element_size, 32)

    def division(self, size: int, element_size: int) -> tuple[int, int]:
        """Return how many programs read a tensor of ``size`` numbers, and how many tiles each."""
        num_tiles = -(-size // (4 * self.width(element_size)))
        tiles = max(self.least_tiles, -(-num_tiles // self.most_programs))
        return -(-num_tiles // tiles), tiles


_Job: TypeAlias = tuple[int, int, int, torch.dtype]
"""One tensor to read: its address and size, the address of its scale or 0, its type."""
Use: TypeAlias = tuple[int, int, int, torch.dtype, int]
"""The same with the address of the row that its numbers go to."""
Group: TypeAlias = tuple[torch.dtype, bool]
"""Tensors of one type, aligned or not, are read by the same launch."""


class KernelTable(NamedTuple):
    """Which tensors are read, and which rows their numbers go to."""

    uploaded: Tensor
    """On the device: jobs, then uses."""
    parts: list[tuple[Group, int, int, int, int]]
    """For each launch: its group, first job, number of jobs, first slot, number of programs."""
    size: int
    """How many numbers the jobs take; the uses come after them."""
    uses: int
    slots: int


class KernelTables:
    """The tables of one kernel; ``upload`` puts numbers on its device."""

    def __init__(self, tuning: Tuning, upload: Callable[[list[int]], Tensor]) -> None:
        self.division = functools.lru_cache(maxsize=4096)(tuning.division)
        self._upload = upload
        self._known: dict[tuple[Any, ...], KernelTable] = {}
        """By all that they were made for; the latest comes last."""

    def of(self, uses: Sequence[Use], stream: int) -> KernelTable:
        """Return the table of these tensors, for launches on one stream."""
        key = stream, *uses
        table = self._known.pop(key, None) or self.new(uses)
        self._known[key] = table
        if len(self._known) > _TABLES:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread was faster
                del self._known[next(iter(self._known))]
        return table

    def new(self, all_uses: Sequence[Use]) -> KernelTable:
        """Work out who reads what, and put it on the device."""
        groups: dict[Group, dict[_Job, list[int]]] = {}
        for address, size, at, dtype, row in all_uses:
            jobs = groups.setdefault((dtype, address % ALIGNMENT == 0), {})
            # Several places often see the same tensor: it is read once.
            jobs.setdefault((address, size, at, dtype), []).append(row)
        return self.of_groups(groups)

    def of_groups(self, groups: dict[Group, dict[_Job, list[int]]]) -> KernelTable:
        """Return a new table of tensors by group, each with the addresses of its rows."""
        table: list[int] = []
        uses: list[int] = []
        parts: list[tuple[Group, int, int, int, int]] = []
        slot = number = 0
        for group, jobs in groups.items():
            size_of_one = group[0].itemsize
            for some in in_parts(list(jobs.items()), JOBS):
                begin, first = number, slot
                for (address, size, scale, _), rows in some:
                    programs, tiles = self.division(size, size_of_one)
                    table += (slot, programs, address, size, tiles, scale)
                    for row in rows:
                        uses += (row, number)
                    slot += programs
                    number += 1
                parts.append((group, begin, len(some), first, slot - first))
        return KernelTable(self._upload(table + uses), parts, len(table), len(uses) // 2, slot)


def in_parts(whole: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield slices of at most ``size`` items."""
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


class KernelInput(NamedTuple):
    """A tensor, and the row its statistics go to."""

    flat: Tensor
    """As `readable` gives it: contiguous, of a dtype that is read."""
    row: StatRow
    scale: Any = None
    """Divide the numbers by this: a tensor of one number, unread, or a number."""


kernel_input: Final[Callable[[tuple[Any, ...]], KernelInput]] = functools.partial(tuple.__new__, KernelInput)
"""Return a tuple as a `KernelInput`, without a call of Python's."""


class FoundByRow(NamedTuple):
    """Statistics that a compiled graph has found in a tensor by row, and the row they go to."""

    found: list[Tensor]
    """As `find_in` gives it."""
    each: int
    """The length of a row."""
    row: StatRow
    scale: Any = None


_Launch: TypeAlias = tuple[str, Any, tuple[int, int, int], tuple[Any, ...]]
"""The name of a program, what it is compiled for, its grid and arguments."""


class Kernel:
    """Adds the statistics of tensors on one device to rows of one layout."""

    def __init__(self, layout: Layout, device: torch.device, tuning: Tuning | None = None) -> None:
        self._layout = layout
        self._device = device
        self._tuning = tuning or Tuning()
        self._num_added = len(layout.added)
        self._stream = streams_of(device).now
        self._tables = KernelTables(self._tuning, lambda numbers: self._upload(numbers))
        self._ready: dict[Any, Any] = {}
        """Compiled programs by all that they were compiled for: launching one takes a third of finding it."""

    def take(self, items: Sequence[KernelInput]) -> None:
        """Add the statistics of each tensor to its row, on the current stream."""
        with on_device(self._device):
            for batch in _rounds(items):
                if len(batch) == 1:
                    self._take_one(batch[0])
                elif _torch.capturing():  # the table would have to be the same in each replay
                    for item in batch:
                        self._take_one(item)
                else:
                    self._take_many(batch)

    def prepare(self, items: Sequence[KernelInput]) -> Callable[[], None]:
        """Return a call that adds the statistics of these tensors, as they are then, to their rows, each another.

        The table lies on the device from now on, and programs are found once: the host has two launches to make. The
        calls have to follow each other on one stream, as they share memory.
        """
        with on_device(self._device):
            launches, held = self._launches(items)
        found: list[tuple[Any, tuple[Any, ...]]] = []

        def launch() -> None:
            with on_device(self._device):
                for run, arguments in found:
                    run(*arguments)
                if not found:
                    self._run(launches)
                    ready: list[Any] = [self._ready.get(each[:2]) for each in launches]
                    if None not in ready and held:  # the interpreter, which tests use, compiles nothing
                        pairs = zip(ready, launches, strict=True)
                        found.extend((one[0][each[2]], (*each[3], *one[1])) for one, each in pairs)

        return launch

    def take_rows(self, items: Sequence[FoundByRow]) -> None:
        """Add what `find_in` has found by row, at once: a graph soon uses its memory again."""
        with on_device(self._device):
            for batch in _rounds(items):
                for some in in_parts(batch, 1 if _torch.capturing() else JOBS):
                    if len(some) == 1:
                        self._fold_one(some[0])
                    else:
                        self._fold_many(some)

    def _fold_one(self, item: FoundByRow) -> None:
        held, addresses, count = self._addresses(item.found)
        divisor = self._scale(item.scale)
        at, row = 0 if divisor is None else divisor.data_ptr(), item.row.address
        programs = max(-(-count // _FOLDED), 1)
        slots = self._slots(programs)
        arguments = (0, 0, *addresses, count, slots.data_ptr(), programs, self._num_added)
        self._launch("fold_parts", True, (programs, 3, 1), arguments, warps=_FOLDING_WARPS)
        merged = (0, 0, row, count * item.each, programs, at, slots.data_ptr(), programs)
        self._launch(*self._merge(1, merged, single=True))
        del held

    def _fold_many(self, items: Sequence[FoundByRow]) -> None:
        """Take several in one launch; one table says what each program does, what is merged, and into which row."""
        divisors: dict[int, Tensor] = {}
        folds: list[int] = []
        jobs: list[int] = []
        uses: list[int] = []
        held, slot = [], 0
        for number, (found, each, row, scale) in enumerate(items):
            if scale is not None and id(scale) not in divisors:
                divisors[id(scale)] = self._as_divisor(scale)
            kept, addresses, count = self._addresses(found)
            programs = max(-(-count // _FOLDED), 1)
            folds += (slot, *addresses, count)
            jobs += (slot, programs, 0, count * each, 0, 0 if scale is None else divisors[id(scale)].data_ptr())
            uses += (row.address, number)
            held.append(kept)
            slot += programs
        slots = self._slots(slot)
        at = self._upload(folds + jobs + uses)
        table = at.data_ptr()
        arguments = (table, len(items), 0, 0, 0, 0, 0, 0, slots.data_ptr(), slot, self._num_added)
        self._launch("fold_parts", False, (slot, 3, 1), arguments, warps=_FOLDING_WARPS)
        table += len(folds) * 8
        merged = (table, table + len(jobs) * 8, 0, 0, 0, 0, slots.data_ptr(), slot)
        self._launch(*self._merge(len(items), merged, single=False))

    def _addresses(self, found: Sequence[Tensor]) -> tuple[list[Tensor], list[int], int]:
        """Return what holds the parts; the addresses of sums, squares, lows, highs, zeros, 0 for none; their number."""
        layout = self._layout
        held = [part if part.is_contiguous() else part.contiguous() for part in found]
        parts = iter(held)
        wanted = (layout.moments, layout.moments, layout.extremes, layout.extremes, layout.zeros)
        return held, [next(parts).data_ptr() if is_there else 0 for is_there in wanted], found[0].numel()

    def _take_one(self, item: KernelInput) -> None:
        flat, row, scale = item
        divisor = self._scale(scale)
        address, size, at = flat.data_ptr(), flat.numel(), 0 if divisor is None else divisor.data_ptr()
        programs, tiles = self._tables.division(size, flat.element_size())
        slots = self._slots(programs)
        arguments = (0, 0, address, size, tiles, at, slots.data_ptr(), programs, 0)
        reduced = self._reduce((flat.dtype, address % ALIGNMENT == 0), programs, arguments, single=True)
        merged = (0, 0, row.address, size, programs, at, slots.data_ptr(), programs)
        self._run([*reduced, self._merge(1, merged, single=True)])

    def _take_many(self, items: Sequence[KernelInput]) -> None:
        launches, held = self._launches(items)
        self._run(launches)
        del held

    def _launches(self, items: Sequence[KernelInput]) -> tuple[list[_Launch], list[Tensor]]:
        """Return the launches for several tensors, and the memory that they use."""
        divisors: dict[int, Tensor] = {}
        uses: list[Use] = []
        for flat, row, scale in items:
            at = 0
            if scale is not None:
                if id(scale) not in divisors:
                    divisors[id(scale)] = self._as_divisor(scale)
                at = divisors[id(scale)].data_ptr()
            uses.append((flat.data_ptr(), flat.numel(), at, flat.dtype, row.address))
        table = self._tables.of(uses, self._stream())
        return self._launches_of(table, [*divisors.values()])

    def _launches_of(self, table: KernelTable, held: list[Tensor]) -> tuple[list[_Launch], list[Tensor]]:
        uploaded, parts, size, uses, num_slots = table
        slots = self._slots(num_slots)
        at, to = uploaded.data_ptr(), slots.data_ptr()
        launches: list[_Launch] = []
        for group, begin, count, first, programs in parts:
            arguments = (at + begin * FIELDS * 8, count, 0, 0, 0, 0, to, num_slots, first)
            launches += self._reduce(group, programs, arguments, single=False)
        merged = (at, at + size * 8, 0, 0, 0, 0, to, num_slots)
        return [*launches, self._merge(uses, merged, single=False)], [*held, slots, uploaded]

    # -- launching ---------------------------------------------------------------------------------------

    def _reduce(self, group: Group, programs: int, arguments: tuple[int, ...], *, single: bool) -> list[_Launch]:
        if not programs:
            return []  # empty tensors
        layout, first, launches = self._layout, True, []
        for thresholds in in_parts(layout.thresholds, _OVERS) if layout.thresholds else [()]:
            key = (group, single, first, len(thresholds))
            numbers = (*thresholds, 0.0, 0.0, 0.0, 0.0)[:_OVERS]
            over_at = _OVER_AT + (0 if first else layout.thresholds.index(thresholds[0]))
            given = (*arguments, self._num_added, over_at, *numbers)
            launches.append(("reduce_chunks", key, (programs, 1, 1), given))
            first = False
        return launches

    def _merge(self, uses: int, arguments: tuple[int, ...], *, single: bool) -> _Launch:
        return "merge_slots", single, (uses, self._layout.width, 1), (*arguments, self._num_added)

    def _run(self, launches: Iterable[_Launch]) -> None:
        for each in launches:
            self._launch(*each)

    def _launch(
        self, name: str, key: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int | None = None
    ) -> None:
        known = self._ready.get((name, key))
        if known is not None:
            compiled, constants = known
            compiled[grid](*arguments, *constants)
            return
        program, constants = self._program(name, key)
        # The interpreter, which tests use, compiles nothing.
        compiled = program[grid](*arguments, *constants, num_warps=warps or self._tuning.warps, enable_fp_fusion=True)
        if compiled is not None:
            self._ready[name, key] = compiled, constants

    def _program(self, name: str, key: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return a program, and the constants to compile it with."""
        program = program_named(name)
        if name == "merge_slots":
            return program, (key, self._tuning.merged)
        if name == "fold_parts":
            flags = (self._layout.moments, self._layout.extremes, self._layout.zeros)
            return program, (*flags, key, JOBS, _FOLDED_AT_A_TIME, _FOLDED)
        (dtype, aligned), single, first, overs = key
        element, wide = kernel_types()[dtype]
        layout = self._layout
        moments, extremes, zeros = layout.moments and first, layout.extremes and first, layout.zeros and first
        width = self._tuning.width(dtype.itemsize)
        pairs = _pairs(self._device) if aligned and dtype in HALVES else 0
        constants = (element, wide, aligned, pairs, single, moments, extremes, zeros, overs, first, JOBS, width)
        return program, constants

    # -- memory ------------------------------------------------------------------------------------------

    def _slots(self, programs: int) -> Tensor:
        # From torch's allocator: it knows which stream uses what, in threads and CUDA graphs, too (3 µs).
        return torch.empty(self._layout.width * max(programs, 1), dtype=torch.float64, device=self._device)

    def _upload(self, numbers: list[int]) -> Tensor:
        """Copy numbers to the device without waiting; torch keeps the pinned memory until the copy is through."""
        pin = self._device.type == "cuda"
        pinned = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=pin)
        pinned.numpy()[:] = numbers  # 50 µs for 1,500; torch.tensor(numbers) takes 300
        return pinned.to(self._device, non_blocking=True)

    def _scale(self, scale: Any) -> Tensor | None:
        return None if scale is None else self._as_divisor(scale)

    def _as_divisor(self, scale: Any) -> Tensor:
        if isinstance(scale, Tensor):
            return scale.detach().to(self._device, torch.float32, non_blocking=True)
        return torch.full((), float(scale), dtype=torch.float32, device=self._device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which programs are launched on ``device``."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def is_available(device: torch.device) -> bool:
    """Return whether there is a kernel for the device: an NVIDIA or AMD GPU, and Triton, which torch installs."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _pairs(device: torch.device) -> int:
    """Return how numbers of 16 bits are read: 1 two at a time, 2 also compared so, by instructions since Hopper.

    Comparing them in pairs leaves 6.6 instructions for each, of 9.3.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None
    return 2 if nvidia and torch.cuda.get_device_capability(device) >= (9, 0) else 1


@functools.cache
def kernel_types() -> dict[torch.dtype, tuple[Any, Any]]:
    """Return for each dtype its name in Triton, and the dtype it is added up in."""
    tl: Any = importlib.import_module("triton.language")
    narrow = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16)
    return {dtype: (getattr(tl, str(dtype).removeprefix("torch.")), tl.float32 if dtype in narrow else tl.float64)
            for dtype in READ}  # fmt: skip


@functools.cache
def program_named(name: str) -> Any:
    """Return a program in Triton."""
    return getattr(importlib.import_module("hookline.observe.watch.triton_programs"), name)


_Either = TypeVar("_Either", KernelInput, FoundByRow)


def _rounds(items: Sequence[_Either]) -> Iterable[Sequence[_Either]]:
    """Return batches in which no row comes twice: two programs must not add to the same one at a time."""
    if len({id(item.row) for item in items}) == len(items):
        return [items] if items else []
    seen: dict[int, int] = {}
    rounds: list[list[_Either]] = []
    for item in items:
        number = seen[id(item.row)] = seen.get(id(item.row), -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    return rounds


# -- histograms ----------------------------------------------------------------------------------------------


class ExponentInput(NamedTuple):
    """A tensor, and the bins that its numbers are counted in."""

    flat: Tensor
    """As `readable` gives it."""
    bins: Tensor
    scale: Any = None
    """Divide the numbers by this."""


class ExponentKernel(Kernel):
    """Adds to bins how many numbers have which exponent."""

    def count(self, items: Sequence[ExponentInput]) -> None:
        """Count each tensor in its bins, on the current stream; all are of one type."""
        with on_device(self._device):
            # A table would have to be the same in each replay of a CUDA graph.
            for some in in_parts(items, 1 if _torch.capturing() else JOBS):
                if len(some) == 1:
                    self._count_one(some[0])
                else:
                    self._count_many(some)

    def _count_one(self, item: ExponentInput) -> None:
        flat, bins, scale = item
        divisor = self._scale(scale)
        programs, share = _division(flat.numel())
        at = 0 if divisor is None else divisor.data_ptr()
        arguments = (0, 0, bins.data_ptr(), flat.data_ptr(), flat.numel(), share, at)
        self._launch("count_exponents", (flat.dtype, True), (programs, 1, 1), arguments, _COUNTING_WARPS)

    def _count_many(self, items: Sequence[ExponentInput]) -> None:
        table: list[int] = []
        divisors: dict[int, Tensor] = {}
        first = 0
        for flat, bins, scale in items:
            if scale is not None and id(scale) not in divisors:
                divisors[id(scale)] = self._as_divisor(scale)
            programs, share = _division(flat.numel())
            at = 0 if scale is None else divisors[id(scale)].data_ptr()
            table += (first, bins.data_ptr(), flat.data_ptr(), flat.numel(), share, at)
            first += programs
        uploaded = self._upload(table)
        arguments = (uploaded.data_ptr(), len(items), 0, 0, 0, 0, 0)
        self._launch("count_exponents", (items[0].flat.dtype, False), (first, 1, 1), arguments, _COUNTING_WARPS)
        del divisors, uploaded

    def _program(self, name: str, key: Any) -> tuple[Any, tuple[Any, ...]]:
        dtype, single = key
        return program_named(name), (kernel_types()[dtype][0], single, JOBS, _TILE)


def _division(size: int) -> tuple[int, int]:
    """Return how many programs count a tensor, and how many numbers each."""
    share = _TILE * max(_LEAST_TILES, -(-size // (_TILE * _MOST_PROGRAMS)))
    return -(-size // share), share
