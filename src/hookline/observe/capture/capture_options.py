"""The options of ``capture``, checked at the door.

Takes what a user wrote, hands the parsed value to ``capture``, or an `OptionError` that says what would do.

    >>> parse_limit("2GB"), parse_limit("1 KiB"), parse_limit(None)
    (2000000000, 1024, None)
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from hookline.errors import OptionError
from hookline.observe.index_grammar import plain_item, text_of

__all__ = ["check_flags", "check_scope", "parse_device", "parse_dtype", "parse_index", "parse_limit"]

_UNITS: Final = {"": 1, "b": 1}
_UNITS.update({f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)})
_UNITS.update({f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)})
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_limit(limit: Any) -> int | None:
    """A number of bytes, or a text such as "2GB", as bytes."""
    if limit is None:
        return None
    if isinstance(limit, str):
        found = _SIZE.fullmatch(limit)
        if found is None or found[2].lower() not in _UNITS:
            raise OptionError(f"limit= is a number of bytes or a text such as '500MB' or '2GiB', got {limit!r}.")
        limit = int(float(found[1]) * _UNITS[found[2].lower()])
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise OptionError(f"limit= is a number of bytes or a text such as '500MB' or '2GiB', got {limit!r}.")
    if limit < 1:
        raise OptionError(f"limit= must be at least 1 byte, got {limit}; leave it out for no limit.")
    return limit


def parse_device(device: Any) -> torch.device | None:
    """A device that this process has."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise OptionError(f"device= is a device such as 'cpu' or 'cuda:0', got {device!r} ({first}).") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device={device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices.")
    return found


def parse_dtype(dtype: Any) -> torch.dtype | None:
    """A type of real numbers to keep floating-point tensors in."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(
            f"dtype= is a floating-point type such as torch.bfloat16 or 'float16', got {dtype!r}; tensors of other "
            "types are kept as they are."
        )
    return found


def parse_index(index: Any) -> Any:
    """What can index a tensor, lists and arrays as tensors; or a function, as it is."""
    if index is None or callable(index):
        return index
    parts = index if isinstance(index, tuple) else (index,)
    try:
        # A new dimension is no place to edit, but may be kept: None is for captures alone.
        found = tuple([None if part is None else plain_item(part, text_of(index)) for part in parts])
    except OptionError as error:
        raise OptionError(
            f"{error} A function from tensor to tensor will do as well; the last token of (B, T, D), say, is "
            "index=(slice(None), -1)."
        ) from None
    return found if isinstance(index, tuple) else found[0]


def check_flags(**flags: Any) -> None:
    """Raise for a switch that is neither on nor off."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}= is True or False, got {value!r}.")
    if flags.get("stop") and flags.get("grads"):
        raise OptionError(
            "stop=True ends the forward before there is a loss, so no gradient would come: drop stop= or grads=."
        )


def check_scope(scope: Any) -> None:
    """Raise unless it says whose calls to capture."""
    if scope not in ("context", "process"):
        raise OptionError(f"scope= is 'context' or 'process', got {scope!r}.")
