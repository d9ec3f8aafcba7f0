"""Reduce the statistics of a watch over all ranks: those of one process that has seen the whole batch.

`Watch.to_metrics` calls it on every rank of a distributed run. Columns that are added are summed, replicas counted
once; of the others the largest is kept. What ranks hold, and which are replicas, is agreed once by an `Exchange`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from hookline.distributed.agreement import Agreed, NamedPart, SameIfEqual
from hookline.distributed.exchange import Exchange, Reduced
from hookline.distributed.ranks import gather_objects, is_distributed, rank_count, rank_names, this_rank
from hookline.distributed.shards import Placed, activation_shard, parameter_shard, tensor_parallel_ranks
from hookline.errors import RankError
from hookline.observe.watch.stat_columns import MetricTable
from hookline.observe.watch.stat_rows import AliveUnits, ExponentBins
from hookline.sites.targets import select

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hookline.hook_types import Target
    from hookline.observe.watch.stat_columns import Layout
    from hookline.observe.watch.stats_engine import StatsEngine, StatsSnapshot, WatchedPlace

__all__ = ["DeclaredShards", "RankStats", "rank_in_words", "same_on_ranks"]

_PARAMETERS: Final = ("param", "param_grad")
_LOCAL: Final = "param_grad_local"
_BESIDE: Final[dict[str, type[AliveUnits | ExponentBins]]] = {each.name: each for each in (AliveUnits, ExponentBins)}
_BY_UNIT: Final = "\x1f"
"""Stands between a label and what is kept per unit; no name of a module has it."""
_SEVERAL_STAGES: Final = "ranks hold different parts of this module (stages of a pipeline), so there is no one output"
_SPLIT_UNITS: Final = (
    "dead_fraction is left out: ranks of a tensor-parallel group hold different numbers here, and nothing says whether "
    "of the same units"
)


class DeclaredShards(NamedTuple):
    """The modules whose activations the user has declared."""

    replicated: frozenset[str]
    """Names of modules whose activations are the same on all ranks of a tensor-parallel group."""
    sharded: frozenset[str]
    """Names of modules of whose activations each rank has a part."""

    @classmethod
    def of(cls, model: nn.Module, replicated: Target = None, sharded: Target = None) -> DeclaredShards:
        """Return the names of the modules that the two targets select."""
        chosen = [[] if target is None else select(model, target) for target in (replicated, sharded)]
        return cls(*(frozenset(name for name, _ in each) for each in chosen))


class RankStats:
    """The statistics of one watch on all ranks.

    Args:
        engine: The statistics of this rank.
        model: The model, for its tensor-parallel groups.
        options: What has to be the same on all ranks.
        declared: Which activations are replicas, or are none.
    """

    def __init__(
        self,
        engine: StatsEngine,
        model: nn.Module,
        options: Mapping[str, Any] | None = None,
        declared: DeclaredShards | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._options = options
        self._declared = declared or DeclaredShards(frozenset(), frozenset())
        self._group: tuple[int, ...] | None = None
        self._parts: dict[WatchedPlace, _CachedPart] = {}
        self._last: _LastParts | None = None
        self._widths: dict[str, int] = {}
        self._checked: Agreed | None = None
        self._rows: _ReducedRows | None = None
        self.left_out: dict[str, str] = {}
        """Why the statistics of a place are not reduced over ranks, by its label."""

    @cached_property
    def _exchange(self) -> Exchange:
        # Not before it is needed: exchanges are told apart by the order in which ranks make them.
        return Exchange(f"watch of {type(self._model).__name__}", self._options)

    def to_metrics(self, snapshot: StatsSnapshot) -> dict[str, Any]:
        """Return every statistic of all ranks; every rank has to call it."""
        layout = self._engine.layout
        num_added = len(layout.added)
        parts = self._parts_of(snapshot)
        added, kept = snapshot.rows[:, :num_added], snapshot.rows[:, num_added:]
        # Firings are not added: one process would have fired once, on the whole batch.
        kept = np.concatenate([kept, snapshot.rows[:, :1]], axis=1)
        more_parts, more_added, more_kept = self._beside(snapshot)
        reduced = self._exchange.reduce(
            [*parts, *more_parts],
            np.concatenate([added.reshape(-1), *more_added]),
            np.concatenate([kept.reshape(-1), *more_kept]),
        )
        if reduced.agreed is not self._checked:
            self._check(reduced.agreed)
        return self._metrics(reduced)

    def per_rank(self, metrics: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Return ``metrics`` with the values of each rank beside them, given this rank's ``own``; one more gather."""
        said = gather_objects(own, what=f"{self._exchange.what}, values per rank")
        found: dict[str, Any] = {}
        for name in dict.fromkeys((*metrics, *(each for of_rank in said for each in of_rank))):
            if name in metrics:
                found[name] = metrics[name]
            values = {rank: of_rank[name] for rank, of_rank in enumerate(said) if name in of_rank}
            found[f"{name}/per_rank"] = [values.get(rank) for rank in range(len(said))]
            numbers = {rank: value for rank, value in values.items() if isinstance(value, int | float)}
            if numbers:
                found[f"{name}/min_rank"] = min(numbers, key=lambda rank: _order(numbers[rank]))
                found[f"{name}/max_rank"] = max(numbers, key=lambda rank: _order(numbers[rank]))
        return found

    # -- what this rank holds --------------------------------------------------------------------------------

    def _parts_of(self, snapshot: StatsSnapshot) -> list[NamedPart]:
        """Return the part of each place; the same list as long as nothing has changed, which takes 40 µs to see."""
        places, state = snapshot.places, [place.placed for place in snapshot.places]
        if self._last is None or self._last.places != places or self._last.state != state:
            parts = [self._part(place, row) for place, row in zip(places, snapshot.rows, strict=True)]
            is_final = all(cached.is_final for cached in self._parts.values())
            self._last = _LastParts(places, state, parts) if is_final else None
            return parts
        return self._last.parts

    def _part(self, place: WatchedPlace, row: NDArray[np.float64]) -> NamedPart:
        cached = self._parts.get(place)
        if cached is not None and cached.placed is place.placed and cached.is_final:
            return cached.part
        layout = self._engine.layout
        shard = self._shard(place, row)
        is_final = not isinstance(shard, SameIfEqual) or shard.is_known
        part = NamedPart(place.label, len(layout.added), len(layout.kept) + 1, shard)
        self._parts[place] = _CachedPart(part, place.placed, is_final)
        return part

    def _shard(self, place: WatchedPlace, row: NDArray[np.float64]) -> Hashable:
        if place.kind == _LOCAL:
            return None
        if place.kind in _PARAMETERS:
            return "replicated" if place.placed is None else parameter_shard(place.placed)
        if place.name in self._declared.sharded:
            return None
        group = self._tensor_parallel()
        if place.name in self._declared.replicated:
            return ("group", group or tuple(range(rank_count())))
        if place.placed is not None:
            return activation_shard(place.placed)
        if not group:
            return None
        # Zeros are equal on all ranks, whatever they hold: a layer that begins with zeros is compared again later.
        cells = dict(zip(self._engine.layout.names, row, strict=False))
        numbers = [cells[name] for name in ("sum", "squares", "-min", "max")]
        is_known = any(number and abs(number) != math.inf for number in numbers)  # what is not kept stays -inf
        return SameIfEqual(group, is_known, hashlib.sha256(row.tobytes()).digest()[:8])

    def _tensor_parallel(self) -> tuple[int, ...]:
        if self._group is None:
            self._group = tensor_parallel_ranks(self._model)
        return self._group

    def _beside(
        self, snapshot: StatsSnapshot
    ) -> tuple[list[NamedPart], list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        """Return what is kept per unit, as parts and their numbers; histograms are added."""
        parts: list[NamedPart] = []
        added: list[NDArray[np.float64]] = []
        kept: list[NDArray[np.float64]] = []
        for place, found in snapshot.beside.items():
            for one, values in zip(place.beside, found, strict=True):
                label = f"{place.label}{_BY_UNIT}{one.name}"
                width = self._widths[label] = len(values) or self._widths.get(label, 0)
                if not width:
                    continue
                numbers = np.array(values or [0.0] * width)
                shard = self._parts[place].part.shard
                if one.name == AliveUnits.name:
                    # The width is part of the name: ranks whose units differ are found out, and not mixed.
                    parts.append(NamedPart(f"{label}{_BY_UNIT}{width}", 0, width, shard))
                    kept.append(numbers)
                else:
                    parts.append(NamedPart(label, width, 0, shard))
                    added.append(numbers)
        return parts, added, kept

    # -- what all ranks hold ---------------------------------------------------------------------------------

    def _check(self, agreed: Agreed) -> None:
        """Raise if a rank lacks modules that the others have; note the places that cannot be reduced."""
        self.left_out = {}
        inner = _without_containers({label for label in agreed.holdings if _kind(label) and _BY_UNIT not in label})
        labels: dict[tuple[int, ...], set[str]] = {}
        for label, held in agreed.holdings.items():
            if label in inner:
                labels.setdefault(held.ranks, set()).add(label)
        stage_of = {rank: frozenset(each for each in labels if rank in each) for rank in range(rank_count())}
        first = {stage: rank for rank, stage in sorted(stage_of.items(), reverse=True)}
        _check_stages({frozenset().union(*(labels[each] for each in stage)): rank for stage, rank in first.items()})
        outer = [label for label in agreed.holdings if _kind(label) in ("forward", "backward") and label not in inner]
        for label in outer:
            if len({stage_of[rank] for rank in agreed.holdings[label].ranks}) > 1:
                self.left_out[label] = _SEVERAL_STAGES
        self._checked = agreed

    def _metrics(self, reduced: Reduced) -> dict[str, Any]:
        if self._rows is None or self._rows.agreed is not reduced.agreed:
            self._rows = _ReducedRows(reduced.agreed, self._engine.layout, self.left_out)
        metrics = self._rows.metrics(reduced)
        for label in self._rows.by_unit:
            place, _, statistic = label.partition(_BY_UNIT)
            self._add_beside(metrics, f"{place}/" if place else "", statistic, reduced, label)
        return metrics

    def _add_beside(self, metrics: dict[str, Any], prefix: str, statistic: str, reduced: Reduced, label: str) -> None:
        held = reduced.agreed.holdings[label]
        name = statistic.partition(_BY_UNIT)[0]
        if name == ExponentBins.name:
            values = reduced.added[held.added]
        elif held.shards > 1 and self._tensor_parallel():
            self.left_out[label.partition(_BY_UNIT)[0] + "/dead_fraction"] = _SPLIT_UNITS
            return
        else:
            values = reduced.kept[held.kept]
        if name == ExponentBins.name or values.size:
            metrics[prefix + name] = _BESIDE[name].as_metric(values.tolist())


def rank_in_words() -> list[str]:
    """Return the line that says which rank a table shows; none without ranks."""
    if not is_distributed():
        return []
    return [f"rank {this_rank()} of {rank_count()} alone; to_metrics(), called on every rank, gives all together"]


def same_on_ranks(target: Any, exclude: Any, kinds: Iterable[str], layout: Layout, every: Any) -> dict[str, Any]:
    """Return the options of a watch that have to be the same on all ranks, in a form that can be compared."""
    return {
        "target": _comparable(target),
        "exclude": _comparable(exclude),
        "on": tuple(kinds),
        "stats": layout.stats,
        "every": every,
    }


def _comparable(target: Any) -> Any:
    """Return names and patterns as they are; of objects, which are not the same on two ranks, their types."""
    if target is None or isinstance(target, str | type):
        return target
    if isinstance(target, list | tuple):
        return [_comparable(each) for each in target]
    return type(target).__name__


class _ReducedRows:
    """Finds the rows of places in the buffers that all ranks agreed on."""

    def __init__(self, agreed: Agreed, layout: Layout, left_out: Mapping[str, str]) -> None:
        self.agreed = agreed
        labels = [label for label in agreed.holdings if label.partition(_BY_UNIT)[0] not in left_out]
        self.by_unit = [label for label in labels if _BY_UNIT in label]
        """What is kept per unit."""
        places = [label for label in labels if _BY_UNIT not in label]
        held = [agreed.holdings[label] for label in places]
        self._added = _positions([each.added.start for each in held], len(layout.added))
        self._kept = _positions([each.kept.start for each in held], len(layout.kept) + 1)
        # Each rank's own gradient is a firing; of anything else, one process would have fired once on the whole batch.
        self._by_rank = np.array([_kind(label) == _LOCAL for label in places], dtype=bool)
        self._table = MetricTable(layout, [f"{label}/" if label else "" for label in places])

    def metrics(self, reduced: Reduced) -> dict[str, Any]:
        """Return the metrics of all places."""
        rows = np.concatenate([reduced.added[self._added], reduced.kept[self._kept]], axis=1)
        rows[:, 0] = np.where(self._by_rank, rows[:, 0], rows[:, -1])
        return self._table.metrics(rows[:, :-1])


def _positions(starts: list[int], width: int) -> NDArray[np.int64]:
    return np.array(starts, dtype=np.int64).reshape(-1, 1) + np.arange(width)


class _LastParts(NamedTuple):
    places: list[WatchedPlace]
    state: list[Placed | None]
    parts: list[NamedPart]


class _CachedPart(NamedTuple):
    part: NamedPart
    placed: Placed | None
    is_final: bool
    """Whether it stays the same for as long as the placement does."""


def _kind(label: str) -> str:
    """Return the kind in a label; nothing for a value of the user's own, which has none."""
    last = label.rpartition("/")[2]
    return last if last in ("forward", "backward", *_PARAMETERS, _LOCAL) else ""


def _without_containers(labels: set[str]) -> set[str]:
    """Return the labels of parameters and of modules that have no other labelled module inside."""
    names = {label.rpartition("/")[0] for label in labels if _kind(label) in ("forward", "backward")}
    outer = {""} if len(names) > 1 else set()
    for name in names:
        parts = name.split(".")
        outer |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return {
        label
        for label in labels
        if _kind(label) not in ("forward", "backward") or label.rpartition("/")[0] not in outer
    }


def _check_stages(stages: Mapping[frozenset[str], int]) -> None:
    """Raise if two ranks have most, but not all, places in common: one lacks a module, or has one too many.

    Stages of a pipeline have next to nothing in common.
    """
    all_stages = list(stages.items())
    for index, (names, rank) in enumerate(all_stages):
        for other_names, other in all_stages[:index]:
            if 2 * len(names & other_names) > min(len(names), len(other_names)):
                low, high = sorted((rank, other))
                of = {rank: names, other: other_names}
                told = "; ".join(
                    f"{rank_names([one])} has no {_some(of[another] - of[one])}"
                    for one, another in ((low, high), (high, low))
                    if of[another] - of[one]
                )
                raise RankError(
                    f"Ranks do not watch the same places: {told}. Build the same model on every rank; stages of a "
                    f"pipeline need names of their own, as in the whole model.",
                    ranks=(low, high),
                )


def _some(labels: frozenset[str]) -> str:
    shown = sorted(labels)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(map(repr, shown[:3])) + more


def _order(value: float) -> tuple[bool, float]:
    """Return what to sort values by: NaN is larger than any number, so that its rank is named."""
    is_nan = value != value
    return is_nan, 0.0 if is_nan else value
