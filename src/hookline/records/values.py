"""Take records apart: into single values with a step, as sinks that plot or tabulate numbers need them.

torch and numpy are not imported: tensors and arrays are known by their ``tolist``. No conversion raises because of
what a value is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hookline.records.log import cleaned, dumps, utf8_text
from hookline.records.sink import Record, StepSeries


def json_text(value: Any) -> str:
    """Return ``value`` as strict JSON, with NaN and infinities as the strings "NaN", "Infinity", "-Infinity"."""
    return dumps(cleaned(value)).decode()


class MetricValue(NamedTuple):
    """One value of one metric at one step."""

    name: str
    value: Any
    """None, a bool, an int, a float, a string, or a list of anything."""
    step: int


def values_in(record: Record, reserved: Collection[str] = ()) -> Iterator[MetricValue]:
    """Yield every value of ``record``; a name in ``reserved`` comes out as ``metric/name``.

    A dictionary becomes ``name/key``, a `StepSeries` one value per step; every other value has the step of its record.
    """
    axis = record.step or 0
    for name, value in record.metrics.items():
        name = column_name(str(name), reserved)
        if type(value) is float:  # most are
            yield MetricValue(name, value, axis)
        elif isinstance(value, StepSeries) and len(value.steps) == len(value):
            for step, item in zip(value.steps, value, strict=True):
                if type(item) is float:
                    yield MetricValue(name, item, step)
                else:
                    yield from _leaves(name, item, step)
        else:
            yield from _leaves(name, value, axis)


def column_name(name: str, reserved: Collection[str]) -> str:
    """Return ``name`` as UTF-8 can hold it; ``metric/name`` if the sink needs ``name`` for something else."""
    return utf8_text(f"metric/{name}" if name in reserved else name)


def _leaves(name: str, value: Any, step: int) -> Iterator[MetricValue]:
    value = to_plain(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}/{utf8_text(str(key))}", item, step)
    else:
        yield MetricValue(name, value, step)


def to_plain(value: Any) -> Any:
    """Return ``value`` without tensors, arrays, tuples and sets: as numbers and lists; an unknown object as text."""
    if value is None or isinstance(value, (str, bool, int, float, Mapping, list)):
        return value
    if isinstance(value, (tuple, set, frozenset)):
        return list(value)
    if callable(getattr(value, "tolist", None)):
        return to_plain((value.detach() if hasattr(value, "detach") else value).tolist())
    return str(value)


def number(value: Any) -> float | None:
    """Return a number as a float (infinite for an int beyond all floats); None for anything else."""
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def numbers(value: Any) -> list[float] | None:
    """Return all numbers of a list, also of nested lists; None if it is empty or holds anything else."""
    found: list[float] = []
    return found if isinstance(value, list) and _collect(value, found) and found else None


def _collect(value: list[Any], found: list[float]) -> bool:
    for item in map(to_plain, value):
        single = number(item)
        if single is not None:
            found.append(single)
        elif not isinstance(item, list) or not _collect(item, found):
            return False
    return True


def as_numbers(name: str, value: Any) -> dict[str, float]:
    """Return ``value`` as single numbers: a list as ``{name}_mean``, ``_min``, ``_max``; nothing for what is none.

    Of a list with a number that is not finite there is the mean alone.
    """
    single, several = number(value), numbers(value)
    if single is not None:
        return {name: single}
    if several is None:
        return {}
    found = {f"{name}_mean": mean(several)}
    if all(map(math.isfinite, several)):
        found |= {f"{name}_min": min(several), f"{name}_max": max(several)}
    return found


def mean(values: list[float]) -> float:
    """Return the mean; NaN or infinite if one of ``values`` is."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # fsum refuses inf - inf, and sums beyond all floats
        return sum(value / len(values) for value in values)
