"""The tensors inside whatever a module takes or returns, and the same structure with other tensors.

Takes arguments and outputs of any make (tensor, tuple, namedtuple, list, dict, ModelOutput, dataclass,
nested), hands leaves to the gradient wiring and puts edited ones back. Containers it does not know (a cache
object, say) are leaves that are left alone.

    >>> import torch
    >>> [path for path, _ in leaves({"a": torch.ones(1), "b": (torch.ones(1), 3)})]
    ['a', 'b.0', 'b.1']
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["leaves", "replace"]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; a lone value is one leaf with an empty path."""
    children = None if isinstance(value, Tensor) else _children(value)
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from leaves(child, f"{path}.{key}" if path else str(key))


def replace(value: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with ``swap`` applied to every tensor; the very same object if nothing changed."""
    if isinstance(value, Tensor):
        return swap(value)
    children = _children(value)
    if children is None:
        return value
    changed = {}
    for key, child in children:
        new = replace(child, swap)
        if new is not child:
            changed[key] = new
    return _rebuild(value, changed) if changed else value


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a container; None for anything else."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None


def _rebuild(value: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        items = [changed.get(index, item) for index, item in enumerate(value)]
        make = getattr(type(value), "_make", type(value))
        return make(items)
    twin = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, list | Mapping):
            twin[key] = item
        else:
            object.__setattr__(twin, key, item)  # frozen dataclasses too
    return twin
