"""Make one number of those of all ranks: gather them, and add them up in NumPy.

`Exchange` is for statistics, of which ranks may hold shards or replicas: `Watch` calls it. `reduce_records` is for
metrics, by the rule that each declares: ``lifecycle.ranks`` gathers the records and calls it.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from hookline.distributed.ranks import gather_objects, in_words
from hookline.errors import OptionError, RankError
from hookline.messages import suggest

if TYPE_CHECKING:
    from numpy.typing import NDArray

# -- statistics, which may be shards or replicas ---------------------------------------------------------------

_made: Counter[str] = Counter()


class SameIfEqual(NamedTuple):
    """A shard that ``ranks`` share if their numbers are equal when these are first known; else each has a part."""

    ranks: tuple[int, ...]
    by: str
    """The name whose numbers are compared."""
    is_known: bool
    """Whether there are numbers to compare."""


class NamedPart(NamedTuple):
    """The numbers of one name on this rank: how many there are, and which shard they are of."""

    name: str
    added: int
    """How many of the numbers that are added."""
    kept: int
    """How many of the numbers of which the largest is kept."""
    shard: Hashable = None
    """Ranks with the same shard hold the same numbers, which count once. None: every rank has numbers of its own."""


class Holding(NamedTuple):
    """Where the numbers of one name are in a `Reduced`, and who holds them."""

    added: slice
    kept: slice
    ranks: tuple[int, ...]
    shards: int
    """How many different shards there are."""


class Reduced(NamedTuple):
    """The numbers of all ranks: by ``holdings[name]``, slices of ``added`` and ``kept``.

    ``holdings`` is the same object as long as no rank has other names.
    """

    holdings: dict[str, Holding]
    added: NDArray[np.float64]
    kept: NDArray[np.float64]


class _Said(NamedTuple):
    """What one rank sends."""

    about: bytes
    """Options and parts: as bytes, they are compared at once, and read only when they have changed."""
    added: NDArray[np.float64]
    kept: NDArray[np.float64]


_Slices = dict[str, tuple[slice, slice]]
"""By name, where the numbers are that are added, and those of which the largest is kept."""


class _Places(NamedTuple):
    """Where the numbers of ranks that have the same parts go."""

    ranks: tuple[int, ...]
    is_own: NDArray[np.bool_]
    """Which of the added numbers every rank has for itself; of the others, they are replicas."""
    counts: NDArray[np.bool_]
    """Which of the added numbers are counted here, not at ranks before them with the same shard."""
    added: NDArray[np.int64]
    kept: NDArray[np.int64]


class Exchange:
    """Reduces the numbers of all ranks.

    Recipe::

        exchange = Exchange("my statistics")
        parts = [NamedPart("layers.0", added=2, kept=1)]
        reduced = exchange.reduce(parts, np.array([count, total]), np.array([largest]))
        count, total = reduced.added[reduced.holdings["layers.0"].added]

    All ranks have to make it, and call `reduce`, in the same order.

    Args:
        what: A few words for errors.
        options: What has to be the same on all ranks, in words; ranks that differ are named in a `RankError`.
    """

    def __init__(self, what: str, options: str = "") -> None:
        _made[what] += 1
        self.what = what if _made[what] == 1 else f"{what} ({_made[what]})"
        self._mine: tuple[NamedPart, ...] = ()
        self._options = options
        self._about = pickle.dumps((options, ()))
        self._plan: tuple[list[bytes], dict[str, Holding], list[_Places]] = [], {}, []
        """What ranks said of their parts last, and where the numbers of each go."""
        self._same: dict[tuple[str, tuple[int, ...]], bool] = {}
        """By name and ranks, whether these hold the same; decided once, by the first numbers."""

    def reduce(self, parts: Sequence[NamedPart], added: NDArray[np.float64], kept: NDArray[np.float64]) -> Reduced:
        """Return the sums of ``added`` and the largest of ``kept`` over all ranks, for every name of any rank.

        Args:
            parts: The names of this rank, in the order of their numbers.
            added: Numbers to add up; of ranks with the same shard, those of the first. Whole numbers stay exact.
            kept: Numbers of which to keep the largest; NaN is larger than any.
        """
        mine = tuple(parts)
        if mine != self._mine:
            self._mine, self._about = mine, pickle.dumps((self._options, mine))
        said = gather_objects(_Said(self._about, added, kept), what=self.what)
        about = [each.about for each in said]
        if about != self._plan[0]:
            self._plan = about, *self._planned(said)
        _, holdings, places = self._plan
        last = next(reversed(holdings.values()), Holding(slice(0, 0), slice(0, 0), (), 0))
        total, largest = np.zeros(last.added.stop), np.full(last.kept.stop, -np.inf)
        for ranks, is_own, counts, to_added, to_kept in places:
            sums = np.where(is_own, sum(said[rank].added for rank in ranks), said[ranks[0]].added)
            total[to_added] += sums[counts]
            largest[to_kept] = np.maximum(largest[to_kept], np.max([said[rank].kept for rank in ranks], axis=0))
        return Reduced(holdings, total, largest)

    def _planned(self, said: list[_Said]) -> tuple[dict[str, Holding], list[_Places]]:
        """Return where the numbers of each name are, and where those of each rank go."""
        ranks_of: dict[bytes, tuple[int, ...]] = {}
        for rank, one in enumerate(said):
            ranks_of[one.about] = (*ranks_of.get(one.about, ()), rank)
        # Ranks that have said the same are read once, however many they are.
        read = {about: pickle.loads(about) for about in ranks_of}
        if len({options for options, _ in read.values()}) > 1:
            told = in_words([read[one.about][0] for one in said])
            raise RankError(f"{self.what} is not the same on all ranks. {told}. Give every rank the same.")
        alike: list[tuple[tuple[int, ...], tuple[NamedPart, ...]]] = [
            (ranks, read[about][1]) for about, ranks in ranks_of.items()
        ]
        sent = {rank: found for ranks, parts in alike for found in [_slices(parts)] for rank in ranks}
        first: dict[str, NamedPart] = {}
        holders: dict[str, tuple[int, ...]] = {}
        shards: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        flags: list[tuple[list[bool], list[bool]]] = []
        for ranks, parts in alike:
            is_own, counts = [], []
            for part in parts:
                _check_size(first.setdefault(part.name, part), part, ranks[0])
                holders[part.name] = holders.get(part.name, ()) + ranks
                known, shard = shards[part.name], self._shard(part.shard, said, sent)
                is_own.append(shard is None)
                counts.append(shard is None or shard not in known)  # of ranks with one shard, the first counts
                known[shard] = known[shard] + len(ranks) if shard is None else 1
            flags.append((is_own, counts))
        slices = _slices(first.values())
        holdings = {
            name: Holding(*slices[name], tuple(sorted(ranks)), sum(shards[name].values()))
            for name, ranks in holders.items()
        }
        return holdings, [_places(*each, *both, slices) for each, both in zip(alike, flags, strict=True)]

    def _shard(self, shard: Hashable, said: list[_Said], sent: Mapping[int, _Slices]) -> Hashable:
        """Return the shard that ranks with this declaration share; None if each has numbers of its own.

        ``sent`` has the places of the numbers that each rank has said.
        """
        if not isinstance(shard, SameIfEqual):
            return shard
        key = shard.by, shard.ranks
        if shard.is_known and key not in self._same:
            self._same[key] = len({_numbers(said[rank], sent[rank].get(shard.by)) for rank in shard.ranks}) == 1
        return ("group", shard.ranks) if self._same.get(key) else None


def _slices(parts: Iterable[NamedPart]) -> _Slices:
    """Return where the numbers of each name are, one name after the other."""
    found: _Slices = {}
    added = kept = 0
    for part in parts:
        found[part.name] = slice(added, added + part.added), slice(kept, kept + part.kept)
        added, kept = added + part.added, kept + part.kept
    return found


def _places(
    ranks: tuple[int, ...], parts: Sequence[NamedPart], is_own: list[bool], counts: list[bool], slices: _Slices
) -> _Places:
    """Return the places in the sum, whose ``slices`` are given, of the numbers of ranks that have the same parts."""
    sizes = [part.added for part in parts]
    return _Places(
        ranks,
        np.repeat(np.array(is_own, dtype=bool), sizes),
        np.repeat(np.array(counts, dtype=bool), sizes),
        _index([slices[part.name][0] for part, is_counted in zip(parts, counts, strict=True) if is_counted]),
        _index([slices[part.name][1] for part in parts]),
    )


def _index(slices: list[slice]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(each.start, each.stop) for each in slices] or [np.zeros(0, dtype=np.int64)])


def _numbers(said: _Said, found: tuple[slice, slice] | None) -> bytes | None:
    """Return the numbers that a rank has of one name; None if it has none."""
    return None if found is None else said.added[found[0]].tobytes() + said.kept[found[1]].tobytes()


def _check_size(first: NamedPart, part: NamedPart, rank: int) -> None:
    if (first.added, first.kept) != (part.added, part.kept):
        raise RankError(
            f"{part.name!r} has not the same size on all ranks: {part.added} + {part.kept} numbers on rank {rank}, "
            f"{first.added} + {first.kept} before it. Give every rank the same options."
        )


# -- metrics, by the rule that each declares -----------------------------------------------------------------------


_BY_RULE: Final[Mapping[str, Callable[[NDArray[np.float64]], Any]]] = {
    "mean": lambda values: np.mean(values, axis=0),
    "sum": lambda values: np.sum(values, axis=0),
    "max": lambda values: np.max(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
    "l2": lambda values: np.sqrt(np.sum(values * values, axis=0)),
}
RULES: Final = (*_BY_RULE, "concat", "none")


def check_rule(rule: str) -> str:
    """Return ``rule`` if it is one of `RULES`; raise `OptionError` if not."""
    if rule not in RULES:
        known = ", ".join(map(repr, RULES))
        raise OptionError(f"Unknown reduction {rule!r}{suggest(rule, RULES) or '.'} There are {known}.")
    return rule


def reduce_records(records: Sequence[Mapping[str, Any]], rule_of: Callable[[str], str]) -> dict[str, Any]:
    """Return one record of those of all ranks; names in the order in which the first rank has them."""
    names = dict.fromkeys(name for record in records for name in record)
    return {
        name: reduce_values(name, rule_of(name), [record[name] for record in records if name in record])
        for name in names
    }


def reduce_values(name: str, rule: str, values: Sequence[Any]) -> Any:
    """Return one value of those that ranks have; of texts, that of the first rank.

    Whole numbers stay whole where they can. NaN on one rank is NaN.
    """
    if rule == "concat":
        return list(values)
    there = [value for value in values if value is not None]
    if rule == "none" or not there:
        return values[0]
    if all(isinstance(value, dict) for value in there):
        keys = dict.fromkeys(key for value in there for key in value)
        return {key: reduce_values(name, rule, [value[key] for value in there if key in value]) for key in keys}
    if all(isinstance(value, list) for value in there):
        if len({len(value) for value in there}) > 1:
            raise RankError(
                f"The metric {name!r} is a list of {' and '.join(str(len(value)) for value in there)} values on the "
                f"ranks, of which there is no {rule}. Next: declare reduce = 'concat' or 'none'."
            )
        if not all(_is_number(item) for value in there for item in value):
            return [reduce_values(name, rule, column) for column in zip(*there, strict=True)]
    elif not all(map(_is_number, there)):
        return there[0]
    found = _BY_RULE[rule](np.asarray(there, dtype=np.float64)).tolist()
    items = there if not isinstance(found, list) else [item for value in there for item in value]
    return _whole(found) if all(isinstance(item, int) for item in items) else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if value.is_integer() else value
