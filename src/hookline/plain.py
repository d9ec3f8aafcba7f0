"""Copy configurations, and turn values into what JSON can hold.

``specs``, ``runs``, sglang/server_args.py and lifecycle/registry.py call `own_copy` where a configuration comes in or
goes out, so that nobody writes into that of another. What writes JSON about a run, a comparison or a hook calls
`to_plain` first: ``cli``, ``runs``, training/checkpoints.py, ``report``, ``debug``, ``engines`` and ``integrations``.
For values of metrics there is another ``to_plain``, that of records/values.py, which keeps NaN and infinity.

This file must not import torch: specs and settings are checked without it. What `to_plain` returns has to be strict
JSON. An object that it does not know is no error, but becomes text. Another class of objects is a case in
`_plain_object`, before the cases that would take it, and one in tests/test_plain.py. Another container that `own_copy`
is to make anew is a case in `_copied`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeVar

from hookline.errors import OptionError

T = TypeVar("T")

_DEEPEST: Final = 64
"""Containers in containers that `to_plain` looks into; one that holds itself ends there."""


def own_copy(value: T) -> T:
    """Return `value` with every dict, list, tuple and set in it made anew; all else stays the same object.

    Recipe: ``own_copy({"layers": [1, 2], "weights": tensor})`` has a list of its own and the same tensor.

    Containers of other classes are not copied. Two keys that share a list have one each afterwards, as in JSON.
    """
    try:
        return _copied(value)  # type: ignore[no-any-return]
    except RecursionError:
        raise OptionError("A configuration is nested too deeply to be copied; make it flatter.") from None


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict, MappingProxyType):
        made: Any = {} if kind is MappingProxyType else copy.copy(value)  # a defaultdict keeps its factory
        made.update({key: _copied(item) for key, item in value.items()})
        return made
    if kind is list:
        return [_copied(item) for item in value]
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_make")):  # or a named one
        items = [_copied(item) for item in value]
        return tuple(items) if kind is tuple else value._make(items)  # type: ignore[attr-defined]
    return set(value) if kind is set else value  # what is in a set can be hashed, and not be written into


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as strict JSON can hold it.

    Recipe: ``json.dumps(to_plain({"lr": math.nan, "weights": tensor, "out": Path("runs")}), allow_nan=False)``.

    Numbers that are not finite become text. Tensors and arrays become lists, sets are sorted, and dataclasses, pydantic
    models and other objects with attributes become dictionaries. An enum member is its value, a path or a dtype its
    text, a class or a function its name.
    """
    if value is None or isinstance(value, bool | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_plain(item, depth + 1) for item in value]
    if isinstance(value, Set):
        return sorted((to_plain(item, depth + 1) for item in value), key=repr)
    return _plain_object(value, depth + 1)


def _plain_object(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        return to_plain(value.value, depth)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(getattr(value, "tolist", None)):  # tensors, arrays and NumPy's numbers
        with suppress(RuntimeError, ValueError):  # on meta, sparse, nested, lazy: no numbers that a list can hold
            return to_plain(value.tolist(), depth)
    if callable(getattr(value, "model_dump", None)):  # a model of pydantic
        return to_plain(value.model_dump(), depth)
    if dataclasses.is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name, None), depth) for each in dataclasses.fields(value)}
    public = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    if public and not callable(value):  # a namespace of settings
        return to_plain(public, depth)
    text = str(value)
    return type(value).__qualname__ if " object at 0x" in text else text
