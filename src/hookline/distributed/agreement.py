"""Agree on the names that ranks hold, and on which ranks hold the same shard.

`Exchange` calls it with what every rank has declared. The outcome is the same on all ranks, but for the position of
this rank's own numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hookline.errors import RankError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Agreed", "Declaration", "Holding", "NamedPart", "SameIfEqual", "agree"]

_Names = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class SameIfEqual:
    """A shard that ``ranks`` share if their numbers are equal when names are agreed; else each has a part."""

    ranks: tuple[int, ...]
    is_known: bool
    """Whether there were numbers to compare."""
    digest: bytes = field(compare=False)


class NamedPart(NamedTuple):
    """The numbers of one name on this rank: how many there are, and which shard they are of."""

    name: str
    added: int
    """How many of the numbers that are added."""
    kept: int
    """How many of the numbers of which the largest is kept."""
    shard: Hashable = None
    """Ranks with the same shard hold the same numbers, which count once. None: every rank has numbers of its own."""


class Declaration(NamedTuple):
    """What one rank holds, in the form that travels."""

    names: tuple[tuple[str, int, int, int], ...]
    """For each part its name, its two sizes, and the position of its shard among ``shards``."""
    shards: tuple[Hashable, ...]
    """The different shards of this rank; of parts that ranks compare by their numbers, one each."""
    digest: bytes

    @classmethod
    def of(cls, parts: Sequence[NamedPart]) -> Declaration:
        """Return the declaration of ``parts``."""
        shards: list[Hashable] = []
        known: dict[Hashable, int] = {}
        names = []
        for part in parts:
            position = None if isinstance(part.shard, SameIfEqual) else known.get(part.shard)
            if position is None:
                position = len(shards)
                shards.append(part.shard)
                if not isinstance(part.shard, SameIfEqual):
                    known[part.shard] = position
            names.append((part.name, part.added, part.kept, position))
        return cls(tuple(names), tuple(shards), hashlib.sha256(repr(names).encode()).digest())


class Holding(NamedTuple):
    """One name, as all ranks agreed on it."""

    added: slice
    kept: slice
    ranks: tuple[int, ...]
    """The ranks that hold it."""
    shards: int
    """How many different shards there are."""
    multiple: int
    """How often each shard is in the sum."""


@dataclass
class Agreed:
    """What all ranks agreed on: every name of any rank, and where its numbers are in the buffers."""

    holdings: dict[str, Holding]
    added: int
    kept: int
    digest: int
    mine: tuple[NamedPart, ...]
    """The parts that this rank declared."""
    added_index: NDArray[np.int64]
    added_factor: NDArray[np.float64]
    kept_index: NDArray[np.int64]
    divisor: NDArray[np.float64]


class _Sharing(NamedTuple):
    """Which ranks hold a name, and how they share it."""

    ranks: tuple[int, ...]
    shards: int
    multiple: int
    factor: int
    """By what this rank multiplies its numbers before they are added; 0 if it has none."""


def agree(mine: tuple[NamedPart, ...], said: Sequence[tuple[_Names, tuple[Hashable, ...]]], rank: int) -> Agreed:
    """Return where each name of any rank is in the buffers, and how the numbers of this ``rank`` get there.

    ``said`` has the names and the shards of each rank. Ranks with the same tuple of names are taken together, and names
    that are shared in the same way are worked out once; one by one, 1,024 ranks with 1,000 names would take seconds.
    """
    together: dict[int, tuple[_Names, list[int]]] = {}
    for each, (names, _) in enumerate(said):
        together.setdefault(id(names), (names, []))[1].append(each)
    holders: dict[str, list[tuple[list[int], int]]] = {}
    sizes: dict[str, dict[tuple[int, int], int]] = {}
    for names, ranks in together.values():
        for name, added, kept, position in names:
            holders.setdefault(name, []).append((ranks, position))
            sizes.setdefault(name, {}).setdefault((added, kept), ranks[0])
    worked_out: dict[tuple[tuple[int, int], ...], _Sharing] = {}
    holdings: dict[str, Holding] = {}
    factors: dict[str, int] = {}
    start_added = start_kept = 0
    for name, of_name in holders.items():
        added, kept = _size(name, sizes[name])
        key = tuple([(id(ranks), position) for ranks, position in of_name])
        sharing = worked_out.get(key)
        if sharing is None:
            sharing = worked_out[key] = _share(of_name, [shards for _, shards in said], rank)
        ends = start_added + added, start_kept + kept
        holdings[name] = Holding(
            slice(start_added, ends[0]), slice(start_kept, ends[1]), sharing.ranks, sharing.shards, sharing.multiple
        )
        factors[name] = sharing.factor
        start_added, start_kept = ends
    divisor = np.ones(start_added)
    for holding in holdings.values():
        divisor[holding.added] = holding.multiple
    return Agreed(
        holdings,
        start_added,
        start_kept,
        _digest(holdings),
        mine,
        _index(holdings[part.name].added for part in mine),
        np.repeat([float(factors[part.name]) for part in mine], [part.added for part in mine]),
        _index(holdings[part.name].kept for part in mine),
        divisor,
    )


def _share(of_name: list[tuple[list[int], int]], shards: Sequence[tuple[Hashable, ...]], rank: int) -> _Sharing:
    """Work out how the ranks that hold a name share it."""
    declared = {each: shards[each][position] for ranks, position in of_name for each in ranks}
    found = {each: _resolve(each, declared) for each in declared}
    replicas = Counter(found.values())
    # Not every shard has as many replicas as the next: whole factors keep counts exact, where 1/3 would not.
    multiple = math.lcm(*replicas.values())
    factor = multiple // replicas[found[rank]] if rank in found else 0
    return _Sharing(tuple(sorted(declared)), len(replicas), multiple, factor)


def _resolve(rank: int, declared: dict[int, Hashable]) -> Hashable:
    """Return the shard that ``rank`` holds, by what all ranks that hold the name have declared."""
    shard = declared[rank]
    if isinstance(shard, SameIfEqual):
        others = [declared.get(each) for each in shard.ranks]
        digests = {each.digest if isinstance(each, SameIfEqual) else None for each in others}
        return ("group", shard.ranks) if len(digests) == 1 and shard.is_known else ("rank", rank)
    return ("rank", rank) if shard is None else shard


def _size(name: str, sizes: dict[tuple[int, int], int]) -> tuple[int, int]:
    """Return how many numbers a name has; raise if ranks differ in that."""
    if len(sizes) > 1:
        words = "; ".join(f"rank {rank}: {added} + {kept} numbers" for (added, kept), rank in sizes.items())
        raise RankError(f"{name!r} has not the same size on all ranks: {words}. Give every rank the same options.")
    return next(iter(sizes))


def _index(slices: Iterable[slice]) -> NDArray[np.int64]:
    parts = [np.arange(each.start, each.stop) for each in slices]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _digest(holdings: dict[str, Holding]) -> int:
    text = repr([(name, held.added.stop, held.kept.stop) for name, held in holdings.items()])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
