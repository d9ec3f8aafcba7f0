"""Find the tensor that an edit changes, put another one in its place, and raise where an edit does not fit.

The hooks of ``patch`` and the edits call it, eager or traced by the compiler. Containers on the way to the tensor are
copied, never changed: a module may keep the dict it returns, and its caller the one it passes.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HookReturnError
from hookline.sites import _torch
from hookline.sites.kinds import Kind
from hookline.tree import children, inside, main_tensor, rebuilt_tuple

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = [
    "EditedPlace", "Where", "find_main_input", "main_input", "main_output", "misfit", "rebuilt", "shape_of",
    "site_text",
]  # fmt: skip

_USUAL_INPUT: Final = "hidden_states"
"""The name that transformers give the input of a block. A mask, also a tensor of real numbers, may come before it."""
_FORWARD_PRE: Final = Kind.FORWARD_PRE
_ATTACH: Final = "Choose a module with tensors there, or write a hook that knows the structure (hookline.attach)."


class EditedPlace(NamedTuple):
    """Where an edit is made; in the place of a `Site` for edits that do not ask when: to make one takes 7 calls."""

    name: str
    """The dotted name of the module."""
    kind: Kind
    """The kind of the hook that edits."""


Where: TypeAlias = "Site | EditedPlace"


@_torch.constant_while_tracing  # so that the compiler passes on the message, and not just that something was raised
def misfit(what: str, where: str, found: str, remedy: str) -> NoReturn:
    """Raise: ``what`` does not fit the activation at ``where``, which is as ``found``."""
    raise HookReturnError(f"{what}, but {where} {found}. {remedy}")


def site_text(site: Where) -> str:
    """Return, for messages, which activation an edit at ``site`` changes: "the output of 'layers.0'"."""
    side = "input" if site.kind is _FORWARD_PRE else "output"
    return f"the {side} of {site.name!r}" if site.name else f"the {side} of the model"


def shape_of(x: Tensor) -> str:
    """Return the shape in words; in compiled code, ask for sizes that the graph keeps open."""
    sizes = [str(operator.index(size)) for size in x.shape]
    return f"({', '.join(sizes)}{',' if x.dim() == 1 else ''})"


def main_output(output: Any, where: str) -> Tensor:
    """Return the main tensor of an output; raise if it has none."""
    main = main_tensor(output)
    if main is None:
        misfit("An edit changes a tensor", where, _found(type(output)), _ATTACH)
    return main


def main_input(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """Return the main tensor of the arguments; raise if they have none."""
    main = find_main_input(args, kwargs)
    if main is None:
        misfit("An edit changes a tensor", where, "has none in it", _ATTACH)
    return main


def find_main_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the main tensor of the positional arguments, else ``hidden_states``, else that of the keyword ones."""
    main = main_tensor(args)
    if main is None and _USUAL_INPUT in kwargs:
        main = main_tensor(kwargs[_USUAL_INPUT])
    return main_tensor(kwargs) if main is None else main


@_torch.constant_while_tracing
def _found(cls: type) -> str:
    return f"is a {cls.__name__} with none in it"


def rebuilt(value: Any, old: Tensor, new: Tensor, where: str) -> Any:
    """Return the same structure with ``new`` for every ``old``; containers that hold no ``old`` are not copied."""
    return _rebuilt(value, old, new, where, ())[0]


def _rebuilt(value: Any, old: Tensor, new: Tensor, where: str, above: tuple[int, ...]) -> tuple[Any, bool]:
    """Return the structure, and whether it is another one, which the compiler cannot always tell by ``is``.

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
    """Return a container of the same type with these items."""
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
    except Exception as error:  # the methods of a class may raise anything
        found = f"has a {type(value).__name__}, of which none can be made ({error})"
        misfit("An edit puts its tensor into a copy of what is around it", where, found, _ATTACH)
    return twin
