"""What a compiled graph on a GPU finds in a tensor: the same for rows of up to 1024 numbers, to be added up elsewhere.

The compiler makes a launch of its own for the last step of every sum, six per tensor, and those take longer than
reading it. So the graph stops half-way: rows it goes through on the side, while it computes them (21 µs for nine
outputs of a GPT-2 block on an H200, 1.4 ms with all six launches), and two launches of ours (`Kernel.take_parts`) add
up what it has found in all tensors of the forward, or the backward. Rows longer than that it would have to go through
twice: then our kernel reads the tensor itself.

It is one operator, which the compiler opens only when it writes the loops, and which stands behind all else when it
decides what to keep for the backward pass. Otherwise it keeps other tensors than without a hook: twice the bytes for
the widest layer of a GPT-2, and 4 GiB more at a batch of 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.watch.stat_vector import summarize
from hookline.sites import _torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.observe.watch.columns import Layout

__all__ = ["find_in"]

_LONGEST: Final = 1024
"""The longest row that the compiler holds in registers."""
_MOST: Final = 8192
"""Longer dimensions are vocabularies: what a matrix product has written is joined with nothing."""
_BY_ROW: Final = frozenset({"cuda"})
"""Kinds of device where a graph finds things by row."""
_IN_ROWS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})


def find_in(tensor: Tensor, layout: Layout) -> tuple[list[Tensor], int]:
    """What a graph hands over of a tensor, and how many numbers each entry of that tells of. To be traced.

    0: all of them, by one vector. 1: it is the tensor itself, unread.
    """
    numbers = tensor.detach()
    if numbers.device.type not in _BY_ROW:
        return [summarize(tensor, layout)], 0
    if numbers.dim() > 3:
        numbers = numbers.flatten(2)  # images: a row is what one channel has of one
    each = _row_of(numbers, layout)
    if each == 1:
        return [tensor.detach()], 1
    _begin_graph()
    return _FIND(numbers, each, layout.moments, layout.extremes, layout.zeros), each


def _row_of(numbers: Tensor, layout: Layout) -> int:
    """How long a row is; 1 if there are to be none."""
    if not layout.by_row or numbers.dtype not in _IN_ROWS or numbers.dim() == 0:
        return 1
    length = numbers.shape[-1]
    return _divisor(length) if _torch.is_known_to_be_at_most(length, _MOST) else 1


@_torch.constant_while_tracing
def _begin_graph() -> None:
    ours = torch.ops.hookline
    _torch.move_late(_FIND, ours.sink.default, ours.sinks.default)


@_torch.constant_while_tracing
def _divisor(length: int) -> int:
    """The longest row that divides it; 1 if that is so short that there would be too many."""
    longest = max(each for each in range(1, _LONGEST + 1) if length % each == 0) if length else 1
    return longest if longest >= 32 and (longest == length or longest >= 128) else 1


# -- the operator --------------------------------------------------------------------------------------------


def _by_row(numbers: Any, each: int, moments: bool, extremes: bool, zeros: bool, aten: Callable[..., Any]) -> list[Any]:
    """What is found, by calls of ``aten``: they compute, or they tell the compiler what to write."""
    size = numbers.shape if isinstance(numbers, Tensor) else numbers.get_size()
    rows = aten("reshape.default", numbers, [*size[:-1], size[-1] // each, each])
    narrow = aten("_to_copy.default", rows, dtype=torch.float32)
    found = []
    if moments:
        wide = aten("_to_copy.default", narrow, dtype=torch.float64)
        found += [aten("sum.dim_IntList", wide, [-1])]
        found += [aten("sum.dim_IntList", aten("mul.Tensor", wide, wide), [-1])]
    if extremes:
        found += [aten("amin.default", narrow, [-1]), aten("amax.default", narrow, [-1])]
    if zeros:
        found += [aten("sum.dim_IntList", aten("eq.Scalar", narrow, 0), [-1], dtype=torch.int32)]
    return found


def _compute(numbers: Tensor, each: int, moments: bool, extremes: bool, zeros: bool) -> list[Tensor]:
    return _by_row(numbers, each, moments, extremes, zeros, _torch.call_aten)


def _pretend(numbers: Tensor, each: int, moments: bool, extremes: bool, zeros: bool) -> list[Tensor]:
    # The compiler is there by now, if it is the one that can open the operator.
    _torch.open_late(_FIND, _by_row)
    size = [*numbers.shape[:-1], numbers.shape[-1] // each]
    types = [torch.float64] * 2 * moments + [torch.float32] * 2 * extremes + [torch.int32] * zeros
    return [numbers.new_empty(size, dtype=dtype) for dtype in types]


def _define() -> Any:
    # The compiler keeps what it has written on disk, by the operator's name: another meaning needs another name.
    name = "find_1"
    library = _torch.operators(f"{name}(Tensor numbers, int each, bool moments, bool extremes, bool zeros) -> Tensor[]")
    library.impl(name, _compute, "CompositeExplicitAutograd")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"hookline::{name}", _pretend, lib=library)
    return getattr(torch.ops.hookline, name).default


_FIND: Final[Any] = _define()
