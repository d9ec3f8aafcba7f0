"""Which metrics of many are shown where there is room for few.

Asked by `ConsoleSink` for its lines and its live column; takes the metrics that have come, hands back their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from hookline.sinks.console_format import split_key, typical

__all__ = ["MetricChoice"]

_MOST: Final = 8
"""Numbers in a line: with their names they fit into about 110 characters."""
_FIRST: Final = ("loss", "val_acc", "val_loss", "train_acc")
"""What everybody asks of a run, under the roots below."""
_ROOTS: Final = ("eval", "training_metrics")
"""Both tell the evaluation: one of two equal names is shown. In the step loop the first is of now."""
_BEFORE_ALL: Final = tuple(f"{root}/{name}" for name in _FIRST for root in _ROOTS)


class MetricChoice:
    """Chooses a few of the metrics that come.

    Recipe: ``MetricChoice(["val_acc", "norms/*"]).choose({"eval/val_acc": 0.9, "norms/total_norm": 1.5})`` is both.

    Args:
        asked: What the user wants to see: ``"hook/metric"``, the metric's name alone, or a pattern with ``*``. If it is
            empty: loss and accuracies, then what is declared, then the first number of every other hook; eight at most.
        declared: What the experiment calls worth seeing, as ``"hook/metric"``.
    """

    def __init__(self, asked: Sequence[str] = (), declared: Iterable[str] = ()) -> None:
        self.asked = tuple(asked)
        self.declared = tuple(declared)
        self._matched: set[str] = set()

    def choose(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the names of the metrics to show, in the order of showing."""
        if self.asked:
            return self._matching(metrics)
        numbers = [key for key, value in metrics.items() if key.count("/") <= 1 and typical(value) is not None]
        wanted = [key for key in (*_BEFORE_ALL, *self.declared) if key in numbers]
        seen = {split_key(key)[0] for key in wanted}
        wanted += [key for key in _first_of_each_hook(numbers) if split_key(key)[0] not in seen]
        return _without_twins(wanted)[:_MOST]

    def may_stay(self, shown: Sequence[str], metrics: Mapping[str, Any]) -> bool:
        """Return whether a full line of `shown` metrics may stay although others have come.

        So the columns stay the same when hooks that need a second firing begin to yield: those have no better claim.
        """
        first = _without_twins([key for key in _BEFORE_ALL if key in metrics])
        is_full = not self.asked and len(shown) >= _MOST
        return is_full and all(key in metrics for key in shown) and all(key in shown for key in first)

    def unmatched(self) -> list[str]:
        """Return what was asked for and has not come."""
        return [pattern for pattern in self.asked if pattern not in self._matched]

    def _matching(self, metrics: Mapping[str, Any]) -> list[str]:
        found: list[str] = []
        for pattern in self.asked:
            keys = [key for key in metrics if fnmatchcase(key, pattern) or fnmatchcase(split_key(key)[1], pattern)]
            keys.sort(key=lambda key: split_key(key)[0] not in _ROOTS)  # stable: loss and evaluation go first
            if keys:
                self._matched.add(pattern)
            found += keys
        return _without_twins(found)


def _first_of_each_hook(numbers: Sequence[str]) -> list[str]:
    by_hook: dict[str, str] = {}
    for key in numbers:
        by_hook.setdefault(split_key(key)[0], key)
    return [key for hook, key in by_hook.items() if hook not in _ROOTS]


def _without_twins(keys: Sequence[str]) -> list[str]:
    """Each name once; of what both roots tell, the first."""
    found: dict[str, str] = {}
    for key in keys:
        hook, metric = split_key(key)
        found.setdefault(metric if hook in _ROOTS else key, key)
    return list(found.values())
