"""Describe the structure of a value as a text, which a graph can hold beside the tensors in it, and rebuild the value.

`describe` runs while the compiler traces: it takes arguments or an output apart with nothing but what can be traced.
`rebuild` runs when the compiled graph does, and puts the same structure together around the tensors of that run.

The text is a literal of Python: 'T', 'I' and 'F' stand for the next tensor, integer and real number, a tuple begins
with what it is: a text ('s'), a tuple, list or dict by its bracket, an object of a class ('M' named tuple, 'D' mapping,
'C' dataclass) or one that no graph can carry ('O').

    >>> import torch
    >>> parts = Parts()
    >>> text = describe({"a": torch.ones(1), "b": (2, None)}, parts)
    >>> text
    "('{',('s','a'),'T',('s','b'),('(','I',None,),)"
    >>> rebuild(text, parts.tensors, parts.numbers, parts.reals)
    {'a': tensor([1.]), 'b': (2, None)}
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor

from hookline.sites import _torch


class Unseen:
    """Stands, in what a compiled call shows a hook, for an object that no graph can carry.

    A hook that finds one (a key-value cache among the arguments, say) can ask it which class that was.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """The class of the object that was there."""

    def __repr__(self) -> str:
        return f"<Unseen {self.kind}>"


class Parts:
    """The parts that the text leaves out, because they may differ from run to run."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []
        self.reals: list[Tensor] = []
        """As tensors: a number would be a constant of the graph, and each other one need another graph."""


def describe(value: Any, parts: Parts) -> str:
    """Return the structure of ``value``; what varies goes into ``parts``, in order. To be traced."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return f"('s',{value!r})"
    if isinstance(value, int):
        parts.numbers.append(value)
        return "'I'"
    if isinstance(value, float):
        parts.reals.append(torch.ones((), dtype=torch.float64, device="cpu") * value)  # as torch keeps a scale a number
        return "'F'"
    if isinstance(value, Tensor):
        local = _torch.local_tensor(value)
        if local is not None:
            parts.tensors.append(local)
            return "'T'"
    elif isinstance(value, tuple):
        return _listed("'('" if type(value) is tuple else _named("M", type(value)), list(value), parts)
    elif isinstance(value, list):
        return _listed("'['", value, parts)
    elif isinstance(value, Mapping):
        items = [part for item in value.items() for part in item]
        return _listed("'{'" if type(value) is dict else _named("D", type(value)), items, parts)
    elif is_record(value):
        items = []
        for field in dataclasses.fields(value):
            items += [field.name, getattr(value, field.name)]
        return _listed(_named("C", type(value)), items, parts)
    return _listed(_named("O", type(value)), [], parts)


def _listed(what: str, items: list[Any], parts: Parts) -> str:
    return f"({what},{''.join([describe(item, parts) + ',' for item in items])})"


def _named(letter: str, cls: type) -> str:
    return f"'{letter}',{_name_of(cls)!r}"


_CLASSES: Final[dict[str, type]] = {}
"""By name, those that were met while tracing: a class made inside a function cannot be found by its name."""


@_torch.constant_while_tracing
def _name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    _CLASSES[name] = cls
    return name


def collect(value: Any, found: list[Tensor]) -> None:
    """Add every tensor in ``value``, in the order in which `substitute` comes to them. To be traced."""
    if isinstance(value, Tensor):
        if _torch.local_tensor(value) is value:
            found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            collect(item, found)
    elif is_record(value):
        for field in dataclasses.fields(value):
            collect(getattr(value, field.name), found)


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass, whose fields are looked into. To be traced."""
    # None is asked for first: on torch 2.11 the compiler cannot trace what is_dataclass asks of its class.
    return value is not None and dataclasses.is_dataclass(value) and not isinstance(value, type)


def substitute(value: Any, tensors: list[Tensor], used: list[None]) -> Any:
    """Return ``value`` with the next of ``tensors`` in place of each tensor; ``used`` grows with each. To be traced.

    Tuples, lists and dicts are made anew; mappings of another make, and dataclasses, which modules return, are changed.
    """
    if isinstance(value, Tensor):
        if _torch.local_tensor(value) is not value:
            return value
        used.append(None)
        return tensors[len(used) - 1]
    if isinstance(value, tuple | list):
        items = [substitute(item, tensors, used) for item in value]
        if type(value) is tuple:
            return tuple(items)
        return type(value)(*items) if isinstance(value, tuple) else items
    if type(value) is dict:
        return {key: substitute(item, tensors, used) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            value[key] = substitute(item, tensors, used)
    elif is_record(value):
        for field in dataclasses.fields(value):
            item = substitute(getattr(value, field.name), tensors, used)
            if not type(value).__dataclass_params__.frozen:
                setattr(value, field.name, item)
    return value


_read: Final = functools.lru_cache(maxsize=1024)(ast.literal_eval)


def rebuild(text: str, tensors: list[Tensor], numbers: Iterable[int], reals: Iterable[Tensor]) -> Any:
    """Return the value that `describe` has described."""
    streams = {"T": iter(tensors), "I": iter(numbers), "F": (real.item() for real in reals)}
    return _made(_read(text), streams)


def _made(node: Any, streams: dict[str, Iterator[Any]]) -> Any:
    """Return the value of one node of the text."""
    if isinstance(node, str):
        return next(streams[node])
    if not isinstance(node, tuple):
        return node
    letter, *rest = node
    if letter == "s":
        return rest[0]
    if letter == "O":
        return Unseen(rest[0].replace(":", "."))
    if letter not in _BRACKETS:
        value = _made(("(" if letter == "M" else "{", *rest[1:]), streams)
        try:
            return _construct(letter, _class_called(rest[0]), value)
        except Exception:  # whatever the constructor of somebody's class may raise
            return value
    items = [_made(item, streams) for item in rest]
    return _BRACKETS[letter](items)


_BRACKETS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "(": tuple,
    "[": list,
    "{": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


def _construct(letter: str, cls: Any, value: Any) -> Any:
    if letter == "M":
        return cls._make(value) if hasattr(cls, "_make") else cls(value)
    if letter == "D" and not dataclasses.is_dataclass(cls):
        return cls(value)
    return cls(**{key: item for key, item in value.items() if letter == "D" or _is_init(cls, key)})


def _is_init(cls: Any, name: str) -> bool:
    return any(field.name == name and field.init for field in dataclasses.fields(cls))


def _class_called(name: str) -> Any:
    found: Any = _CLASSES.get(name)
    if found is not None:
        return found
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
