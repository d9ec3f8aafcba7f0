"""Copy a configuration, so that the receiver can write into it without changing the original.

Specs, factories, lifecycle hooks and files call it wherever a configuration comes in or goes out. Imports no torch.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, Final, TypeVar

from hookline.errors import OptionError

__all__ = ["own_copy"]

T = TypeVar("T")

_MAPPINGS: Final = (dict, OrderedDict, defaultdict, MappingProxyType)


def own_copy(value: T) -> T:
    """Return `value` with every dict, list, tuple and set in it made anew; all else stays the same object.

    Recipe: ``own_copy({"layers": [1, 2], "weights": tensor})`` has a list of its own and the same tensor.

    Containers of other classes are not copied. Two keys that share a list have one each afterwards, as in JSON. A
    container that holds itself becomes one that does.
    """
    try:
        return _copied(value, {})  # type: ignore[no-any-return]
    except RecursionError:
        raise OptionError("A configuration is nested too deeply to be copied; make it flatter.") from None


def _copied(value: Any, above: dict[int, Any]) -> Any:
    """Return the copy of `value`; `above` has the copies, by identity, of the containers that it lies in."""
    kind = type(value)
    if id(value) in above:
        return above[id(value)]
    if kind in _MAPPINGS:
        return _copied_mapping(value, above)
    if kind is list:
        made: list[Any] = []
        above[id(value)] = made
        made.extend(_copied(item, above) for item in value)
        del above[id(value)]
        return made
    if isinstance(value, tuple) and (kind is tuple or hasattr(value, "_make")):  # or a named one
        items = [_copied(item, above) for item in value]
        return tuple(items) if kind is tuple else value._make(items)  # type: ignore[attr-defined]
    return set(value) if kind is set else value  # what is in a set can be hashed, and not be written into


def _copied_mapping(value: Any, above: dict[int, Any]) -> Any:
    made: Any = {} if type(value) in (dict, MappingProxyType) else copy.copy(value)  # a defaultdict has its default
    above[id(value)] = made
    for key, item in value.items():
        made[key] = _copied(item, above)
    del above[id(value)]
    return made
