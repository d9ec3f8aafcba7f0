"""Convert metric values: to strict JSON and back, and to single values with a step.

The record log, the JSONL sink and the helper process call the JSON half; the sinks that plot or tabulate numbers call
`values_in`. torch and numpy are not imported: tensors and arrays are known by their ``tolist``. No conversion raises
because of what a value is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, Final, NamedTuple

import orjson

from hookline.records.sink import Record, StepSeries

__all__ = [
    "JsonCleaner", "MetricValue", "all_finite", "column_name", "dumps", "json_text", "loads", "mean", "number",
    "numbers", "restore_nonfinite", "step_axis", "summary", "to_plain", "utf8_text", "values_in",
]  # fmt: skip

_DEEPEST: Final = 64
"""Containers nested deeper become text; orjson stops at 254."""
_LONGEST: Final = 1000
"""Characters of a text that replaces another value."""
_LARGEST: Final = 2**64
_NUMBERS: Final = frozenset({float, int, bool})
_NONFINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


# -- strict JSON --------------------------------------------------------------------------------------------------


loads = orjson.loads
"""From bytes."""
_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
"""Dataclasses and dates are refused: they are written as other objects are."""


def dumps(value: Any) -> bytes:
    """Return strict JSON; raise for what is none. orjson writes null for NaN: ask `all_finite` first."""
    return orjson.dumps(value, option=_OPTIONS)


def all_finite(values: Collection[Any]) -> bool:
    """Return whether all values are Python numbers without NaN and infinity; False as well for any other type."""
    # Only Python's own types are added up: tensors and arrays would run kernels, and code of their own.
    if not _NUMBERS.issuperset(map(type, values)):
        return False
    try:
        return math.isfinite(sum(values))  # finite only if all are; ten times as fast as asking each
    except OverflowError:
        return False


class JsonCleaner:
    """Converts values to what JSON can hold, and records what it had to change."""

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {}
        """Where null replaces a number that is not finite: ``{"loss": "nan", "series": {"3": "inf"}}``."""
        self.altered: list[str] = []
        """The metrics of which something was replaced by text, or by a less precise number."""
        self._has_altered = False

    def clean(self, metrics: Mapping[Any, Any]) -> dict[str, Any]:
        """Return all metrics by name, as JSON can hold them."""
        found = {}
        for key, value in metrics.items():
            name = utf8_text(key)
            self._has_altered = name != key
            found[name], flag = self._convert(value, 0)
            if flag is not None:
                self.flags[name] = flag
            if self._has_altered:
                self.altered.append(name)
        return found

    def _convert(self, value: Any, depth: int) -> tuple[Any, Any]:
        """Return ``value`` as JSON can hold it, and the flags of what null replaces in it."""
        if isinstance(value, float):
            value = float(value)
            return (value, None) if math.isfinite(value) else (None, _nonfinite_word(value))
        if isinstance(value, str):
            text = utf8_text(str(value))
            self._has_altered = self._has_altered or text != value
            return text, None
        if value is None or isinstance(value, bool):
            return value, None
        if isinstance(value, int):
            return (int(value), None) if -_LARGEST // 2 <= value < _LARGEST else (self._from_huge(value), None)
        if type(value) in (list, StepSeries) and _is_plain_list(value):
            return value, None
        return self._convert_container(value, depth)

    def _convert_container(self, value: Any, depth: int) -> tuple[Any, Any]:
        if depth >= _DEEPEST:
            return self._to_text("(nested too deeply)"), None
        try:
            if isinstance(value, Mapping):
                return self._convert_items(((utf8_text(key), item) for key, item in value.items()), depth)
            if callable(getattr(value, "tolist", None)):  # arrays, tensors and NumPy's numbers
                return self._convert(value.tolist(), depth + 1)
            if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
                found, flags = self._convert_items(((str(n), item) for n, item in enumerate(value)), depth)
                return list(found.values()), flags
            if isinstance(value, Real):
                return self._convert(float(value), depth)
        except Exception:  # a container of the user's own, or a tensor that cannot be read
            pass
        return self._to_text(value), None

    def _convert_items(self, pairs: Iterable[tuple[str, Any]], depth: int) -> tuple[dict[str, Any], Any]:
        found, flags = {}, {}
        for key, value in pairs:
            found[key], flag = self._convert(value, depth + 1)
            if flag is not None:
                flags[key] = flag
        return found, flags or None

    def _from_huge(self, value: int) -> Any:
        """Return the nearest float of an integer of more than 64 bits, as other readers make of it anyway."""
        self._has_altered = True
        try:
            return float(value)
        except OverflowError:
            return self._to_text(hex(value))  # the decimal digits of a very long number take minutes

    def _to_text(self, value: Any) -> str:
        self._has_altered = True
        try:
            return utf8_text(str(value)[:_LONGEST])
        except Exception:
            return f"({type(value).__name__})"


def _is_plain_list(values: list[Any]) -> bool:
    """Return whether all items are numbers that JSON can hold."""
    return all_finite(values) and (not values or (min(values) >= -_LARGEST // 2 and max(values) < _LARGEST))


def _nonfinite_word(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def utf8_text(value: Any) -> str:
    """Return a name, or text, as UTF-8 can hold it: half a surrogate pair is escaped."""
    try:
        text = value if type(value) is str else str(value)
    except Exception:
        text = f"({type(value).__name__})"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def restore_nonfinite(value: Any, flag: Any, words: Mapping[str, Any] = _NONFINITE) -> Any:
    """Return ``value`` with NaN and infinity, as ``words`` spells them, where ``flag`` says that null replaces them."""
    if isinstance(flag, str):
        return words.get(flag, value)
    for key, inner in flag.items():
        if isinstance(value, dict) and key in value:
            value[key] = restore_nonfinite(value[key], inner, words)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value[int(key)] = restore_nonfinite(value[int(key)], inner, words)
    return value


def json_text(value: Any) -> str:
    """Return ``value`` as strict JSON, with NaN and infinities as the strings "nan", "inf", "-inf"."""
    cleaner = JsonCleaner()
    found = cleaner.clean({"": value})[""]
    return dumps(restore_nonfinite(found, cleaner.flags.get("", {}), {word: word for word in _NONFINITE})).decode()


# -- single values ------------------------------------------------------------------------------------------------


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
    axis = step_axis(record)
    for name, value in record.metrics.items():
        name = column_name(str(name), reserved)
        if type(value) is float:  # most are
            yield MetricValue(name, value, axis)
        elif isinstance(value, StepSeries) and len(value.steps) == len(value):
            for step, item in zip(value.steps, value, strict=True):
                yield from _leaves(name, item, step)
        else:
            yield from _leaves(name, value, axis)


def step_axis(record: Record) -> int:
    """Return the place of ``record`` on the axis of steps: 0 before the first step."""
    return 0 if record.step is None else record.step


def column_name(name: str, reserved: Collection[str]) -> str:
    """Return ``name`` as UTF-8 can hold it; ``metric/name`` if the sink needs ``name`` for something else."""
    return utf8_text(f"metric/{name}" if name in reserved else name)


def _leaves(name: str, value: Any, step: int, depth: int = 0) -> Iterator[MetricValue]:
    value = to_plain(value)
    if isinstance(value, Mapping) and depth < _DEEPEST:
        for key, item in value.items():
            yield from _leaves(f"{name}/{utf8_text(str(key))}", item, step, depth + 1)
    else:
        yield MetricValue(name, json_text(value) if isinstance(value, Mapping) else value, step)


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
    return found if isinstance(value, list) and _collect(value, found, 0) and found else None


def _collect(value: list[Any], found: list[float], depth: int) -> bool:
    for item in map(to_plain, value):
        single = number(item)
        if single is not None:
            found.append(single)
        elif depth >= _DEEPEST or not isinstance(item, list) or not _collect(item, found, depth + 1):
            return False
    return True


def summary(values: list[float]) -> dict[str, float]:
    """Return what replaces a list where only single numbers can go; the mean alone if one is not finite."""
    found = {"mean": mean(values)}
    return {**found, "min": min(values), "max": max(values)} if all(map(math.isfinite, values)) else found


def mean(values: list[float]) -> float:
    """Return the mean; NaN or infinite if one of ``values`` is."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # fsum refuses inf - inf, and sums beyond all floats
        return sum(value / len(values) for value in values)
