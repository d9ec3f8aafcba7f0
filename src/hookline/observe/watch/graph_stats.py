"""Find statistics of a tensor on its own device by operations of torch, which compiled code takes into its graph.

Watch hooks leave `find_in` in compiled graphs; the engine calls `summarize` on devices without a kernel, and adds what
either has found to rows. Nothing waits for the device. The operations are few, since every watched module has them in
the graph twice: what follows from a handful of numbers is left to `as_numbers` (on the CPU) and `as_columns`. Sums are
formed in float64, so neither a mean far from zero nor squares too large for float32 spoil the variance.

On a GPU the compiler would make a launch of its own for the last step of every sum, six per tensor, and those take
longer than reading it. So the graph finds the same for rows of up to 1024 numbers, while it computes them (21 µs for
nine outputs of a GPT-2 block on an H200, 1.4 ms with all six launches). It writes that into one buffer for each
statistic, and one launch of ours (`graph_handover`) adds up what it has found in all tensors of a pass. Wider tensors,
and gradients of 16 bits, our kernel reads itself, many in one launch: see `_is_read_whole`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.watch.cpu_stats import Numbers
from hookline.sites import _torch
from hookline.sites.compiled.graph_passes import arrange

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.observe.watch.stat_columns import Layout

__all__ = ["add_up", "as_columns", "as_numbers", "find_in", "hand_over_late", "summarize"]

_WIDE: Final = torch.float64
_LONGEST: Final = 1024
"""The longest row that the compiler holds in registers."""
_BY_ROW: Final = frozenset({"cuda"})
"""Device types where a graph finds statistics by row."""
_IN_ROWS: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})


def summarize(tensor: Tensor, layout: Layout) -> Tensor:
    """Return what is found in a tensor, in the order of ``layout.graph_outputs``, as float64. Can be traced."""
    numbers = _as_float(tensor.detach())
    count = numbers.numel()
    if count == 0:
        return torch.zeros(len(layout.graph_outputs), dtype=_WIDE, device=tensor.device)
    found = [torch.full((), count, dtype=_WIDE, device=tensor.device)]
    if layout.moments:
        norm = torch.linalg.vector_norm(numbers, dtype=_WIDE)
        found += [numbers.sum(dtype=_WIDE), norm * norm]
    if layout.extremes:
        found += [numbers.amin(), numbers.amax()]
    if layout.zeros:
        found.append((numbers == 0).sum())
    if layout.details:
        finite = numbers.isfinite()
        found += [numbers.isnan().sum(), finite.sum()]
        found += [torch.where(finite, numbers, math.inf).amin(), torch.where(finite, numbers, -math.inf).amax()]
    found += [(numbers.abs() > threshold).sum() for threshold in layout.thresholds]
    return torch.stack([each.to(_WIDE) for each in found])


def add_up(parts: list[Tensor], each: int, layout: Layout) -> Tensor:
    """Return what `summarize` would have found, from ``parts`` found in rows of ``each`` numbers."""
    if not parts[0].numel():
        return torch.zeros(len(layout.graph_outputs), dtype=_WIDE, device=parts[0].device)
    kinds = [name for name in layout.graph_outputs if name != "size"]
    ends = {"low": torch.amin, "high": torch.amax}
    size = torch.full((), parts[0].numel() * each, dtype=_WIDE, device=parts[0].device)
    return torch.stack(
        [size, *(ends.get(name, torch.sum)(part).to(_WIDE) for name, part in zip(kinds, parts, strict=True))]
    )


def _as_float(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    if tensor.is_floating_point():
        return tensor.float()
    return tensor.abs().to(_WIDE) if tensor.is_complex() else tensor.to(_WIDE)


def as_numbers(vector: Tensor, layout: Layout) -> Numbers:
    """Return the vector of `summarize` as plain numbers; for the CPU, where that is no transfer."""
    cells = dict(zip(layout.graph_outputs, vector.tolist(), strict=True))
    size = int(cells["size"])
    if not size:
        return Numbers()
    total, squares = cells.get("sum", 0.0), cells.get("squares", 0.0)
    low, high = cells.get("low", math.inf), cells.get("high", -math.inf)
    bad = not all(map(math.isfinite, (low, high) if layout.extremes else (total, squares)))
    nan, inf, finite_low, finite_high = 0, 0, low, high
    if layout.details:
        nan, inf = int(cells["nan"]), size - int(cells["finite"]) - int(cells["nan"])
        finite_low, finite_high = cells["finite_low"], cells["finite_high"]
    elif bad:  # the rest was not looked at
        finite_low, finite_high = math.inf, -math.inf
    over = tuple(int(cells[name]) for name in layout.over)
    return Numbers(
        size, total, squares, int(cells.get("zeros", 0)), low, high, bad, nan, inf, finite_low, finite_high, over
    )


def as_columns(vector: Tensor, layout: Layout, scale: Any = None) -> Tensor:
    """Return what one firing adds to a row, on its device; numbers are divided by ``scale``, not thresholds."""
    cells = dict(zip(layout.graph_outputs, vector, strict=True))
    size = cells["size"]
    nothing, some = torch.zeros_like(size), size > 0
    total, squares = cells.get("sum", nothing), cells.get("squares", nothing)
    low, high = cells.get("low", nothing + math.inf), cells.get("high", nothing - math.inf)
    good = low.isfinite() & high.isfinite() if layout.extremes else total.isfinite() & squares.isfinite()
    nan, inf, finite_low, finite_high = nothing, nothing, low, high
    if layout.details:
        nan, inf = cells["nan"], size - cells["finite"] - cells["nan"]
        finite_low, finite_high = cells["finite_low"], cells["finite_high"]
    factor = 1.0 if scale is None else 1.0 / torch.as_tensor(scale, dtype=_WIDE, device=vector.device)
    over = [cells[name] for name in layout.over]
    bad = (~good).to(_WIDE)
    added = [nothing + 1, size, total * factor, squares * factor * factor, cells.get("zeros", nothing), bad, nan, inf]
    kept = torch.stack([-low, high, -finite_low, finite_high]) * factor
    known = torch.stack([some, some, some & (good | layout.details), some & (good | layout.details)])
    return torch.cat([torch.stack([*added, *over]), torch.where(known, kept, -math.inf)])


# -- in compiled code, by row --------------------------------------------------------------------------------


def find_in(
    tensor: Tensor, layout: Layout, *, is_gradient: bool = False, closer: Layout | None = None
) -> tuple[list[Tensor], int]:
    """Return what a graph hands over of a tensor, and how many numbers each entry of that covers. Can be traced.

    0 means all of them, by one vector; 1 means that it is the tensor itself, unread. ``closer`` is the layout for the
    vector: it counts NaN and Inf, as eager code does. By row that would take four more buffers, so that layout is taken
    only once something was not finite.
    """
    numbers = tensor.detach()
    if numbers.device.type not in _BY_ROW:
        return [summarize(tensor, closer or layout)], 0
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
