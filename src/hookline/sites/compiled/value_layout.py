"""Describe the structure of a value as a text, which a graph can hold beside the tensors in it, and rebuild the value.

`describe` runs while the compiler traces: it takes arguments or an output apart with nothing but what can be traced.
`rebuild` runs when the compiled graph does, and puts the same structure together around the tensors of that run.

    >>> import torch
    >>> parts = Parts()
    >>> text = describe({"a": torch.ones(1), "b": (2, None)}, parts)
    >>> text
    '{s1:aTs1:b(IN)}'
    >>> rebuild(text, parts.tensors, parts.numbers, parts.reals)
    {'a': tensor([1.]), 'b': (2, None)}
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias

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
    if isinstance(value, Tensor):
        return _describe_tensor(value, parts)
    if value is None:
        return "N"
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int):
        parts.numbers.append(value)
        return "I"
    if isinstance(value, float):
        parts.reals.append(torch.ones((), dtype=torch.float64, device="cpu") * value)  # as torch keeps a scale a number
        return "F"
    if isinstance(value, str):
        return f"s{len(value)}:{value}"
    return _describe_container(value, parts)


def _describe_tensor(value: Tensor, parts: Parts) -> str:
    local = _torch.local_tensor(value)
    if local is None:
        return _named("O", type(value))
    parts.tensors.append(local)
    return "T"


def _describe_container(value: Any, parts: Parts) -> str:
    if isinstance(value, tuple):
        inside = "".join([describe(item, parts) for item in value])
        return f"({inside})" if type(value) is tuple else _named("M", type(value)) + f"({inside})"
    if isinstance(value, list):
        return "[" + "".join([describe(item, parts) for item in value]) + "]"
    if isinstance(value, Mapping):
        inside = "".join([describe(key, parts) + describe(item, parts) for key, item in value.items()])
        return "{" + inside + "}" if type(value) is dict else _named("D", type(value)) + "{" + inside + "}"
    if is_record(value):
        fields = [field.name for field in dataclasses.fields(value)]
        inside = "".join([describe(name, parts) + describe(getattr(value, name), parts) for name in fields])
        return _named("C", type(value)) + "{" + inside + "}"
    return _named("O", type(value))


def _named(letter: str, cls: type) -> str:
    name = _name_of(cls)
    return f"{letter}{len(name)}:{name}"


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


_Maker: TypeAlias = Callable[[list[Any]], Any]


def rebuild(text: str, tensors: list[Tensor], numbers: Iterable[int], reals: Iterable[Tensor]) -> Any:
    """Return the value that `describe` has described."""
    if text == "T":
        return tensors[0]
    streams = [iter(tensors), iter(numbers), (real.item() for real in reals)]
    return _maker(text)(streams)


@functools.lru_cache(maxsize=1024)
def _maker(text: str) -> _Maker:
    """Return what makes the value; the text is read once."""
    maker, end = _read(text, 0)
    assert end == len(text), f"{text!r} ends at {end}"
    return maker


_ATOMS: Final[dict[str, Any]] = {"N": None, "t": True, "f": False}
_STREAMS: Final[dict[str, int]] = {"T": 0, "I": 1, "F": 2}
_CLOSING: Final[dict[str, str]] = {"(": ")", "[": "]", "{": "}"}


def _read(text: str, start: int) -> tuple[_Maker, int]:
    """Return the maker of the value that begins at ``start``, and where the next one does."""
    letter = text[start]
    if letter in _ATOMS:
        atom = _ATOMS[letter]
        return lambda streams: atom, start + 1
    if letter in _STREAMS:
        stream = _STREAMS[letter]
        return lambda streams: next(streams[stream]), start + 1
    if letter in _CLOSING:
        items, end = _read_items(text, start)
        return _PLAIN[letter](items), end
    colon = text.index(":", start)
    end = colon + 1 + int(text[start + 1 : colon])
    word = text[colon + 1 : end]
    if letter == "s":
        return lambda streams: word, end
    if letter == "O":
        return lambda streams: Unseen(word.replace(":", ".")), end
    items, end = _read_items(text, end)
    return _of_class(letter, word, items), end


def _read_items(text: str, start: int) -> tuple[list[_Maker], int]:
    closing = _CLOSING[text[start]]
    items: list[_Maker] = []
    at = start + 1
    while text[at] != closing:
        item, at = _read(text, at)
        items.append(item)
    return items, at + 1


def _make_tuple(items: list[_Maker]) -> _Maker:
    return lambda streams: tuple([make(streams) for make in items])


def _make_list(items: list[_Maker]) -> _Maker:
    return lambda streams: [make(streams) for make in items]


def _make_dict(items: list[_Maker]) -> _Maker:
    keys, values = items[::2], items[1::2]
    return lambda streams: {key(streams): value(streams) for key, value in zip(keys, values, strict=True)}


_PLAIN: Final[dict[str, Callable[[list[_Maker]], _Maker]]] = {"(": _make_tuple, "[": _make_list, "{": _make_dict}


def _of_class(letter: str, name: str, items: list[_Maker]) -> _Maker:
    """Return the maker of a named tuple, a mapping or a dataclass; where that cannot be made, of the plain thing."""
    plain = _make_tuple(items) if letter == "M" else _make_dict(items)
    cls = _class_called(name)

    def make(streams: list[Any]) -> Any:
        value = plain(streams)
        try:
            return _construct(letter, cls, value)
        except Exception:  # whatever the constructor of somebody's class may raise
            return value

    return make


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
