"""YAML as it reads: ``on``, ``no`` and ``12:30`` are strings, ``1e-3`` is a number.

Takes text from `read`, hands back plain Python and the line of every value. PyYAML follows YAML 1.1, where ``on: no``
is ``{True: False}`` and ``1e-3`` a string; these are the rules of 1.2's core schema, on its safe loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

__all__ = ["Lines", "lines_of", "load_yaml"]

Lines = dict[tuple[str | int, ...], int]
"""The line of each value, counted from 1, by the keys and places that lead to it."""

_NULL: Final = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL: Final = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT: Final = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT: Final = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class CoreLoader(yaml.SafeLoader):
    """The safe loader by the rules of 1.2; a key that is there twice is an error."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (a copy of the class's)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is there twice", key.start_mark)
            if name is not None:
                seen.add(name)
        return super().construct_mapping(node, deep)


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


def load_yaml(text: str) -> Any:
    """The value that the text stands for. Raises `yaml.YAMLError`."""
    return yaml.load(text, CoreLoader)


def lines_of(text: str) -> Lines:
    """Where each value of a YAML text begins."""
    root = yaml.compose(text, CoreLoader)
    return {} if root is None else dict(_walk(root, ()))


def _walk(node: Any, path: tuple[str | int, ...], inside: tuple[int, ...] = ()) -> Iterator[tuple[Any, int]]:
    if id(node) in inside:  # an alias that holds itself
        return
    yield path, node.start_mark.line + 1
    inside = (*inside, id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            yield from _walk(value, (*path, name), inside)
            yield (*path, name), key.start_mark.line + 1  # the line of the key says more than that of a block below it
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _walk(item, (*path, place), inside)
