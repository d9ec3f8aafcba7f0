"""The metrics of a record as single points, each at its step, with a plain value.

Takes `Record`s, hands `Point`s to the sinks whose destination knows numbers over steps. Decided here once, for all
of them: a dictionary becomes ``name/key``, a `StepSeries` one point per step, everything else sits at the step of its
record; tensors and arrays become numbers and lists.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hookline.sinks.record import Record, StepSeries
from hookline.sinks.strict_json import DEEPEST, Clean, dumps
from hookline.sinks.strict_json import fit_text as clean

__all__ = ["Point", "axis", "clean", "json_text", "number", "numbers", "plain", "points", "renamed", "summary"]


class Point(NamedTuple):
    """One value of one metric at one step."""

    name: str
    value: Any
    """None, a bool, an int, a float, a string, or a list of anything."""
    step: int


def points(record: Record, reserved: Collection[str] = ()) -> Iterator[Point]:
    """Every value of a record; a name that is ``reserved`` comes out as ``metric/name``."""
    at = axis(record)
    for name, value in record.metrics.items():
        name = renamed(str(name), reserved)
        if type(value) is float:  # most are
            yield Point(name, value, at)
        elif isinstance(value, StepSeries) and len(value.steps) == len(value):
            for step, item in zip(value.steps, value, strict=True):
                yield from _leaves(name, item, step)
        else:
            yield from _leaves(name, value, at)


def axis(record: Record) -> int:
    """Where a record sits on the axis of steps: 0 before the first step."""
    return 0 if record.step is None else record.step


def renamed(name: str, reserved: Collection[str]) -> str:
    """A metric of the name that the sink needs for something else is moved aside; text that no file takes, escaped."""
    return clean(f"metric/{name}" if name in reserved else name)


def _leaves(name: str, value: Any, step: int, depth: int = 0) -> Iterator[Point]:
    value = plain(value)
    if isinstance(value, Mapping) and depth < DEEPEST:
        for key, item in value.items():
            yield from _leaves(f"{name}/{clean(str(key))}", item, step, depth + 1)
    else:
        yield Point(name, json_text(value) if isinstance(value, Mapping) else value, step)


def plain(value: Any) -> Any:
    """A value without tensors, arrays, tuples and sets, which are told by what they can do: torch is not imported."""
    if value is None or isinstance(value, (str, bool, int, float, Mapping, list)):
        return value
    if isinstance(value, (tuple, set, frozenset)):
        return list(value)
    if callable(getattr(value, "tolist", None)):  # tensors, arrays, and numpy's numbers
        return plain((value.detach() if hasattr(value, "detach") else value).tolist())
    return str(value)


def number(value: Any) -> float | None:
    """A number as a float (an int beyond all floats is infinite), None for what is none."""
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def numbers(value: Any) -> list[float] | None:
    """All numbers of a list, of nested lists too; None if there are none, or anything that is no number."""
    found: list[float] = []
    return found if isinstance(value, list) and _collect(value, found, 0) and found else None


def _collect(value: list[Any], found: list[float], depth: int) -> bool:
    for item in map(plain, value):
        single = number(item)
        if single is not None:
            found.append(single)
        elif depth >= DEEPEST or not isinstance(item, list) or not _collect(item, found, depth + 1):
            return False
    return True


def summary(values: list[float]) -> dict[str, float]:
    """What is left of a list where only single numbers can go."""
    return {"mean": mean(values), "min": min(values), "max": max(values)} if _finite(values) else {"mean": mean(values)}


def mean(values: list[float]) -> float:
    """The mean, NaN or infinite if one of them is."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # fsum refuses inf - inf, and sums beyond all floats
        return sum(value / len(values) for value in values)


def _finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def json_text(value: Any) -> str:
    """A value as strict JSON, with NaN and infinities as the strings "nan", "inf", "-inf"."""
    fit = Clean()
    found = fit.mapping({"": value})[""]
    return dumps(_spelled(found, fit.flags.get(""))).decode("utf-8")


def _spelled(value: Any, flag: Any) -> Any:
    """The words themselves where the flag says that null stands for them."""
    if isinstance(flag, str):
        return flag
    for key, inner in (flag or {}).items():
        place = key if isinstance(value, dict) else int(key)
        value[place] = _spelled(value[place], inner)
    return value
