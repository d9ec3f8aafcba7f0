"""Reduce the metrics of all ranks by the rule that each declares: gather them, and add them up in Python.

``lifecycle.ranks`` gathers records by itself, together with what else ranks tell each other, and calls `reduce_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hookline.distributed.ranks import gather_objects
from hookline.errors import OptionError, RankError
from hookline.messages import suggest

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RULES", "check_rule", "reduce_metrics", "reduce_values"]


def _l2(values: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.sqrt(np.sum(values * values, axis=0))
    return found


_NUMBERS: Final[Mapping[str, Callable[[NDArray[np.float64]], Any]]] = {
    "mean": lambda values: np.mean(values, axis=0),
    "sum": lambda values: np.sum(values, axis=0),
    "max": lambda values: np.max(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
    "l2": _l2,
}
RULES: Final = (*_NUMBERS, "concat", "none")


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
    found = _NUMBERS[rule](np.asarray(there, dtype=np.float64)).tolist()
    items = there if not isinstance(found, list) else [item for value in there for item in value]
    return _whole(found) if all(isinstance(item, int) for item in items) else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if value.is_integer() else value
