"""Reduce numbers of all ranks by name: one SUM and one MAX, whatever the number of names.

`Watch` and `metric_rules` call it. Ranks agree once which names there are, how many numbers each has, and which ranks
hold the same shard, by `agreement`; `channels` does the communication.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from weakref import WeakSet

import numpy as np
import torch

import hookline
from hookline.distributed.agreement import Agreed, Declaration, NamedPart, agree
from hookline.distributed.channels import SAME_CALLS, Connections, at_places, connections
from hookline.distributed.ranks import gather_objects, in_words, is_distributed, rank_names, this_rank
from hookline.errors import RankError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Exchange", "Reduced"]

_HEADER: Final = 3
"""Numbers ahead of the MAX buffer: a flag, the digest of what was agreed, and its complement."""
_STEADY, _NEW_NAMES, _FAILED = 0, 1, 2
_made: Counter[str] = Counter()
_exchanges: WeakSet[Exchange] = WeakSet()
"""Those that are in use. All reductions are as wide as the widest of them."""


class Reduced(NamedTuple):
    """The numbers of all ranks: by ``agreed.holdings[name]``, slices of ``added`` and ``kept``."""

    agreed: Agreed
    added: NDArray[np.float64]
    kept: NDArray[np.float64]


class Exchange:
    """Reduces the numbers of all ranks.

    Recipe::

        exchange = Exchange("my statistics", {"stats": ["mean"]})
        parts = [NamedPart("layers.0", added=2, kept=1)]
        reduced = exchange.reduce(parts, np.array([count, total]), np.array([largest]))
        count, total = reduced.added[reduced.agreed.holdings["layers.0"].added]

    All ranks have to make it, and call `reduce`, in the same order. Once names are agreed, a call is two collectives.

    Args:
        what: A few words for errors.
        options: Values that have to be the same on all ranks; ranks that differ are named in a `RankError`.
    """

    def __init__(self, what: str, options: Mapping[str, Any] | None = None) -> None:
        _made[what] += 1
        _exchanges.add(self)
        self.what = what if _made[what] == 1 else f"{what} ({_made[what]})"
        self._options = {key: repr(value) for key, value in (options or {}).items()}
        self._agreed: Agreed | None = None
        self._connections: Connections | None = None
        self._code = int.from_bytes(hashlib.sha256(self.what.encode()).digest()[:7], "big")

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
            added: Numbers to add up; those of ranks with the same shard count once. Whole numbers stay exact.
            kept: Numbers of which to keep the largest; NaN is larger than any.
            failure: What went wrong on this rank, if something did. Every rank then raises `RankError`.
        """
        mine = tuple(parts)
        if not is_distributed():
            if failure:
                raise RankError(f"{self.what}: {failure}", ranks=(0,))
            own = Declaration.of(mine)
            return Reduced(agree(mine, [(own.names, own.shards)], 0), added, kept)
        if self._connections is not connections():
            self._agreed, self._connections = None, connections()
        if self._agreed is None:
            self._agreed = self._new_agreement(mine, failure)
        flag = _FAILED if failure else _NEW_NAMES if mine != self._agreed.mine else _STEADY
        found = self._reduce(self._agreed, added, kept, flag)
        if found is None:
            self._agreed = self._new_agreement(mine, failure)
            found = self._reduce(self._agreed, added, kept, _STEADY)
            assert found is not None
        return found

    def _reduce(
        self, agreed: Agreed, added: NDArray[np.float64], kept: NDArray[np.float64], flag: int
    ) -> Reduced | None:
        """Return the numbers of all ranks; None if some rank has new names, or has failed."""
        connected = connections()
        num_added, num_kept = connected.width
        largest = torch.full((_HEADER + num_kept,), _LEAST, dtype=torch.int64)
        view: NDArray[np.int64] = largest.numpy()
        code = agreed.digest ^ self._code
        view[:_HEADER] = flag, code, -code
        total = torch.zeros(num_added, dtype=torch.float64)
        if flag == _STEADY:
            view[_HEADER + agreed.kept_index] = _as_ordered(kept)
            total.numpy()[agreed.added_index] = added * agreed.added_factor
        connected.channel("reduce", self.what).reduce(total, largest, self.what)
        if view[1] != -view[2]:
            self._raise_of_places(connected)
        if view[0]:
            return None
        found = view[_HEADER : _HEADER + agreed.kept]
        return Reduced(agreed, total.numpy()[: agreed.added] / agreed.divisor, _from_ordered(found))

    def _raise_of_places(self, connected: Connections) -> NoReturn:
        """Raise, on every rank, the error that says which rank was reducing what."""
        said = connected.channel("gather", self.what).gather(self.what, self.what)
        if len(set(said)) == 1:
            raise RankError(f"{self.what}: ranks do not have the same names at this call. {SAME_CALLS}")
        places = at_places(dict(enumerate(said)))
        raise RankError(
            f"Ranks met at different places: {places}. {SAME_CALLS} Look for a call that only some ranks make.",
            ranks=_minority(said),
        )

    def _new_agreement(self, mine: tuple[NamedPart, ...], failure: str | None) -> Agreed:
        """Tell all ranks the names of this one; raise on every rank if one failed, or if they cannot go together."""
        own = Declaration.of(mine)
        # Names are the same on most ranks: a digest of them travels, and the shards, of which there are few.
        width = _width_of_others(self)
        said = gather_objects(
            (hookline.__version__, self._options, failure, own.digest, own.shards, width), what=self.what
        )
        _check_versions([each[0] for each in said])
        _check_failures(self.what, [each[2] for each in said])
        _check_options(self.what, [each[1] for each in said])
        digests = [each[3] for each in said]
        different = {digest: digests.index(digest) for digest in dict.fromkeys(digests)}
        if len(different) == 1:
            names = {own.digest: own.names}
        else:
            gather = connections().channel("gather", self.what)
            names = {digest: gather.broadcast(own.names, rank, self.what) for digest, rank in different.items()}
        agreed = agree(
            mine, [(names[digest], each[4]) for digest, each in zip(digests, said, strict=True)], this_rank()
        )
        widths = [(agreed.added, agreed.kept), *(each[5] for each in said)]
        connections().width = max(added for added, _ in widths), max(kept for _, kept in widths)
        return agreed


def _width_of_others(asking: Exchange) -> tuple[int, int]:
    """Return how many numbers the widest of the other exchanges has on this rank."""
    others = [each._agreed for each in _exchanges if each is not asking and each._connections is asking._connections]
    agreed = [each for each in others if each is not None]
    return max((each.added for each in agreed), default=0), max((each.kept for each in agreed), default=0)


# -- what ranks must have in common ------------------------------------------------------------------------------------


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


# -- the order of numbers ------------------------------------------------------------------------------------

_LEAST: Final = torch.iinfo(torch.int64).min + 1


def _as_ordered(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return whole numbers in the same order, with NaN above infinity; a MAX of floats may lose NaN."""
    clean = np.where(np.isnan(numbers), np.nan, numbers)  # a NaN with a sign would be below everything
    bits: NDArray[np.int64] = np.ascontiguousarray(clean, dtype=np.float64).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(0x7FFFFFFFFFFFFFFF), bits)


def _from_ordered(whole: NDArray[np.int64]) -> NDArray[np.float64]:
    bits = np.where(whole < 0, whole ^ np.int64(0x7FFFFFFFFFFFFFFF), whole)
    numbers = bits.view(np.float64)
    return np.where(whole == _LEAST, -np.inf, numbers)
