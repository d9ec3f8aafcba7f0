"""Count the binary exponents of many tensors on a GPU in one launch, for the statistic ``histogram``.

The engine calls it. Nothing waits for the device; as in `stat_kernel`, one small table goes up, and for a single tensor
not even that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from hookline.observe.watch.kernel_tables import JOBS, in_parts
from hookline.observe.watch.stat_kernel import Kernel, kernel_types, program_named
from hookline.sites import _torch

__all__ = ["ExponentInput", "ExponentKernel"]

_TILE: Final = 4096
"""Numbers that a program takes at a time: 16 a thread."""
_WARPS: Final = 8
"""Per program. 100 million numbers in bfloat16 on an H200 take 0.375 ms, by four warps 0.389, by 16 0.564."""
_LEAST: Final = 4
_MOST: Final = 2048
"""At least so many tiles a program, at most so many programs a tensor: each ends with up to 256 atomic additions."""


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
        with self._on_device():
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
        self._launch("count_exponents", (flat.dtype, True), (programs, 1, 1), arguments, _WARPS)

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
        self._launch("count_exponents", (items[0].flat.dtype, False), (first, 1, 1), arguments, _WARPS)
        del divisors, uploaded

    def _program(self, name: str, key: Any) -> tuple[Any, tuple[Any, ...]]:
        dtype, single = key
        return program_named(name), (kernel_types()[dtype][0], single, JOBS, _TILE)


def _division(size: int) -> tuple[int, int]:
    """Return how many programs count a tensor, and how many numbers each."""
    share = _TILE * max(_LEAST, -(-size // (_TILE * _MOST)))
    return -(-size // share), share
