"""Bring metrics into the form that ranks exchange, numbers and arrays by name, and back.

`RankSync` packs what a record holds, has it reduced, and unpacks the result. A dictionary of numbers becomes one name
for each of its keys. The values of single steps become one array, whose name tells the steps: ranks that lack a step
have another name, and what each group of ranks found is put together by the rule when it is unpacked.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from hookline.records.sink import StepSeries

__all__ = ["Packed", "pack", "pack_series", "unpack", "unpack_series"]

_NESTED: Final = "\x1f"
"""What a packed name begins with whose rest is JSON; no metric is named so."""
_RANKS: Final = "ranks"
"""Stands where a rule stands, in the name of the number of ranks that have these steps."""
_NUMBERS: Final = (int, float)
RuleOf = Callable[[str], str]
"""Gives the rule of a metric."""


class Packed:
    """Values by packed name, and the rule of each; what has no rule stays as this rank has it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.rules: dict[str, str] = {}

    def add(self, name: str, value: Any, rule: str) -> None:
        """Add a value under a packed name."""
        if value is not None:
            self.values[name], self.rules[name] = value, rule


# -- of one moment -------------------------------------------------------------------------------------------------


def pack(metrics: Mapping[str, Any], rule_of: RuleOf) -> Packed:
    """Return the numbers of a record; texts only where they are to be concatenated."""
    packed = Packed()
    for name, value in metrics.items():
        rule = rule_of(name)
        if rule == "concat":
            packed.add(name, value, rule)
        elif isinstance(value, dict) and rule != "none":
            for path, number in _leaves(value):
                packed.add(_NESTED + json.dumps([name, *path]), number, rule)
        elif rule != "none":
            packed.add(name, _as_numbers(value), rule)
    return packed


