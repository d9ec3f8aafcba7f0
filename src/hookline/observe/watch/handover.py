"""Take what an operator of a compiled graph hands over, call after call, by launches that were worked out once.

`ModuleStatsHook.prepare` makes a `GraphHandover` for each ``sink_all`` in a graph. What the graph has found by row lies
in one buffer for each statistic: a table on the device tells which rows belong to which place, and one launch adds them
all. Of tensors that are handed over whole the table tells where they lie: as long as they lie where they lay at the
last call, nothing is worked out and nothing goes up; otherwise their addresses do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.observe.watch.kernel import Kernel, is_available, on_device, program_named, readable
from hookline.sites import _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hookline.observe.watch.engine import StatsEngine
    from hookline.observe.watch.place import StatRow, WatchedPlace
    from hookline.sites.compiled.op_schemas import Share

__all__ = ["AddressTable", "GraphHandover", "GraphKernel", "RowTable"]

_ROWS_AT_A_TIME: Final = 2048
_WARPS: Final = 16
_ALIGNMENT: Final = 16
_FIELDS: Final = 6
_ADDRESS: Final = 2
_SCALE: Final = 5
"""Of a job in a table of `Kernel`: how many numbers it has, and which are addresses."""


class GraphHandover:
    """Adds to places what one operator hands over in each call.

    Args:
        engine: Where the places are.
        shares: The places, and what belongs to each.
    """

    def __init__(self, engine: StatsEngine, shares: list[tuple[WatchedPlace, Share]]) -> None:
        self._engine = engine
        self.shares = shares
        """The places, and what belongs to each."""
        self._table: RowTable | AddressTable | None = None
        self._where: tuple[torch.device, int] | None = None
        self._has_table = True

    def take(self, found: list[Tensor], scale: Any) -> None:
        """Add the tensors of one call, divided by ``scale``."""
        if not self.shares:
            return
        device = found[0].device
        if self._has_table and is_available(device) and not _torch.capturing():
            try:
                self._find_table(device, found)
                if self._table is not None:
                    self._table.take(found, scale)
                    return
            except Exception:  # the engine says why, if its own kernel does not work either
                self._has_table = False
        self._engine.take_found([(place, share.of(found), share.each, scale) for place, share in self.shares])

    def _find_table(self, device: torch.device, found: list[Tensor]) -> None:
        """Make the table at the first call, and again on another stream, which does not wait for this one."""
        where = device, _torch.current_stream_of(device.index)()
        if where == self._where:
            return
        self._where = where
        rows = [(self._engine.row(place, device), share) for place, share in self.shares]
        kernel = GraphKernel(self._engine.layout, device)
        if self.shares[0][1].each != 1:
            self._table = RowTable(kernel, rows)
        elif len({id(row) for row, _ in rows}) == len(rows) and all(map(_is_read_in_place, found)):
            self._table = AddressTable(kernel, rows)
        else:
            self._has_table = False


def _is_read_in_place(tensor: Tensor) -> bool:
    flat = readable(tensor)
    return flat.dtype is tensor.dtype and flat.data_ptr() == tensor.data_ptr() and flat.numel() == tensor.numel()


class GraphKernel(Kernel):
    """A `Kernel` for tables that stay."""

    latest: list[int]
    """The numbers that were uploaded last."""

    def add_rows(self, table: Tensor, num_places: int, found: Sequence[Tensor], scale: Any) -> None:
        """Add what was found in rows to as many places as ``table`` tells of."""
        layout, parts = self._layout, iter(found)
        wanted = (layout.moments, layout.moments, layout.extremes, layout.extremes, layout.zeros)
        addresses = [next(parts).data_ptr() if is_there else 0 for is_there in wanted]
        divisor = self.divisor_of(scale)
        arguments = (table.data_ptr(), *addresses, 0 if divisor is None else divisor.data_ptr(), self._num_added)
        with on_device(self._device):
            self._launch("fold_table", None, (num_places, 3, 1), arguments, warps=_WARPS)

    def divisor_of(self, scale: Any) -> Tensor | None:
        """Return the scale as the programs read it."""
        return self._scale(scale)

    def work_out(self, jobs: Any) -> tuple[list[Any], list[Tensor]]:
        """Return the launches for jobs, and the memory they use; the table of jobs is the last of that."""
        with on_device(self._device):
            return self._launches_of(self._tables.of_groups(jobs), [])

    def run(self, launches: list[Any], ready: list[Any]) -> None:
        """Launch what `work_out` has returned; ``ready`` is empty before the first time, and has what was compiled."""
        with on_device(self._device):
            for launch, arguments in ready:
                launch(*arguments)
            if not ready:
                self._run(launches)
                known = [self._ready.get(each[:2]) for each in launches]
                if None not in known:  # the interpreter, which tests use, compiles nothing
                    pairs = zip(known, launches, strict=True)
                    ready.extend((one[0][each[2]], (*each[3], *one[1])) for one, each in pairs if one is not None)

    def upload(self, numbers: list[int]) -> Tensor:
        """Copy numbers to the device without waiting."""
        with on_device(self._device):
            return self._upload(numbers)

    def replace(self, table: Tensor, numbers: NDArray[np.int64]) -> None:
        """Write numbers over a table on the device, behind all launches that read it."""
        pinned = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
        pinned.numpy()[:] = numbers
        table.copy_(pinned, non_blocking=True)

    def _upload(self, numbers: list[int]) -> Tensor:
        self.latest = numbers
        return super()._upload(numbers)

    def _program(self, name: str, key: Any) -> tuple[Any, tuple[Any, ...]]:
        if name != "fold_table":
            return super()._program(name, key)
        layout = self._layout
        return program_named(name), (layout.moments, layout.extremes, layout.zeros, _ROWS_AT_A_TIME)


class RowTable:
    """Which rows of the joined buffers belong to which place, on the device for as long as the graph is used."""

    def __init__(self, kernel: GraphKernel, rows: list[tuple[StatRow, Share]]) -> None:
        self._kernel = kernel
        self._rounds = [(kernel.upload(numbers), len(numbers) // 4) for numbers in _rounds(rows)]

    def take(self, found: list[Tensor], scale: Any) -> None:
        """Add what one call has found."""
        for table, num_places in self._rounds:
            self._kernel.add_rows(table, num_places, found, scale)


def _rounds(rows: list[tuple[StatRow, Share]]) -> list[list[int]]:
    """Return tables in which no row of the state comes twice, as a module may: programs run at the same time."""
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for row, share in rows:
        number = seen[id(row)] = seen.get(id(row), -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number] += (row.added.data_ptr(), *share)
    return rounds


class AddressTable:
    """Where tensors that are handed over whole lie, with the launches that read them; each row comes once."""

    def __init__(self, kernel: GraphKernel, rows: list[tuple[StatRow, Share]]) -> None:
        self._kernel = kernel
        self._rows: dict[int, list[int]] = {}
        """The addresses of the rows that each tensor is for, by its number."""
        for row, share in rows:
            self._rows.setdefault(share.first, []).append(row.added.data_ptr())
        self._at: list[int] = []
        self._jobs: list[list[int]] = []
        """For each job, the numbers of its tensors: views of one memory are read once."""
        self._launches: list[Any] = []
        self._ready: list[Any] = []
        self._held: list[Tensor] = []
        self._numbers = np.zeros(0, np.int64)
        self.worked_out = self.moved = 0
        """How often the launches were worked out, and new addresses went up."""

    def take(self, found: list[Tensor], scale: Any) -> None:
        """Add the tensors of one call."""
        divisor = self._kernel.divisor_of(scale)
        at = [tensor.data_ptr() for tensor in found]
        at.append(0 if divisor is None else divisor.data_ptr())
        if at != self._at and not self._move(at):
            self._work_out(found, at)
        self._kernel.run(self._launches, self._ready)

    def _move(self, at: list[int]) -> bool:
        """Upload new addresses; return False if they do not fit the launches."""
        before, numbers = self._at, self._numbers
        if not before:
            return False
        for members in self._jobs:
            address = at[members[0]]
            if (address - before[members[0]]) % _ALIGNMENT:
                return False
            if len(members) > 1 and any(at[each] != address for each in members):
                return False
        jobs = numbers[: len(self._jobs) * _FIELDS].reshape(-1, _FIELDS)
        jobs[:, _ADDRESS] = [at[members[0]] for members in self._jobs]
        jobs[:, _SCALE] = at[-1]
        self._kernel.replace(self._held[-1], numbers)
        self._at = at
        self.moved += 1
        return True

    def _work_out(self, found: list[Tensor], at: list[int]) -> None:
        groups: dict[Any, dict[Any, list[int]]] = {}
        members: dict[Any, dict[Any, list[int]]] = {}
        for number, rows in self._rows.items():
            tensor, address = found[number], at[number]
            group = tensor.dtype, address % _ALIGNMENT == 0
            job = address, tensor.numel(), at[-1], tensor.dtype
            groups.setdefault(group, {}).setdefault(job, []).extend(rows)
            members.setdefault(group, {}).setdefault(job, []).append(number)
        self._launches, self._held = self._kernel.work_out(groups)
        self._ready = []
        self._numbers = np.array(self._kernel.latest, np.int64)
        self._jobs = [numbers for jobs in members.values() for numbers in jobs.values()]
        self._at = at
        self.worked_out += 1
