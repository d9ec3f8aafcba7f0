"""Read the options of a precision check, from keywords or from a string ``level=1,path=x,format=md5``.

`PrecisionChecker` calls `PrecisionConfig.make`. A key or value that is not understood is an error that says what is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from hookline.errors import OptionError
from hookline.messages import did_you_mean, type_name

__all__ = ["PrecisionConfig"]

_LEVELS: Final = "0 (off), 1 (modules) or 2 (modules and functions)"
_YES: Final = ("true", "1")
_NO: Final = ("false", "0", "")


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The options of a precision check.

    >>> PrecisionConfig.parse("level=2,format=md5,md5_tolerance=1e-3").level
    2
    """

    level: int = 1
    """0: nothing; 1: the outputs of modules and their gradients; 2: also what functions take and give."""
    path: str = "./log_precision_check"
    """The folder; each check makes one of its own in it, named by the time."""
    format: str = "simple"
    """``simple`` (minimum, maximum, mean, first values) or ``md5`` (a hash of the numbers)."""
    save_tensors: str = ""
    """``npy``: write each tensor to a file; empty: none. ``true`` means ``npy``."""
    md5_tolerance: float = 0.0
    """Above 0, the hash is of the numbers rounded to multiples of this; 0: of every bit."""
    check_nan: bool = True
    """Whether a NaN is an error."""
    check_inf: bool = True
    """Whether an infinity is an error."""
    abort_on_error: bool = False
    """Whether an error raises `NonFiniteError`, after its line is written."""

    @classmethod
    def make(cls, config: str | Mapping[str, Any] | PrecisionConfig | None, options: Mapping[str, Any]) -> Self:
        """Return what ``config`` says, with the keywords ``options`` in front of it."""
        if isinstance(config, PrecisionConfig):
            given: dict[str, Any] = dataclasses.asdict(config)
        elif isinstance(config, str):
            given = _pairs(config)
        elif config is None or isinstance(config, Mapping):
            given = dict(config or {})
        else:
            raise OptionError(f"config is a string such as 'level=1,format=md5', or a dict; got {type_name(config)}.")
        given |= options
        for key in given:
            _check_key(key)
        values: dict[str, Any] = {key: _READ[key](key, value) for key, value in given.items()}
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what the string ``key=value,key=value`` says."""
        return cls.make(text, {})


def _pairs(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in text.split(",") if text.strip() else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise OptionError(
                f"{item.strip()!r} in the config {text!r} has no '='; write key=value,key=value with the keys "
                f"{', '.join(_READ)}."
            )
        if key in found:
            raise OptionError(f"The config {text!r} gives {key!r} twice; keep one.")
        _check_key(key)
        found[key] = value
    return found


def _check_key(key: str) -> None:
    if key not in _READ:
        raise OptionError(f"A precision check has no {key!r}.{did_you_mean(key, _READ)} The keys: {', '.join(_READ)}.")


def _level(key: str, value: Any) -> int:
    if isinstance(value, str) and value in ("0", "1", "2"):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value in (0, 1, 2):
        return int(value)
    raise OptionError(f"{key} is {_LEVELS}, got {value!r}.")


def _path(key: str, value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value):
        raise OptionError(f"{key} is a folder, got {value!r}.")
    return str(value)


def _format(key: str, value: Any) -> str:
    if value not in ("simple", "md5"):
        raise OptionError(f"{key} is 'simple' or 'md5', got {value!r}.")
    return str(value)


def _save(key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, str | bool | int) else ""
    if text in ("npy", *_YES):
        return "npy"
    if value is None or (text in _NO and isinstance(value, str | bool | int)):
        return ""
    raise OptionError(f"{key} is true (or 'npy') or false, got {value!r}.")


def _tolerance(key: str, value: Any) -> float:
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise OptionError(f"{key} is a number of 0 or more, got {value!r}.")
    return number


def _flag(key: str, value: Any) -> bool:
    text = str(value).lower() if isinstance(value, str | bool | int) else "?"
    if text in _YES or text in _NO[:2]:
        return text in _YES
    raise OptionError(f"{key} is true or false, got {value!r}.")


_READ: Final[dict[str, Callable[[str, Any], Any]]] = {
    "level": _level,
    "path": _path,
    "format": _format,
    "save_tensors": _save,
    "md5_tolerance": _tolerance,
    "check_nan": _flag,
    "check_inf": _flag,
    "abort_on_error": _flag,
}
"""Each key, with the function that reads its value."""
