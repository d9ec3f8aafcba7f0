"""Describe the structure of a value as a text, which a graph can hold beside the tensors in it, and rebuild the value.

`describe` runs while the compiler traces, called by ``trace_hooks``. It takes arguments or an output apart, and may do
only what the compiler can trace. `rebuild` runs when the compiled graph does, called by ``op_runtime``, and puts the
same structure together around the tensors of that run.

The text is a literal of Python: 'T', 'I' and 'F' stand for the next tensor, integer and real number. A tuple begins
with what it is: a text ('s'), a container of values ('(') or of keys and values ('{') with the name of its class, or an
object that no graph can carry ('O'). Where no container of that class can be made, a hook gets a tuple or a dict.

What `describe` writes, `rebuild` reads. A new kind of value that is the same in each run is a letter in `describe` and
in `_made`. One that differs from run to run is a letter in `describe` and in ``streams`` of `rebuild`, a list of
`Parts`, an argument of `rebuild`, and one of the operator ``fire``: in its schema ``op_schemas.FIRE``, in its call in
``trace_hooks._fire``, and in ``_fire``, ``_Shown.values`` and ``_without_parts`` of ``op_runtime``. One such text is
written out, ``op_runtime._ONLY_OUTPUT``: it changes with the form of the text. Tests are in tests/sites/compiled;
docs/behaviour.md tells users of `Unseen`.

    >>> import torch
    >>> parts = Parts()
    >>> text = describe(("a", torch.ones(1), 2, None), parts)
    >>> text
    "('(','builtins:tuple',('s','a'),'T','I',None,)"
    >>> rebuild(text, parts.tensors, parts.numbers, parts.reals)
    ('a', tensor([1.]), 2, None)
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from hookline import tree
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
        """As tensors: a number would be a constant of the graph, and each other value would need another graph."""


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
    pairs = None if isinstance(value, Tensor) else tree.children(value)
    name = _name_of(type(value))
    if pairs is None:
        return f"('O',{name!r})"
    is_sequence = isinstance(value, tuple | list | deque)
    items = [item for _, item in pairs] if is_sequence else [part for pair in pairs for part in pair]
    return f"({'(' if is_sequence else '{'!r},{name!r},{''.join([describe(item, parts) + ',' for item in items])})"


_CLASSES: Final[dict[str, type]] = {}
"""By name, the classes that were met while tracing: one made inside a function cannot be found by its name later."""


@_torch.constant_while_tracing
def _name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    _CLASSES[name] = cls
    return name


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
    letter, name, *rest = node
    if letter == "s":
        return name
    if letter == "O":
        return Unseen(name.replace(":", "."))
    items = [_made(item, streams) for item in rest]
    plain = tuple(items) if letter == "(" else dict(zip(items[::2], items[1::2], strict=True))
    try:
        module, _, path = name.partition(":")
        cls = _CLASSES.get(name) or functools.reduce(getattr, path.split("."), sys.modules[module])
        return _construct(cls, plain)
    except Exception:  # there is no class of that name, or whatever its constructor may raise
        return plain


def _construct(cls: Any, plain: Any) -> Any:
    """Return a container of ``cls`` with what is in a tuple or dict."""
    if cls is type(plain):
        return plain
    if hasattr(cls, "_make"):
        return cls._make(plain)
    if not dataclasses.is_dataclass(cls):
        return cls(plain)
    given = [field.name for field in dataclasses.fields(cls) if field.init and field.name in plain]
    return cls(**{name: plain[name] for name in given})  # type: ignore[operator]
