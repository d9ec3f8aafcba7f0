"""The main tensor of what a module takes or returns, and the same structure around another one.

Takes arguments and outputs of any make from `hooks`. Containers on the way to the tensor are copied, never changed: a
module may keep the dict it returns, and its caller the one it passes. Everything here can be traced by the compiler.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hookline.observe.patch.misfits import misfit
from hookline.sites import _torch
from hookline.sites.main_tensor import main_tensor
from hookline.sites.tree import children, inside, rebuilt_tuple

__all__ = ["find_main_input", "main_input", "main_output", "rebuilt"]

_USUAL_INPUT = "hidden_states"
"""What transformers call the input of a block. A mask, which is a tensor of real numbers too, may be written before."""


def main_output(output: Any, where: str) -> Tensor:
    """The main tensor of an output, or an error if it has none."""
    main = main_tensor(output)
    if main is None:
        misfit("An edit changes a tensor", where, _found(type(output)), _ATTACH)
    return main


def main_input(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """The main tensor of some arguments, or an error if they have none."""
    main = find_main_input(args, kwargs)
    if main is None:
        misfit("An edit changes a tensor", where, "has none in it", _ATTACH)
    return main


def find_main_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The main tensor of the positional arguments, else ``hidden_states``, else that of the keyword arguments."""
    main = main_tensor(args)
    if main is None and _USUAL_INPUT in kwargs:
        main = main_tensor(kwargs[_USUAL_INPUT])
    return main_tensor(kwargs) if main is None else main


_ATTACH = "Choose a module with tensors there, or write a hook that knows the structure (hookline.attach)."


@_torch.constant_while_tracing
def _found(cls: type) -> str:
    return f"is a {cls.__name__} with none in it"


def rebuilt(value: Any, old: Tensor, new: Tensor, where: str) -> Any:
    """The same structure with ``new`` wherever ``old`` stood; what holds no ``old`` is handed on as it is."""
    return _rebuilt(value, old, new, where, ())[0]


def _rebuilt(value: Any, old: Tensor, new: Tensor, where: str, above: tuple[int, ...]) -> tuple[Any, bool]:
    """The structure, and whether it is another one, which the compiler cannot always tell by ``is``.

    ``above`` are the containers it is in: one that contains itself ends there.
    """
    if isinstance(value, Tensor):
        return (new, True) if value is old else (value, False)
    parts = children(value)
    if parts is None or (within := inside(value, above)) is None:
        return value, False
    changed = False
    items: dict[Any, Any] = {}
    for key, part in parts:
        items[key], differs = _rebuilt(part, old, new, where, within)
        changed = changed or differs
    return (_with_parts(value, items, where), True) if changed else (value, False)


def _with_parts(value: Any, items: dict[Any, Any], where: str) -> Any:
    """A container of the same make with these items."""
    if isinstance(value, tuple | list):
        return _sequence_of(value, list(items.values()))
    if type(value) is dict:
        return items
    if type(value) is OrderedDict:
        return OrderedDict(items)
    if torch.compiler.is_compiling():  # a constructor is what the compiler can follow
        kind: Any = type(value)
        return kind(**items) if dataclasses.is_dataclass(value) else kind(items)
    return _copied_with(value, items, where)


def _sequence_of(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple(items)
    if kind is list:
        return items
    if hasattr(kind, "_make") and torch.compiler.is_compiling():  # a constructor is what the compiler can follow
        return kind(*items)
    if isinstance(value, tuple):
        return rebuilt_tuple(value, items)
    twin = copy.copy(value)
    twin[:] = items
    return twin


def _copied_with(value: Any, items: dict[Any, Any], where: str) -> Any:
    try:
        twin = copy.copy(value)
        for key, item in items.items():
            if isinstance(twin, MutableMapping):
                twin[key] = item
            else:
                object.__setattr__(twin, key, item)  # frozen dataclasses too
    except Exception as error:  # whatever the methods of somebody's class may raise
        _cannot_rebuild(type(value), where, error)
    return twin


def _cannot_rebuild(kind: type, where: str, error: Exception) -> NoReturn:
    found = f"has a {kind.__name__}, of which none can be made ({error})"
    misfit("An edit puts its tensor into a copy of what is around it", where, found, _ATTACH)
