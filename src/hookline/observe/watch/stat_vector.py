"""What is found in a tensor, on its own device, by operations of torch alone.

Nothing waits for the device, and everything can be traced: in compiled code this becomes part of the graph, and the
compiler joins it with what made the tensor. It is kept short, since every module that is watched has it in the graph
twice; what can be computed from a handful of numbers is left to whoever receives them (`Numbers` on the CPU,
`as_columns` elsewhere).

Sums are formed in float64, which a compiler does as it goes, and torch without a copy: neither a mean far from zero nor
numbers whose squares float32 cannot hold spoil the variance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.observe.watch.cpu_stats import Numbers

if TYPE_CHECKING:
    from hookline.observe.watch.columns import Layout

__all__ = ["add_up", "as_columns", "as_numbers", "summarize"]

_WIDE: Final = torch.float64


def add_up(parts: list[Tensor], each: int, layout: Layout) -> Tensor:
    """What `summarize` would have found, of what was found by row."""
    if not parts[0].numel():
        return torch.zeros(len(layout.found), dtype=_WIDE, device=parts[0].device)
    kinds = [name for name in layout.found if name != "size"]
    ends = {"low": torch.amin, "high": torch.amax}
    size = torch.full((), parts[0].numel() * each, dtype=_WIDE, device=parts[0].device)
    return torch.stack(
        [size, *(ends.get(name, torch.sum)(part).to(_WIDE) for name, part in zip(kinds, parts, strict=True))]
    )


def summarize(tensor: Tensor, layout: Layout) -> Tensor:
    """What is found in a tensor, in the order of ``layout.found``, as float64. To be traced."""
    numbers = _as_float(tensor.detach())
    count = numbers.numel()
    if count == 0:
        return torch.zeros(len(layout.found), dtype=_WIDE, device=tensor.device)
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


def _as_float(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    if tensor.is_floating_point():
        return tensor.float()
    return tensor.abs().to(_WIDE) if tensor.is_complex() else tensor.to(_WIDE)


def as_numbers(vector: Tensor, layout: Layout) -> Numbers:
    """The vector as plain numbers; on the CPU, where that is no transfer."""
    cells = dict(zip(layout.found, vector.tolist(), strict=True))
    size = int(cells["size"])
    if not size:
        return Numbers()
    total, squares = cells.get("sum", 0.0), cells.get("squares", 0.0)
    low, high = cells.get("low", math.inf), cells.get("high", -math.inf)
    seen = (low, high) if layout.extremes else (total, squares)
    bad = not all(map(math.isfinite, seen))
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
    """What one firing adds to a row, on the vector's own device; numbers are divided by ``scale``, not thresholds."""
    cells = dict(zip(layout.found, vector, strict=True))
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
