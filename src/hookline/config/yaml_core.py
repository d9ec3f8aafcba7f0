"""YAML as it reads: ``on``, ``no`` and ``12:30`` are strings, ``1e-3`` is a number.

Takes text from `read`, hands back plain Python and, if it is asked for, the line of every value. PyYAML follows YAML
1.1, where ``on: no`` is ``{True: False}`` and ``1e-3`` a string; these are the rules of 1.2's core schema, on its safe
loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from hookline.specs.copy_config import own_copy

__all__ = ["Lines", "YamlText", "load_yaml"]

Lines = dict[tuple[str | int, ...], int]
"""The line of each value, counted from 1, by the keys and places that lead to it."""

_NULL: Final = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL: Final = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT: Final = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT: Final = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_MOST: Final = 1_000_000
"""How many values a file may have once its aliases are written out: ten lines of them can stand for billions."""


class CoreLoader(yaml.SafeLoader):
    """The safe loader by the rules of 1.2; a key that is there twice is an error, and so is a merge key of 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (a copy of the class's)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name == "<<" and key.style is None:
                _refuse("YAML 1.2 has no merge keys (<<): write the keys out", key)
            if name in seen:
                _refuse(f"the key {name!r} is there twice", key)
            if name is not None:
                seen.add(name)
        return super().construct_mapping(node, deep)


def _refuse(text: str, node: Any) -> None:
    raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _int(loader: Any, node: Any) -> int:
    text = node.value
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(loader: Any, node: Any) -> float:
    text = node.value.lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in (
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
CoreLoader.add_constructor("tag:yaml.org,2002:int", _int)
CoreLoader.add_constructor("tag:yaml.org,2002:float", _float)


class YamlText:
    """A YAML text, parsed once: its value, and where everything in it stands.

    Raises `yaml.YAMLError` for what is no YAML, has keys twice, or has aliases that nobody could write out.
    """

    def __init__(self, text: str) -> None:
        loader = CoreLoader(text)
        try:
            self._root = loader.get_single_node()
            if self._root is not None:
                _written_out(self._root, {})
            value = None if self._root is None else loader.construct_document(self._root)
            self.value = own_copy(value)  # an alias is written out: who writes into one value changes no other
        finally:
            loader.dispose()

    def lines(self) -> Lines:
        """Where each value begins."""
        return {} if self._root is None else dict(_walk(self._root, ()))


def load_yaml(text: str) -> Any:
    """The value that the text stands for. Raises `yaml.YAMLError`."""
    return YamlText(text).value


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values a node stands for, its aliases written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        if known[id(node)] == 0:
            _refuse("an alias stands inside of what it is an alias of", node)
        return known[id(node)]
    known[id(node)] = 0  # begun
    parts = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
    size = 1 + sum(_written_out(part, known) for part in parts)
    if size > _MOST:
        _refuse(f"its aliases stand for more than {_MOST:,} values", node)
    known[id(node)] = size
    return size


def _walk(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[Any, int]]:
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            yield from _walk(value, (*path, name))
            yield (*path, name), key.start_mark.line + 1  # the line of the key says more than that of a block below it
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _walk(item, (*path, place))
