"""Reduce the statistics of a watch over all ranks: those of one process that has seen the whole batch.

Each `Watch` (watch.py) has a `RankStats`. In a distributed run ``Watch.to_metrics`` calls its `to_metrics`;
``Watch.report`` lists its `left_out` under ``"silent"``, and the table of a watch has the line of `rank_in_words`. An
`Exchange` (distributed/reduce.py) gathers the numbers of all ranks and joins them, replicas counted once. Columns that
are added up (row.py) are summed. Of the others, and of the number of firings, the largest is kept.

Every rank has to make the same calls in the same order, because an exchange waits for all.

A label is that of a `WatchedPlace` (engine.py): ``"layers.0/forward"``. Behind its last slash is the kind, which says
how a place is reduced. So each kind of ``watch(on=...)`` is in `_MODULES` or in `_PARAMETERS`; the head of hooks.py
lists what else a new kind needs. A statistic per unit (`BY_UNIT` of engine.py) is added up, like a histogram. One of
which the largest number is kept needs a case in `to_metrics` and one in `_metrics`, as `AliveUnits` has, and a text
such as `_SPLIT_UNITS` where ranks cannot join it. The head of engine.py lists what else it needs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hookline.distributed.ranks import is_distributed, rank_count, this_rank
from hookline.distributed.reduce import Exchange, Holding, NamedPart, Reduced, SameIfEqual
from hookline.distributed.shards import activation_shard, parameter_shard, tensor_parallel_ranks
from hookline.observe.watch.engine import BY_UNIT, AliveUnits, StatsEngine, StatsSnapshot, WatchedPlace
from hookline.observe.watch.row import FIRES, SQUARES, SUM, metrics_of
from hookline.sites.targets import select

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hookline.hook_types import Target
    from hookline.when import StepSchedule

_MODULES: Final = ("forward", "backward")
_PARAMETERS: Final = ("param", "param_grad")
_UNITS: Final = "\x1f"
"""Stands between a label and the name of a statistic that is kept per unit; no name of a module has this character."""
_SEVERAL_STAGES: Final = "ranks hold different parts of this module (stages of a pipeline), so there is no one output"
_SPLIT_UNITS: Final = (
    "dead_fraction is left out: ranks of a tensor-parallel group hold different numbers here, and nothing says whether "
    "of the same units"
)


class RankStats:
    """The statistics of one watch on all ranks.

    Args:
        engine: The statistics of this rank.
        model: The model, for its tensor-parallel groups.
        schedule: The steps that are watched, which have to be the same on all ranks.
        replicated: Modules whose activations are the same on all ranks of a tensor-parallel group.
    """

    def __init__(
        self, engine: StatsEngine, model: nn.Module, schedule: StepSchedule, replicated: Target = None
    ) -> None:
        self._options = f"stats={engine.layout.stats}, every={schedule}"
        self._engine = engine
        self._model = model
        self._replicated = set() if replicated is None else {name for name, _ in select(model, replicated)}
        self._checked: dict[str, Holding] | None = None
        self.left_out: dict[str, str] = {}
        """Why something is not reduced over ranks: by the label of a place, or by that and the name of a statistic."""

    @cached_property
    def _exchange(self) -> Exchange:
        # Not before it is needed: exchanges are told apart by the order in which ranks make them.
        return Exchange(f"watch of {type(self._model).__name__}", self._options)

    def to_metrics(self, snapshot: StatsSnapshot) -> dict[str, Any]:
        """Return every statistic of all ranks; every rank has to call it."""
        num_added = len(self._engine.layout.added)
        sizes = num_added, self._engine.layout.width - num_added + 1
        pairs = list(zip(snapshot.places, snapshot.rows, strict=True))
        shards = {place: self._shard(place, row) for place, row in pairs}
        parts = [NamedPart(place.label, *sizes, shards[place]) for place, _ in pairs]
        added = [snapshot.rows[:, :num_added].reshape(-1)]
        # Firings are not added: one process would have fired once, on the whole batch.
        kept = [np.concatenate([snapshot.rows[:, num_added:], snapshot.rows[:, :1]], axis=1).reshape(-1)]
        for place, one, values in snapshot.beside:
            label, width = f"{place.label}{_UNITS}{one.name}", len(values)
            if one.name == AliveUnits.name:
                # The width is part of the name: ranks whose units differ are found out, and not mixed.
                parts.append(NamedPart(f"{label}{_UNITS}{width}", 0, width, shards[place]))
                kept.append(np.array(values))
            else:  # a histogram, which is added up
                parts.append(NamedPart(label, width, 0, shards[place]))
                added.append(np.array(values))
        reduced = self._exchange.reduce(parts, np.concatenate(added), np.concatenate(kept))
        if reduced.holdings is not self._checked:
            self._check(reduced.holdings)
        return self._metrics(reduced)

    # -- what this rank holds --------------------------------------------------------------------------------

    def _shard(self, place: WatchedPlace, row: NDArray[np.float64]) -> Hashable:
        if place.kind in _PARAMETERS:
            return "replicated" if place.placed is None else parameter_shard(place.placed)
        if place.name in self._replicated:
            return ("group", self._group or tuple(range(rank_count())))
        if place.placed is not None:
            return activation_shard(place.placed)
        if not self._group:
            return None
        # Zeros are equal on all ranks, whatever they hold: a layer that begins with zeros is compared again later.
        kept = len(self._engine.layout.added)
        numbers = row[SUM], row[SQUARES], row[kept], row[kept + 1]  # what is not kept stays -inf
        return SameIfEqual(self._group, place.label, any(number and abs(number) != math.inf for number in numbers))

    @cached_property
    def _group(self) -> tuple[int, ...]:
        """The tensor-parallel group of this rank."""
        return tensor_parallel_ranks(self._model)

    # -- what all ranks hold ---------------------------------------------------------------------------------

    def _check(self, holdings: dict[str, Holding]) -> None:
        """Note the modules with others inside of them that ranks do not have in common: stages of a pipeline."""
        containers = _containers(holdings)
        groups = {held.ranks for label, held in holdings.items() if _UNITS not in label and label not in containers}
        stage_of = {rank: {each for each in groups if rank in each} for rank in range(rank_count())}
        self.left_out = {}
        for label in containers:
            first, *others = (stage_of[rank] for rank in holdings[label].ranks)
            if any(other != first for other in others):
                self.left_out[label] = _SEVERAL_STAGES
        self._checked = holdings

    def _metrics(self, reduced: Reduced) -> dict[str, Any]:
        holdings, layout = reduced.holdings, self._engine.layout
        labels = [label for label in holdings if label.partition(_UNITS)[0] not in self.left_out]
        places = [label for label in labels if _UNITS not in label]
        added = _rows(reduced.added, [holdings[label].added.start for label in places], len(layout.added))
        num_kept = layout.width - len(layout.added) + 1
        kept = _rows(reduced.kept, [holdings[label].kept.start for label in places], num_kept)
        added[:, FIRES] = kept[:, -1]  # one process would have fired once, on the whole batch
        rows = np.concatenate([added, kept[:, :-1]], axis=1)
        metrics: dict[str, Any] = dict(metrics_of(rows, layout, [f"{label}/" for label in places]))
        for label in [label for label in labels if _UNITS in label]:
            place, name, *_ = label.split(_UNITS)
            held, is_kept = holdings[label], name == AliveUnits.name
            if is_kept and held.shards > 1 and self._group:
                self.left_out[f"{place}/{name}"] = _SPLIT_UNITS
                continue
            values = reduced.kept[held.kept] if is_kept else reduced.added[held.added]
            metrics[f"{place}/{name}"] = BY_UNIT[name].as_metric(values.tolist())
        return metrics


def _rows(numbers: NDArray[np.float64], starts: list[int], width: int) -> NDArray[np.float64]:
    """Return the rows of ``width`` numbers that begin at ``starts``."""
    found: NDArray[np.float64] = numbers[np.array(starts, dtype=np.int64).reshape(-1, 1) + np.arange(width)]
    return found


def rank_in_words() -> list[str]:
    """Return the line that says which rank a table shows; none without ranks."""
    if not is_distributed():
        return []
    return [f"only rank {this_rank()} of {rank_count()}; to_metrics(), called on every rank, gives all together"]


def _containers(labels: Iterable[str]) -> list[str]:
    """Return the labels of modules that have another labelled module inside."""
    names = {label: label.rpartition("/")[0] for label in labels if label.rpartition("/")[2] in _MODULES}
    around: set[str] = set()
    for name in filter(None, set(names.values())):
        parts = name.split(".")
        around |= {".".join(parts[:count]) for count in range(len(parts))}
    return [label for label, name in names.items() if name in around]
