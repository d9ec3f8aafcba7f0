"""Say what compiled code hands over of a tensor.

Watch hooks leave `find_in` in compiled graphs; `GraphHandover` takes what it has found. On a CPU that is the tensor.

On a GPU the compiler would make a launch of its own for the last step of every sum, six per tensor, and those take
longer than reading it. So the graph finds the same for rows of up to 1024 numbers, while it computes them (21 µs for
nine outputs of a GPT-2 block on an H200, 1.4 ms with all six launches). It writes that into one buffer for each
statistic, and one launch of ours (`GraphHandover`) adds up what it has found in all tensors of a pass. Wider tensors,
and gradients of 16 bits, our kernel reads itself, many in one launch: see `_is_read_whole`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.sites import _torch
from hookline.sites.compiled.graph_passes import arrange

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.observe.watch.row import Layout

__all__ = ["find_in", "hand_over_late", "row_of_parts"]

_WIDE: Final = torch.float64
_LONGEST: Final = 1024
"""The longest row that the compiler holds in registers."""
_BY_ROW: Final = frozenset({"cuda"})
"""Device types where a graph finds statistics by row."""
_IN_ROWS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})


def row_of_parts(parts: list[Tensor], each: int, layout: Layout, scale: Any = None) -> Tensor:
    """Return the row of a tensor from what was found ``by row``, in rows of ``each`` numbers; without a kernel."""
    found = iter(parts)
    size = parts[0].numel() * each
    nothing = torch.zeros((), dtype=_WIDE, device=parts[0].device)
    total, squares = (next(found).sum(), next(found).sum()) if layout.moments else (nothing, nothing)
    low, high = nothing + math.inf, nothing - math.inf
    if layout.extremes:
        lows, highs = next(found), next(found)
        low, high = (lows.amin().to(_WIDE), highs.amax().to(_WIDE)) if size else (low, high)
    zeros = next(found).sum() if layout.zeros else nothing
    factor = 1.0 if scale is None else 1.0 / torch.as_tensor(scale, dtype=_WIDE, device=nothing.device)
    ends = (low, high) if layout.extremes and size else (total, squares)
    good = ends[0].isfinite() & ends[1].isfinite()
    # Of a place with something else than numbers, the rest was not looked at.
    finite = [torch.where(good, end, nothing - math.inf) for end in (-low, high)]
    added = [nothing + 1, nothing + size, total * factor, squares * factor * factor, zeros, ~good, nothing, nothing]
    return torch.stack([*(end.to(_WIDE) for end in added), *(end * factor for end in (-low, high, *finite))])


def find_in(tensor: Tensor, layout: Layout, *, is_gradient: bool = False) -> tuple[list[Tensor], int]:
    """Return what a graph hands over of a tensor, and how many numbers each entry of that covers. Can be traced.

    1 means that it is the tensor itself, unread.
    """
    numbers = tensor.detach()
    if numbers.device.type not in _BY_ROW:
        return [numbers], 1
    if numbers.dim() > 3:
        numbers = numbers.flatten(2)  # images: a row is one channel of one image
    each = _row_length(numbers, layout, is_gradient)
    hand_over_late()
    if each == 1:
        return [tensor.detach()], 1
    return _FIND(numbers, each, layout.moments, layout.extremes, layout.zeros), each


def _row_length(numbers: Tensor, layout: Layout, is_gradient: bool) -> int:
    """Return how long a row is; 1 if statistics are not to be found by row."""
    if not layout.fits_one_read or numbers.dtype not in _IN_ROWS or numbers.dim() == 0:
        return 1
    length = numbers.shape[-1]
    if not _torch.is_known_to_be_at_most(length, _LONGEST) or _is_read_whole(numbers.dtype, is_gradient):
        return 1
    return _row_of(length)


@_torch.constant_while_tracing
def _is_read_whole(dtype: torch.dtype, is_gradient: bool) -> bool:
    """Return whether our kernel reads a tensor, though its rows are short enough for the compiler.

    Gradients of 16 bits: by row, the compiler joins them with the sum for the bias in a kernel that takes 22 + 11 µs
    instead of 6 + 7 (H200). Rows of more than 1024 numbers are read whole as well: its kernels go through them in parts
    that wait for one another. A GELU with both statistics takes 69 µs, 36 without any, and 13 each to read both at full
    speed; and what is as wide lies in memory anyway, because a matrix product reads it.
    """
    return is_gradient and dtype is not torch.float32


@_torch.constant_while_tracing
def hand_over_late() -> None:
    """Arrange what the graph that is being traced hands over (`graph_passes`), as far as the compiler lets us.

    Otherwise it keeps other tensors for the backward pass than without a hook: twice the bytes for the widest layer of
    a GPT-2, and 4 GiB more at a batch of 32.
    """
    arrange(_FIND, _JOIN)


@_torch.constant_while_tracing
def _row_of(length: int) -> int:
    """Return the length of a row; 1 if it is so short that there would be too many rows."""
    return length if length >= 32 else 1


def _by_row(numbers: Any, each: int, moments: bool, extremes: bool, zeros: bool, aten: Callable[..., Any]) -> list[Any]:
    """Return what is found, by calls of ``aten``, which compute it or tell the compiler what to write."""
    rows = aten("reshape.default", numbers, [-1, each])
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
    _torch.join_late(_JOIN)
    size = [numbers.numel() // each]
    types = [torch.float64] * 2 * moments + [torch.float32] * 2 * extremes + [torch.int32] * zeros
    return [numbers.new_empty(size, dtype=dtype) for dtype in types]


def _define() -> Any:
    # The compiler keeps what it has written on disk, by the operator's name: another meaning needs another name.
    name = "find_2"
    library = _torch.operators(f"{name}(Tensor numbers, int each, bool moments, bool extremes, bool zeros) -> Tensor[]")
    library.impl(name, _compute, "CompositeExplicitAutograd")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"hookline::{name}", _pretend, lib=library)
    return getattr(torch.ops.hookline, name).default


_FIND: Final[Any] = _define()
"""The operator that finds statistics by row; the compiler opens it only when it writes the loops."""


def _join(parts: list[Tensor], kinds: int) -> list[Tensor]:
    return [torch.cat(list(parts[kind::kinds])) for kind in range(kinds)]


def _pretend_join(parts: list[Tensor], kinds: int) -> list[Tensor]:
    return [parts[kind].new_empty([sum(part.numel() for part in parts[kind::kinds])]) for kind in range(kinds)]


def _define_join() -> Any:
    library = _torch.operators("join_1(Tensor[] parts, int kinds) -> Tensor[]")
    library.impl("join_1", _join, "CompositeExplicitAutograd")
    library.impl("join_1", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("hookline::join_1", _pretend_join, lib=library)
    return torch.ops.hookline.join_1.default


_JOIN: Final[Any] = _define_join()
"""The operator that joins what was found: each ``kinds``-th part, beginning with each of the first ``kinds``."""
