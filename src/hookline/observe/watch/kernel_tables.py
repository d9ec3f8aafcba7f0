"""Divide the work on many tensors among the programs of a kernel, and remember how.

`Kernel` asks for the table of a set of tensors. Training takes the same memory at each step: where all tensors lie as
they lay once, the table is on the device already, and nothing is worked out or uploaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "FIELDS", "JOBS", "Group", "KernelTable", "KernelTables", "Tuning", "Use", "in_parts"]

JOBS: Final = 256
"""How many tensors fit one launch: a program finds its own by looking at the table in one go, two entries a thread."""
FIELDS: Final = 6
"""Of a job: first program, number of programs, address, size, tiles per program, address of the scale or 0."""
ALIGNMENT: Final = 16
"""The bytes that a thread reads at a time."""
_TABLES: Final = 64
"""How many tables are remembered: a step of GPT-2 with 300 modules has about 20."""


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
