"""Strict JSON of anything a metric may be: one spelling for the log, the JSONL sink and the position files.

Takes values from records, hands bytes to files. Nothing in here raises because of what a value is: what JSON cannot
hold is written as null with a flag (NaN, infinity) or as text, and the caller is told that it was.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, Final

__all__ = ["Clean", "dumps", "finite", "fit_text", "loads", "restored"]

DEEPEST: Final = 64
"""Lists in lists beyond that become text; orjson stops at 254, the standard library at the stack's end."""
LONGEST: Final = 1000
"""Characters of a text that stands for something else."""
_LARGEST: Final = 2**64
_NUMBERS: Final = frozenset({float, int, bool})
_PLAIN: Final = frozenset({int, str, bool, type(None)})
_WORDS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _functions() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    try:
        # By its name: nothing that uses this file depends on the package, whatever imports are counted.
        orjson = importlib.import_module("orjson")
    except ImportError:
        write = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
        return lambda value: write(value).encode(), json.loads
    # Left to us, so that the text is the same without orjson.
    options = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
    dump = orjson.dumps
    return lambda value: dump(value, option=options), orjson.loads


dumps, loads = _functions()
"""To bytes and back. Writing raises for what is not JSON; of NaN it may also write null: look with `finite` first."""


def finite(values: Collection[Any]) -> bool:
    """Whether these are Python's numbers without NaN and infinity; False as well if that takes a closer look."""
    # Adding up tensors and arrays would run their code: kernels, and warnings that somebody has made errors.
    if not _NUMBERS.issuperset(map(type, values)):
        return False
    try:
        # A sum is finite only if all of it is; ten times as fast as asking each.
        return math.isfinite(sum(values))
    except OverflowError:
        return False


class Clean:
    """Makes values fit for JSON, and remembers what it had to change.

    Recipe: ``clean = Clean(); text = dumps(clean.mapping(metrics)); clean.flags, clean.altered``.
    """

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {}
        """Where null stands for what: ``{"loss": "nan", "series": {"3": "inf"}}``."""
        self.altered: list[str] = []
        """The metrics of which something was written as text that is none, or in less precision."""

    def mapping(self, metrics: Mapping[Any, Any]) -> dict[str, Any]:
        """All metrics, by name."""
        found = {}
        for key, value in metrics.items():
            name = fit_text(key)
            before = self._changed
            self._changed = name != key
            found[name], flag = self._value(value, 0)
            if flag is not None:
                self.flags[name] = flag
            if self._changed:
                self.altered.append(name)
            self._changed = before
        return found

    _changed = False

    def _value(self, value: Any, depth: int) -> tuple[Any, Any]:
        """What is written, and where null stands for what in it."""
        kind = type(value)
        if kind is float:
            return (value, None) if math.isfinite(value) else (None, _word(value))
        if kind is str:
            return self._string(value), None
        if kind in _PLAIN and kind is not int:
            return value, None
        if isinstance(value, int):
            return (int(value), None) if -_LARGEST // 2 <= value < _LARGEST else self._huge(value, depth)
        if isinstance(value, float):
            return self._value(float(value), depth)
        if isinstance(value, str):
            return self._string(str(value)), None
        return self._compound(value, depth)

    def _compound(self, value: Any, depth: int) -> tuple[Any, Any]:
        if depth >= DEEPEST:
            return self._as_text("(nested too deeply)"), None
        try:
            if isinstance(value, Mapping):
                return self._dict(value, depth)
            if isinstance(value, list) and _is_plain(value):
                return list(value), None
            if callable(getattr(value, "tolist", None)):  # arrays, tensors and NumPy's numbers
                return self._value(value.tolist(), depth + 1)
            if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
                return self._list(value, depth)
            if isinstance(value, Real):
                return self._value(float(value), depth)
        except Exception:  # somebody's own container, or a tensor that cannot be read
            return self._as_text(value), None
        return self._as_text(value), None

    def _list(self, values: Iterable[Any], depth: int) -> tuple[list[Any], Any]:
        found, flags = [], {}
        for number, value in enumerate(values):
            item, flag = self._value(value, depth + 1)
            found.append(item)
            if flag is not None:
                flags[str(number)] = flag
        return found, flags or None

    def _dict(self, values: Mapping[Any, Any], depth: int) -> tuple[dict[str, Any], Any]:
        found, flags = {}, {}
        for key, value in values.items():
            name = fit_text(key)
            found[name], flag = self._value(value, depth + 1)
            if flag is not None:
                flags[name] = flag
        return found, flags or None

    def _string(self, value: str) -> str:
        fit = fit_text(value)
        self._changed = self._changed or fit != value
        return fit

    def _huge(self, value: int, depth: int) -> tuple[Any, Any]:
        """Whole numbers of more than 64 bits: the nearest float, which is what other readers make of them anyway."""
        self._changed = True
        try:
            return float(value), None
        except OverflowError:
            return self._as_text(hex(value)), None  # the decimal digits of a very long number take minutes

    def _as_text(self, value: Any) -> str:
        self._changed = True
        try:
            return fit_text(str(value)[:LONGEST])
        except Exception:
            return f"({type(value).__name__})"


def _is_plain(values: list[Any]) -> bool:
    """Whether it is a list of numbers that JSON can hold, which is quickly seen."""
    if not finite(values):
        return False
    return not values or (min(values) >= -_LARGEST // 2 and max(values) < _LARGEST)


def _word(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def fit_text(value: Any) -> str:
    """A name, or text, as UTF-8 has it: half a surrogate pair is spelled out."""
    try:
        text = value if type(value) is str else str(value)
    except Exception:
        text = f"({type(value).__name__})"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def restored(value: Any, flag: Any) -> Any:
    """The value with NaN and infinity where the flag says that null stands for them."""
    if isinstance(flag, str):
        return _WORDS.get(flag, value)
    for key, inner in flag.items():
        if isinstance(value, dict) and key in value:
            value[key] = restored(value[key], inner)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value[int(key)] = restored(value[int(key)], inner)
    return value
