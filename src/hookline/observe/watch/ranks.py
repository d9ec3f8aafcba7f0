"""Reduce the statistics of a watch over all ranks: those of one process that has seen the whole batch.

`Watch.to_metrics` calls it on every rank of a distributed run. Columns that are added are summed, replicas counted
once; of the others the largest is kept. An `Exchange` gathers the numbers of all ranks, and adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from hookline.distributed.ranks import gather_objects, is_distributed, rank_count, rank_names, this_rank
from hookline.distributed.reduce import Exchange, Holding, NamedPart, Reduced, SameIfEqual
from hookline.distributed.shards import Placed, activation_shard, parameter_shard, tensor_parallel_ranks
from hookline.errors import RankError
from hookline.observe.watch.row import FIRES, SQUARES, SUM, metrics_of
from hookline.observe.watch.units import BY_UNIT, AliveUnits, ExponentBins
from hookline.sites.targets import select

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hookline.hook_types import Target
    from hookline.observe.watch.engine import StatsEngine, StatsSnapshot
    from hookline.observe.watch.place import WatchedPlace
    from hookline.observe.watch.row import Layout

__all__ = ["DeclaredShards", "RankStats", "rank_in_words", "same_on_ranks"]

_PARAMETERS: Final = ("param", "param_grad")
_LOCAL: Final = "param_grad_local"
_UNITS: Final = "\x1f"
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
        self._parts: tuple[list[tuple[WatchedPlace, Placed | None]], list[NamedPart]] = [], []
        """The parts of places as they lay on their meshes, as long as they stay the same."""
        self._known: set[WatchedPlace] = set()
        """Places that have had numbers to compare with those of other ranks."""
        self._widths: dict[str, int] = {}
        self._checked: dict[str, Holding] | None = None
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
        more_parts, more_added, more_kept = self._beside(snapshot, parts)
        reduced = self._exchange.reduce(
            [*parts, *more_parts],
            np.concatenate([added.reshape(-1), *more_added]),
            np.concatenate([kept.reshape(-1), *more_kept]),
        )
        if reduced.holdings is not self._checked:
            self._check(reduced.holdings)
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
        """Return the part of each place; the same list as long as nothing has changed."""
        layout = self._engine.layout
        state = [(place, place.placed) for place in snapshot.places]
        parts = self._parts[1]
        if self._parts[0] != state or any(isinstance(part.shard, SameIfEqual) for part in parts):
            sizes = len(layout.added), len(layout.kept) + 1
            pairs = zip(snapshot.places, snapshot.rows, strict=True)
            parts = [NamedPart(place.label, *sizes, self._shard(place, row)) for place, row in pairs]
            self._parts = state, parts
        return parts

    def _shard(self, place: WatchedPlace, row: NDArray[np.float64]) -> Hashable:
        if place.kind == _LOCAL:
            return None
        if place.kind in _PARAMETERS:
            return "replicated" if place.placed is None else parameter_shard(place.placed)
        if place.name in self._declared.sharded:
            return None
        group = self._group
        if place.name in self._declared.replicated:
            return ("group", group or tuple(range(rank_count())))
        if place.placed is not None:
            return activation_shard(place.placed)
        if not group:
            return None
        # Zeros are equal on all ranks, whatever they hold: a layer that begins with zeros is compared again later.
        kept = len(self._engine.layout.added)
        if any(number and abs(number) != math.inf for number in (row[SUM], row[SQUARES], row[kept], row[kept + 1])):
            self._known.add(place)  # what is not kept stays -inf
        return SameIfEqual(group, place.label, place in self._known)

    @cached_property
    def _group(self) -> tuple[int, ...]:
        """The tensor-parallel group of this rank."""
        return tensor_parallel_ranks(self._model)

    def _beside(
        self, snapshot: StatsSnapshot, of_places: list[NamedPart]
    ) -> tuple[list[NamedPart], list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        """Return what is kept per unit, as parts and their numbers; histograms are added."""
        parts: list[NamedPart] = []
        added: list[NDArray[np.float64]] = []
        kept: list[NDArray[np.float64]] = []
        shards = dict(zip(snapshot.places, [part.shard for part in of_places], strict=True))
        for place, found in snapshot.beside.items():
            for one, values in zip(place.beside, found, strict=True):
                label = f"{place.label}{_UNITS}{one.name}"
                width = self._widths[label] = len(values) or self._widths.get(label, 0)
                if not width:
                    continue
                numbers = np.array(values or [0.0] * width)
                shard = shards[place]
                if one.name == AliveUnits.name:
                    # The width is part of the name: ranks whose units differ are found out, and not mixed.
                    parts.append(NamedPart(f"{label}{_UNITS}{width}", 0, width, shard))
                    kept.append(numbers)
                else:
                    parts.append(NamedPart(label, width, 0, shard))
                    added.append(numbers)
        return parts, added, kept

    # -- what all ranks hold ---------------------------------------------------------------------------------

    def _check(self, holdings: dict[str, Holding]) -> None:
        """Raise if a rank lacks modules that the others have; note the places that cannot be reduced."""
        self.left_out = {}
        inner = _without_containers({label for label in holdings if _kind(label) and _UNITS not in label})
        labels: dict[tuple[int, ...], set[str]] = {}
        for label, held in holdings.items():
            if label in inner:
                labels.setdefault(held.ranks, set()).add(label)
        stage_of = {rank: frozenset(each for each in labels if rank in each) for rank in range(rank_count())}
        first = {stage: rank for rank, stage in sorted(stage_of.items(), reverse=True)}
        _check_stages({frozenset().union(*(labels[each] for each in stage)): rank for stage, rank in first.items()})
        outer = [label for label in holdings if _kind(label) in ("forward", "backward") and label not in inner]
        for label in outer:
            if len({stage_of[rank] for rank in holdings[label].ranks}) > 1:
                self.left_out[label] = _SEVERAL_STAGES
        self._checked = holdings

    def _metrics(self, reduced: Reduced) -> dict[str, Any]:
        holdings, layout = reduced.holdings, self._engine.layout
        labels = [label for label in holdings if label.partition(_UNITS)[0] not in self.left_out]
        places = [label for label in labels if _UNITS not in label]
        added = _rows(reduced.added, [holdings[label].added.start for label in places], len(layout.added))
        kept = _rows(reduced.kept, [holdings[label].kept.start for label in places], len(layout.kept) + 1)
        # Each rank's own gradient is a firing; of anything else, one process would have fired once on the whole batch.
        is_local = np.array([_kind(label) == _LOCAL for label in places], dtype=bool)
        added[:, FIRES] = np.where(is_local, added[:, FIRES], kept[:, -1])
        rows = np.concatenate([added, kept[:, :-1]], axis=1)
        metrics: dict[str, Any] = dict(metrics_of(rows, layout, [f"{label}/" if label else "" for label in places]))
        for label in labels:
            place, _, statistic = label.partition(_UNITS)
            name = statistic.partition(_UNITS)[0]
            if name == ExponentBins.name:
                values = reduced.added[holdings[label].added]
            elif name != AliveUnits.name:
                continue
            elif holdings[label].shards > 1 and self._group:
                self.left_out[f"{place}/{name}"] = _SPLIT_UNITS
                continue
            else:
                values = reduced.kept[holdings[label].kept]
            metrics[f"{place}/{name}" if place else name] = BY_UNIT[name].as_metric(values.tolist())
        return metrics


def _rows(numbers: NDArray[np.float64], starts: list[int], width: int) -> NDArray[np.float64]:
    """Return the rows of ``width`` numbers that begin at ``starts``."""
    found: NDArray[np.float64] = numbers[np.array(starts, dtype=np.int64).reshape(-1, 1) + np.arange(width)]
    return found


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
