"""Make one number of those of all ranks: gather them, and add them up in NumPy.

`Exchange` is for statistics, of which ranks may hold shards or replicas: `Watch` calls it. `reduce_metrics` is for
metrics, by the rule that each declares; ``lifecycle.ranks`` gathers records by itself and calls `reduce_records`.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import hookline
from hookline.distributed.ranks import gather_objects, in_words, rank_names
from hookline.errors import OptionError, RankError
from hookline.messages import suggest

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "Exchange",
    "Holding",
    "NamedPart",
    "Reduced",
    "SameIfEqual",
    "check_rule",
    "reduce_metrics",
    "reduce_records",
    "reduce_values",
]

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

    version: str
    about: bytes
    """Options and parts: as bytes, they are compared at once, and read only when they have changed."""
    failure: str | None
    added: NDArray[np.float64]
    kept: NDArray[np.float64]


class Exchange:
    """Reduces the numbers of all ranks.

    Recipe::

        exchange = Exchange("my statistics", {"stats": ["mean"]})
        parts = [NamedPart("layers.0", added=2, kept=1)]
        reduced = exchange.reduce(parts, np.array([count, total]), np.array([largest]))
        count, total = reduced.added[reduced.holdings["layers.0"].added]

    All ranks have to make it, and call `reduce`, in the same order.

    Args:
        what: A few words for errors.
        options: Values that have to be the same on all ranks; ranks that differ are named in a `RankError`.
    """

    def __init__(self, what: str, options: Mapping[str, Any] | None = None) -> None:
        _made[what] += 1
        self.what = what if _made[what] == 1 else f"{what} ({_made[what]})"
        self._options = {key: repr(value) for key, value in (options or {}).items()}
        self._mine: tuple[NamedPart, ...] = ()
        self._about = pickle.dumps((self._options, ()))
        self._plans: tuple[list[bytes], dict[str, Holding], list[_Places]] = [], {}, []
        """What ranks said of their parts last, and where the numbers of each go."""
        self._same: dict[tuple[str, tuple[int, ...]], bool] = {}
        """By name and ranks, whether these hold the same; decided once, by the first numbers."""

    def reduce(
        self,
        parts: Sequence[NamedPart],
        added: NDArray[np.float64],
        kept: NDArray[np.float64],
        *,
        failure: str | None = None,
    ) -> Reduced:
        """Return the sums of ``added`` and the largest of ``kept`` over all ranks, for every name of any rank.

        Args:
            parts: The names of this rank, in the order of their numbers.
            added: Numbers to add up; of ranks with the same shard, those of the first. Whole numbers stay exact.
            kept: Numbers of which to keep the largest; NaN is larger than any.
            failure: What went wrong on this rank, if something did. Every rank then raises `RankError`.
        """
        mine = tuple(parts)
        if mine != self._mine:
            self._mine, self._about = mine, pickle.dumps((self._options, mine))
        own = _Said(hookline.__version__, self._about, failure, added, kept)
        said = [_Said(*each) for each in gather_objects(tuple(own), what=self.what)]
        _check_versions([each.version for each in said])
        _check_failures(self.what, [each.failure for each in said])
        about = [each.about for each in said]
        if about != self._plans[0]:
            self._plans = about, *self._plan(said)
        _, holdings, places = self._plans
        last = next(reversed(holdings.values()), Holding(slice(0, 0), slice(0, 0), (), 0))
        total, largest = np.zeros(last.added.stop), np.full(last.kept.stop, -np.inf)
        for each, where in zip(said, places, strict=True):
            total[where.added] += each.added[where.counts]
            largest[where.kept] = np.maximum(largest[where.kept], each.kept)
        return Reduced(holdings, total, largest)

    def _plan(self, said: list[_Said]) -> tuple[dict[str, Holding], list[_Places]]:
        """Return where the numbers of each name are, and where those of each rank go.

        Ranks that say the same are taken together: one by one, 1,024 ranks with 6,000 names would take half a minute.
        """
        alike: dict[bytes, list[int]] = {}
        for rank, each in enumerate(said):
            alike.setdefault(each.about, []).append(rank)
        read = {about: pickle.loads(about) for about in alike}
        _check_options(self.what, [read[each.about][0] for each in said])
        parts_of: list[tuple[NamedPart, ...]] = [read[each.about][1] for each in said]
        by_name: dict[str, list[tuple[NamedPart, list[int]]]] = {}
        for about, ranks in alike.items():
            for part in read[about][1]:
                by_name.setdefault(part.name, []).append((part, ranks))
        holdings: dict[str, Holding] = {}
        counted: dict[str, set[int]] = {}
        start_added = start_kept = 0
        for name, held in by_name.items():
            added, kept = _size(name, held)
            counted[name] = self._counted(held, said, parts_of)
            ends = start_added + added, start_kept + kept
            holders = tuple(sorted(rank for _, ranks in held for rank in ranks))
            holdings[name] = Holding(
                slice(start_added, ends[0]), slice(start_kept, ends[1]), holders, len(counted[name])
            )
            start_added, start_kept = ends
        known: dict[tuple[bytes, bytes], _Places] = {}
        places = []
        for rank, each in enumerate(said):
            counts = np.array([rank in counted[part.name] for part in parts_of[rank]], dtype=bool)
            key = each.about, counts.tobytes()
            if key not in known:
                known[key] = _Places.of(parts_of[rank], counts, holdings)
            places.append(known[key])
        return holdings, places

    def _counted(
        self, held: list[tuple[NamedPart, list[int]]], said: list[_Said], parts_of: list[tuple[NamedPart, ...]]
    ) -> set[int]:
        """Return the ranks whose numbers of one name are added: the first of each shard."""
        found: set[int] = set()
        first_of: dict[Hashable, int] = {}
        for part, ranks in held:
            shard = part.shard
            if isinstance(shard, SameIfEqual):
                key = shard.by, shard.ranks
                if shard.is_known and key not in self._same:
                    numbers = {_numbers(said[each], parts_of[each], shard.by) for each in shard.ranks}
                    self._same[key] = len(numbers) == 1
                shard = ("group", shard.ranks) if self._same.get(key) else None
            if shard is None:
                found |= set(ranks)
            else:
                first_of[shard] = min(ranks[0], first_of.get(shard, ranks[0]))
        return found | set(first_of.values())


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the numbers of one rank go."""

    counts: NDArray[np.bool_]
    """Which of the numbers to add are added: not those of a shard that a rank before has too."""
    added: NDArray[np.int64]
    """Where these go."""
    kept: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[NamedPart], counts: NDArray[np.bool_], holdings: Mapping[str, Holding]) -> _Places:
        """Return the places of the numbers of a rank, which has ``parts``; ``counts`` says which of them are added."""
        return cls(
            np.repeat(counts, [part.added for part in parts]),
            _index([holdings[part.name].added for part, is_counted in zip(parts, counts, strict=True) if is_counted]),
            _index([holdings[part.name].kept for part in parts]),
        )


