"""Put the parts that ranks hold of one tensor together, by placements or by a string that names its dimensions.

`align_runs` calls `join_ranks` for each side before it pairs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.compare.run_values import RunValue, RunValues
from hookline.errors import OptionError
from hookline.sites.targets import name_matcher

__all__ = ["join_ranks"]

_PART: Final = re.compile(r"([A-Za-z0-9_*]+)(?:\[([a-z0-9_]+)(?::(sum|partial))?\])?")
_SHARD: Final = re.compile(r"Shard\((?:dim=)?(-?\d+)\)")

DimsOption = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How parts lie: by each dimension of the mesh, the dimension that is cut, ``sum``, or None for copies."""

    axes: tuple[int | str | None, ...]
    sizes: tuple[int, ...]
    coordinates: dict[int, tuple[int, ...]]
    """By rank."""
    text: str


def join_ranks(
    run: RunValues, dims: DimsOption = None, mesh: Mapping[str, int] | None = None
) -> tuple[list[RunValue], list[str]]:
    """Return the values with what ranks hold parts of as one, and what has to be said about that.

    Values that every rank has a copy of, or of which nobody has said how they lie, stay one for each rank.
    """
    groups: dict[tuple[Any, ...], list[RunValue]] = {}
    for value in run.values:
        groups.setdefault((value.kind, value.site, value.leaf, value.step, value.call), []).append(value)
    find = _finder(dims)
    found: list[RunValue] = []
    notes: dict[str, None] = {}
    for members in groups.values():
        layout = _layout(members, find(members[0].site) or members[0].dims, mesh) if len(members) > 1 else None
        if layout is None or all(axis is None for axis in layout.axes):
            found += members
        elif missing := set(layout.coordinates) - {member.rank for member in members}:
            notes[
                f"{run.name}: parts of ranks {sorted(missing)} are missing; sharded tensors cannot be put together."
            ] = None
        else:
            found.append(_joined(members, layout))
    found.sort(key=lambda value: value.order)
    return found, [*notes]


def _finder(dims: DimsOption) -> Callable[[str], str | None]:
    if dims is None:
        return lambda site: None
    if isinstance(dims, str):
        return lambda site: dims
    matchers = [(name_matcher(pattern), text) for pattern, text in dims.items()]
    return lambda site: next((text for matches, text in matchers if matches(site)), None)


def _layout(members: Sequence[RunValue], dims: str | None, mesh: Mapping[str, int] | None) -> _Layout | None:
    """Return how the parts lie; None if nobody has said."""
    if all(member.placements is not None and member.placements.coordinate for member in members):
        return _by_placements(members)
    return None if dims is None else _by_dims(members, dims, mesh)


def _by_placements(members: Sequence[RunValue]) -> _Layout:
    first = members[0].placements
    assert first is not None
    axes: list[int | str | None] = []
    for placement in first.placements:
        shard = _SHARD.search(placement)
        axes.append(int(shard[1]) if shard else "sum" if placement.startswith("Partial") else None)
    coordinates = {member.rank: member.placements.coordinate for member in members if member.placements is not None}
    return _Layout(tuple(axes), first.mesh_shape, coordinates, ", ".join(first.placements))


def _by_dims(members: Sequence[RunValue], dims: str, mesh: Mapping[str, int] | None) -> _Layout | None:
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
    total = 1
    for size in sizes:
        total *= size
    # The outermost axis comes first: its number changes last from rank to rank.
    coordinates = {rank: _unravelled(rank, sizes) for rank in range(total)}
    return _Layout(tuple(cut.get(name) for name in names), sizes, coordinates, dims)


def _unravelled(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        rank, rest = divmod(rank, size)
        place.append(rest)
    return tuple(reversed(place))


def _joined(members: Sequence[RunValue], layout: _Layout) -> RunValue:
    """Return one value for all parts; copies along a dimension of the mesh count once."""
    by_place = {layout.coordinates[member.rank]: member for member in members}
    shape = _full_shape(members, layout)
    can_read = all(member.read is not None for member in members)
    first = min(members, key=lambda member: member.rank)
    return replace(
        first,
        shape=shape,
        rank=0,
        read=(lambda: _join(by_place, layout, ())) if can_read else None,
        fingerprint=None,
        placements=None,
        rows=None if shape != first.shape and 0 in layout.axes else first.rows,
        note=f"put together from {len(members)} ranks ({layout.text})",
    )


def _full_shape(members: Sequence[RunValue], layout: _Layout) -> tuple[int, ...]:
    by_place = {layout.coordinates[member.rank]: member.shape for member in members}
    shape = list(members[0].shape)
    for number, axis in enumerate(layout.axes):
        if isinstance(axis, int):
            line = [size for place, size in by_place.items()
                    if all(at == 0 for other, at in enumerate(place) if other != number)]  # fmt: skip
            shape[axis] = sum(size[axis] for size in line)
    return tuple(shape)


def _join(parts: Mapping[tuple[int, ...], RunValue], layout: _Layout, place: tuple[int, ...]) -> Tensor:
    """Return the tensor of all parts whose coordinate begins with ``place``."""
    if len(place) == len(layout.sizes):
        read = parts[place].read
        assert read is not None
        return read()
    axis = layout.axes[len(place)]
    if axis is None:
        return _join(parts, layout, (*place, 0))
    pieces = [_join(parts, layout, (*place, index)) for index in range(layout.sizes[len(place)])]
    if axis == "sum":
        total = pieces[0].double()
        for piece in pieces[1:]:
            total = total + piece
        return total.to(pieces[0].dtype)
    return torch.cat(pieces, dim=int(axis))