def unpack(reduced: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of reduced values; what was not packed is as this rank has it."""
    found: dict[str, Any] = {name: _copied(value) for name, value in own.items()}
    for packed, value in reduced.items():
        if packed.startswith(_NESTED):
            name, *path = json.loads(packed[1:])
            _set_leaf(found, [name, *path], _plain(value))
        else:
            found[packed] = _plain(value)
    return found


# -- of single steps -----------------------------------------------------------------------------------------------


def pack_series(series: Mapping[str, StepSeries], first: int, rule_of: RuleOf) -> Packed:
    """Return the numbers of metrics of single steps; ``first`` is the step that offsets are counted from."""
    packed = Packed()
    for name, values in series.items():
        rule = rule_of(name)
        if rule == "none" or not values:
            continue
        about = [name, _brief([step - first for step in values.steps]), rule]
        if rule == "mean":
            packed.add(_NESTED + json.dumps([*about[:2], _RANKS]), 1, "sum")
        if rule == "concat":
            packed.add(_NESTED + json.dumps(about), list(values), rule)
            continue
        for path, numbers in _arrays(values):
            packed.add(_NESTED + json.dumps([*about, *path]), numbers, rule)
    return packed


def unpack_series(reduced: Mapping[str, Any], own: Mapping[str, StepSeries], first: int) -> dict[str, StepSeries]:
    """Return series of reduced arrays; where ranks had different steps, each step is of the ranks that had it.

    Args:
        reduced: By packed name.
        own: Of this rank: what was not packed is as this rank has it.
        first: The step that offsets are counted from.
    """
    found: dict[str, dict[tuple[int, int], Any]] = {}
    told = [(json.loads(packed[1:]), value) for packed, value in reduced.items()]
    ranks = {json.dumps(about[:2]): value for about, value in told if about[2] == _RANKS}
    merged = _Merged()
    for (name, brief, rule, *path), value in told:
        if rule == _RANKS:
            continue
        into, weight = found.setdefault(name, {}), ranks.get(json.dumps([name, brief]), 1)
        for place, one in zip(_numbered(_offsets(brief)), _by_step(value, rule), strict=True):
            one = merged.add((name, place, *path), one, rule, weight)
            if not path:
                into[place] = one
            else:
                _set_leaf(into, [place, *path], one)
    series = {name: one for name, one in own.items() if name not in found}
    for name, values_of in found.items():
        places = sorted(values_of)
        values = [values_of[place] for place in places]
        series[name] = StepSeries(_whole_again(values, own.get(name)), [first + step for step, _ in places])
    return {name: series[name] for name in dict.fromkeys((*own, *series))}


class _Merged:
    """Put together what groups of ranks found at one step; a single group's value stays as it is."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], tuple[Any, float]] = {}

    def add(self, key: tuple[Any, ...], value: Any, rule: str, weight: float) -> Any:
        """Return the value of this group and those before it; ``weight`` is the number of its ranks."""
        before = self._seen.get(key)
        if before is not None:
            value, weight = _together(rule, before, (value, weight)), before[1] + weight
        self._seen[key] = value, weight
        return value


def _together(rule: str, one: tuple[Any, float], other: tuple[Any, float]) -> Any:
    (left, left_ranks), (right, right_ranks) = one, other
    if rule in ("sum", "concat"):
        return left + right
    if rule in ("max", "min"):
        if left != left or right != right:
            return math.nan
        return max(left, right) if rule == "max" else min(left, right)
    if rule == "l2":
        return math.hypot(left, right)
    return (left * left_ranks + right * right_ranks) / (left_ranks + right_ranks)


def _by_step(value: Any, rule: str) -> list[Any]:
    """Return the reduced value of each step; of concatenated ones, the values of all ranks."""
    if rule == "concat":
        return [list(one) for one in zip(*value, strict=False)]
    plain = _plain(value)
    return plain if isinstance(plain, list) else [plain]


def _numbered(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return each step with how often it came before: ``record`` may be called many times in a step."""
    seen: Counter[int] = Counter()
    found = []
    for step in steps:
        found.append((step, seen[step]))
        seen[step] += 1
    return found


def _whole_again(values: list[Any], own: StepSeries | None) -> list[Any]:
    """Return whole numbers as int where this rank had int."""
    if own is None or not all(type(item) is int for item in own):
        return values
    return [int(item) if isinstance(item, float) and item.is_integer() else item for item in values]


def _brief(offsets: list[int]) -> Any:
    """Return offsets as [first, count, distance] where they are evenly spaced, which they are with every schedule."""
    apart = {later - earlier for earlier, later in pairwise(offsets)}
    if len(apart) <= 1 and (not apart or next(iter(apart)) > 0):
        return [offsets[0], len(offsets), next(iter(apart), 1)]
    return {"at": offsets}


def _offsets(brief: Any) -> list[int]:
    if isinstance(brief, dict):
        return list(brief["at"])
    first, count, distance = brief
    return list(range(first, first + count * distance, distance))


# -- numbers -------------------------------------------------------------------------------------------------------


def _arrays(values: list[Any]) -> Iterator[tuple[list[Any], Any]]:
    """Yield the numbers of all steps; of dictionaries that have the same keys at each, those of every key."""
    if all(isinstance(value, dict) for value in values):
        leaves = [list(_leaves(value)) for value in values]
        paths = [path for path, _ in leaves[0]]
        if all([path for path, _ in one] == paths for one in leaves):
            for place, path in enumerate(paths):
                yield path, _as_numbers([one[place][1] for one in leaves])
    else:
        yield [], _as_numbers(values)


def _leaves(value: Mapping[Any, Any]) -> Iterator[tuple[list[Any], Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            for path, number in _leaves(item):
                yield [key, *path], number
        elif (numbers := _as_numbers(item)) is not None:
            yield [key], numbers


def _as_numbers(value: Any) -> Any:
    """Return a number, or a list of numbers as an array; None of anything else."""
    if isinstance(value, _NUMBERS):
        return value
    is_numbers = isinstance(value, list) and bool(value) and all(isinstance(item, _NUMBERS) for item in value)
    return np.asarray(value, dtype=np.float64) if is_numbers else None


def _set_leaf(into: dict[Any, Any], path: list[Any], value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value