def _index(slices: list[slice]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(each.start, each.stop) for each in slices] or [np.zeros(0, dtype=np.int64)])


def _numbers(said: _Said, parts: Sequence[NamedPart], name: str) -> bytes | None:
    """Return the numbers that a rank has of one name; None if it has none."""
    added = kept = 0
    for part in parts:
        if part.name == name:
            return said.added[added : added + part.added].tobytes() + said.kept[kept : kept + part.kept].tobytes()
        added, kept = added + part.added, kept + part.kept
    return None


def _size(name: str, held: Sequence[tuple[NamedPart, list[int]]]) -> tuple[int, int]:
    """Return how many numbers a name has; raise if ranks differ in that."""
    sizes = {(part.added, part.kept): ranks[0] for part, ranks in reversed(held)}
    if len(sizes) > 1:
        words = "; ".join(f"rank {rank}: {added} + {kept} numbers" for (added, kept), rank in sizes.items())
        raise RankError(f"{name!r} has not the same size on all ranks: {words}. Give every rank the same options.")
    return next(iter(sizes))


def _check_failures(what: str, failures: list[str | None]) -> None:
    failed = {rank: text for rank, text in enumerate(failures) if text}
    if failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise RankError(f"{what} failed on {rank_names(tuple(failed))} of {len(failures)}. {told}", ranks=tuple(failed))


def _check_versions(versions: list[str]) -> None:
    if len(set(versions)) > 1:
        raise RankError(
            f"Ranks run different versions of hookline: {in_words(versions)}. Install the same one on every machine.",
            ranks=_minority(versions),
        )


def _check_options(what: str, options: list[dict[str, str]]) -> None:
    if all(each == options[0] for each in options):
        return
    keys = list(dict.fromkeys(key for each in options for key in each))
    different = [key for key in keys if len({each.get(key) for each in options}) > 1]
    told = "; ".join(f"{key}: {in_words([each.get(key, 'absent') for each in options])}" for key in different)
    raise RankError(
        f"{what} is not the same on all ranks. {told}. Give every rank the same.",
        ranks=_minority([repr(each) for each in options]),
    )


def _minority(values: list[str]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most frequent one."""
    most = Counter(values).most_common(1)[0][0]
    return tuple(rank for rank, value in enumerate(values) if value != most)


# -- metrics, by the rule that each declares -----------------------------------------------------------------------


def _l2(values: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.sqrt(np.sum(values * values, axis=0))
    return found


_BY_RULE: Final[Mapping[str, Callable[[NDArray[np.float64]], Any]]] = {
    "mean": lambda values: np.mean(values, axis=0),
    "sum": lambda values: np.sum(values, axis=0),
    "max": lambda values: np.max(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
    "l2": _l2,
}
RULES: Final = (*_BY_RULE, "concat", "none")


def check_rule(rule: str) -> str:
    """Return ``rule`` if it is one of `RULES`; raise `OptionError` if not."""
    if rule not in RULES:
        known = ", ".join(map(repr, RULES))
        raise OptionError(f"Unknown reduction {rule!r}{suggest(rule, RULES) or '.'} There are {known}.")
    return rule


def reduce_metrics(metrics: Mapping[str, Any], rules: Mapping[str, str], what: str = "metrics") -> dict[str, Any]:
    """Return the metrics of all ranks as one dictionary, the same on every rank.

    Recipe: ``reduce_metrics({"loss": 0.3, "tokens": 512}, {"loss": "mean", "tokens": "sum"})``.
    All ranks have to call it. A metric that only some ranks have is reduced over these.

    Args:
        metrics: The metrics of this rank: numbers, lists of numbers, dictionaries of these.
        rules: For each name ``mean`` (each rank counts the same), ``sum``, ``max``, ``min``, ``l2`` (root of the sum of
            squares), ``concat`` (a list with the value of each rank that has it) or ``none``, the value of the first
            rank that has it, which is also the rule of names that are absent here.
        what: A few words for errors: what this rank is doing.
    """
    for rule in rules.values():
        check_rule(rule)
    return reduce_records(gather_objects(dict(metrics), what=what), lambda name: rules.get(name, "none"))


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
