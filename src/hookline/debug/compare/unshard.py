"""Put the parts that ranks hold of one tensor together, by placements or by a string that names its dimensions.

`compare` calls `unshard` for each side before `rules` pairs them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hookline.debug.compare.key import PARAMETERS, Value, ValueKey
from hookline.debug.compare.values import Run
from hookline.errors import OptionError
from hookline.sites.targets import name_matcher

_PART: Final = re.compile(r"([A-Za-z0-9_*]+)(?:\[([a-z0-9_]+)(?::(sum|partial))?\])?")
_SHARD: Final = re.compile(r"(?:Strided)?Shard\((-?\d+)(?:, (\d+))?\)")
_PARTIAL: Final = re.compile(r"Partial\((\w+)\)")
_REDUCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}
"""What becomes of partial results of ranks, which are stacked, in float64."""

DimsOption = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How parts lie on the dimensions of a mesh."""

    axes: tuple[int | str | None, ...]
    """For each, the dimension of the tensor that is cut, how partial results are reduced, or None for copies."""
    sizes: tuple[int, ...]
    coordinates: dict[int, tuple[int, ...]]
    """By rank."""
    text: str
    order: tuple[int, ...]
    """In which order the tensor was cut along them."""


def unshard(run: Run, dims: DimsOption = None, mesh: Mapping[str, int] | None = None) -> Run:
    """Return a run with what ranks hold parts of as one value on rank 0, and with notes on what could not be joined.

    Values that every rank has a copy of, or of which nobody has said how they lie, stay one for each rank.
    """
    groups: dict[ValueKey, dict[ValueKey, Value]] = {}
    for key, value in run.values.items():
        groups.setdefault(key._replace(rank=0), {})[key] = value
    find = _finder(dims)
    found: dict[ValueKey, Value] = {}
    notes: dict[str, None] = {}
    for whole, parts in groups.items():
        members = list(parts.values())
        layout = _layout(members, find(whole), mesh) if len(members) > 1 else None
        if layout is None or all(axis is None for axis in layout.axes):
            found |= parts
        elif why := _why_apart(members, layout):
            notes[f"{run.name}: {why}; sharded tensors cannot be put together."] = None
        else:
            found[whole] = _joined(members, layout)
    return replace(run, values=found, notes=[*run.notes, *notes])


def _finder(dims: DimsOption) -> Callable[[ValueKey], str | None]:
    """Return what finds the dimensions of a value; a single text is for what flows, not for parameters."""
    if dims is None or isinstance(dims, str):
        return lambda key: None if key.kind in PARAMETERS else dims
    matchers = [(name_matcher(pattern), text) for pattern, text in dims.items()]
    return lambda key: next((text for matches, text in matchers if matches(key.site)), None)


def _layout(members: Sequence[Value], dims: str | None, mesh: Mapping[str, int] | None) -> _Layout | None:
    """Return how the parts lie; None if nobody has said."""
    if all(member.placements is not None and member.placements.coordinate for member in members):
        return _by_placements(members)
    return None if dims is None else _by_dims(members, dims, mesh)


def _why_apart(members: Sequence[Value], layout: _Layout) -> str:
    """Return why parts cannot be put together; nothing if they can."""
    unknown = [axis for axis in layout.axes if isinstance(axis, str) and axis not in _REDUCTIONS]
    if unknown:
        return f"how ranks reduce {layout.text} is not known"
    there = {layout.coordinates[member.rank] for member in members}
    missing = [number for number, place in enumerate(_places(layout.sizes)) if place not in there]
    return f"parts of ranks {missing} are missing" if missing else ""


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Return the places of a mesh, rank by rank: the outermost axis comes first, and its number changes last."""
    return itertools.product(*map(range, sizes))


def _by_placements(members: Sequence[Value]) -> _Layout:
    first = members[0].placements
    assert first is not None
    axes: list[int | str | None] = []
    factors = []
    for placement in first.placements:
        shard, partial = _SHARD.fullmatch(placement), _PARTIAL.fullmatch(placement)
        other = None if placement == "Replicate()" else partial[1] if partial else placement
        axes.append(int(shard[1]) if shard else other)
        factors.append(int(shard[2] or 1) if shard else 1)
    coordinates = {member.rank: member.placements.coordinate for member in members if member.placements is not None}
    # A strided shard is one of what was cut before it into as many parts as its factor says.
    order = tuple(sorted(range(len(axes)), key=lambda number: factors[number]))
    return _Layout(tuple(axes), first.mesh_shape, coordinates, ", ".join(first.placements), order)


def _by_dims(members: Sequence[Value], dims: str, mesh: Mapping[str, int] | None) -> _Layout | None:
    parts = [_PART.fullmatch(part) for part in dims.split()]
    if not parts or not all(parts):
        raise OptionError(
            f"dims={dims!r}: write a name for each dimension, with [axis] where ranks share it: 'b s h[tp] d'."
        )
    if len(parts) != len(members[0].shape):
        return None
    cut = {part[2]: ("sum" if part[3] else dim) for dim, part in enumerate(parts) if part is not None and part[2]}
    if not cut:
        return None
    ranks = sorted(member.rank for member in members)
    names = list(mesh) if mesh is not None else list(cut)
    sizes = tuple(mesh.values()) if mesh is not None else (len(ranks),)
    if unknown := set(cut) - set(names):
        raise OptionError(f"dims={dims!r} names {sorted(unknown)}, mesh= has {names}.")
    if len(names) != len(sizes):
        raise OptionError(
            f"dims={dims!r} has {len(names)} axes: say how many ranks each has, the outermost first: "
            f"mesh={{{', '.join(f'{name!r}: …' for name in names)}}}."
        )
    coordinates = dict(enumerate(_places(sizes)))
    return _Layout(tuple(cut.get(name) for name in names), sizes, coordinates, dims, tuple(range(len(names))))


def _joined(members: Sequence[Value], layout: _Layout) -> Value:
    """Return one value for all parts; copies along a dimension of the mesh count once."""
    axes = [layout.axes[number] for number in layout.order]
    by_place = {tuple(layout.coordinates[member.rank][at] for at in layout.order): member for member in members}
    shapes = {place: torch.empty(member.shape, device="meta") for place, member in by_place.items()}
    shape = tuple(_join(shapes, axes).shape)

    def read() -> Tensor:
        return _join({place: member.tensor() for place, member in by_place.items()}, axes)

    first = min(members, key=lambda member: member.rank)
    return replace(
        first,
        shape=shape,
        read=read if all(member.read is not None for member in by_place.values()) else None,
        fingerprint=None,
        placements=None,
        rows=None if shape != first.shape and 0 in layout.axes else first.rows,
        note=f"put together from {len(members)} ranks ({layout.text})",
    )


def _join(parts: Mapping[tuple[int, ...], Tensor], axes: Sequence[int | str | None]) -> Tensor:
    """Return the tensor of which parts lie at these places along ``axes``."""
    if not axes:
        return parts[()]
    axis, *inner = axes
    indices = [0] if axis is None else sorted({place[0] for place in parts})
    pieces = [_join({place[1:]: part for place, part in parts.items() if place[0] == at}, inner) for at in indices]
    if isinstance(axis, int):
        return torch.cat(pieces, dim=axis)
    if axis is None:
        return pieces[0]
    dtype = pieces[0].dtype
    return _REDUCTIONS[axis](torch.stack(pieces).to(torch.promote_types(dtype, torch.float64))).to(dtype)
