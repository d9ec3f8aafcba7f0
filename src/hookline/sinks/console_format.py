"""How a metric reads on a screen: its value, its name, whether it rises or falls.

Asked by `ConsoleSink` and its live column; knows nothing of either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "DOWN",
    "FLAT",
    "UP",
    "format_short",
    "format_value",
    "is_troubled",
    "printable",
    "split_key",
    "trend",
    "typical",
]

UP: Final = "▲"
DOWN: Final = "▼"
FLAT: Final = "━"

_ASCII: Final = {UP: "^", DOWN: "v", FLAT: "-", "·": "-", "–": "-"}
_LEAST_CHANGE: Final = 0.01
"""What is less than one percent is no trend."""
_LONGEST: Final = 60
"""Characters of a text that are shown."""


def format_value(value: Any) -> str:
    """One value in a few characters: ``.6f``, or ``.4e`` below 0.001 and over 10,000, 0 as 0; of a list its mean.

    Recipe: ``format_value([1.0, 2.0])`` is ``"1.500000 (n=2)"``.
    """
    if isinstance(value, float):
        return _number(value)
    if value is None:
        return "–"
    if isinstance(value, bool | int):
        return _cut(str(value))
    if isinstance(value, Mapping):
        return _cut(", ".join(f"{key}: {format_value(item)}" for key, item in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        middle = typical(value)
        return f"(n={len(value)})" if middle is None else f"{_number(float(middle))} (n={len(value)})"
    return _cut(" ".join(str(value).split()))


def format_short(value: Any) -> str:
    """One value in a column: four significant digits; of a list its mean, of what is no number its text.

    Recipe: ``format_short(0.0272341)`` is ``"0.02723"``.
    """
    number = typical(value)
    if number is None:
        return format_value(value)
    if isinstance(number, int):
        return _cut(str(number))
    if 0 < abs(number) < 0.001:
        return f"{number:.2e}"  # as wide as 0.001234
    return "0" if number == 0 else f"{number:.4g}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.4e}" if abs(value) < 0.001 or abs(value) > 10_000 else f"{value:.6f}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def typical(value: Any) -> float | int | None:
    """The number that stands for a value: itself, the mean of a list; None where there is none.

    NaN in a list is not left out: whoever looks at the mean has to see it.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [item for item in value if isinstance(item, int | float)]
        return _mean(numbers) if numbers else None
    return None


def _mean(numbers: Sequence[float | int]) -> float:
    try:
        return sum(numbers) / len(numbers)  # not `math.fsum`: infinities of different sign make that raise
    except OverflowError:  # of whole numbers that no float can hold
        return math.inf


def is_troubled(value: Any) -> bool:
    """Whether there is a NaN or an infinity in it."""
    if isinstance(value, Mapping):
        return any(map(is_troubled, value.values()))
    middle = typical(value)
    return isinstance(middle, float) and not math.isfinite(middle)


def trend(values: Sequence[float | int]) -> str:
    """▲, ▼ or ━, by the last three values; nothing of a single one, and of whole numbers, which count something."""
    recent = values[-3:]
    if len(recent) < 2 or isinstance(recent[-1], int):
        return ""
    before, change = recent[0], recent[-1] - recent[0]
    if math.isnan(change):
        return ""
    flat = change == 0 if before == 0 else abs(change) / abs(before) < _LEAST_CHANGE
    return FLAT if flat else UP if change > 0 else DOWN


def split_key(key: str) -> tuple[str, str]:
    """Hook and metric of ``"hook/metric"``."""
    hook, slash, metric = key.partition("/")
    return (hook, metric) if slash else ("–", key)


def printable(text: str, encoding: str | None) -> str:
    """The text in characters that the screen has; others are spelled out."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        text = "".join(_ASCII.get(character, character) for character in text)
        return text.encode("ascii", "backslashreplace").decode("ascii")
    return text
