"""Read the options of a precision check, from keywords or from a string ``level=1,path=x,format=md5``.

`PrecisionChecker` calls `PrecisionConfig.make`. A key or value that is not understood is an error that says what is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from hookline.errors import OptionError
from hookline.messages import did_you_mean, type_name

__all__ = ["PrecisionConfig"]


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
        values: dict[str, Any] = {key: _read(key, value) for key, value in given.items()}
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
                f"{', '.join(_WORDS)}."
            )
        if key in found:
            raise OptionError(f"The config {text!r} gives {key!r} twice; keep one.")
        _check_key(key)
        found[key] = value
    return found


def _check_key(key: str) -> None:
    if key not in _WORDS:
        raise OptionError(
            f"A precision check has no {key!r}.{did_you_mean(key, _WORDS)} The keys: {', '.join(_WORDS)}."
        )


_FLAG: Final = {"true": True, "1": True, "false": False, "0": False}
_CHOICES: Final[dict[str, dict[str, Any]]] = {
    "level": {"0": 0, "1": 1, "2": 2},
    "format": {"simple": "simple", "md5": "md5"},
    "save_tensors": {"npy": "npy", "true": "npy", "1": "npy", "false": "", "0": "", "": "", "none": ""},
    "check_nan": _FLAG,
    "check_inf": _FLAG,
    "abort_on_error": _FLAG,
}
"""What may be written for a key, in lower case, and what it means."""
_WORDS: Final = {
    "level": "0 (off), 1 (modules) or 2 (modules and functions)",
    "path": "a folder",
    "format": "'simple' or 'md5'",
    "save_tensors": "true (or 'npy') or false",
    "md5_tolerance": "a number of 0 or more",
    "check_nan": "true or false",
    "check_inf": "true or false",
    "abort_on_error": "true or false",
}
"""Each key, and what its value is."""


def _read(key: str, value: Any) -> Any:
    """Return what a value of that key means; raise if it means nothing."""
    if key == "path" and isinstance(value, str | Path) and str(value):
        return str(value)
    if key == "md5_tolerance" and isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            if 0 <= float(value) < math.inf:
                return float(value)
    text = str(value).lower()
    if text in _CHOICES.get(key, {}):
        return _CHOICES[key][text]
    raise OptionError(f"{key} is {_WORDS[key]}, got {value!r}.")
