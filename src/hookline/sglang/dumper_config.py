"""Read the settings of the general dumper: from keywords, ``key=value`` pairs, or environment variables ``DUMPER_*``.

`Dumper` keeps a `DumperConfig` and replaces it in ``configure``. Its setting ``filter`` is a `FilterExpression` over
the tags of a dump, such as ``layer_id in (0, 3) and search('mlp', name)``. The sentences of the errors are SGLang's.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from hookline.errors import OptionError
from hookline.messages import did_you_mean

__all__ = ["PREFIX", "DumperConfig", "FilterExpression"]

PREFIX: Final = "DUMPER_"
"""What the environment variables begin with."""
_MODES: Final = ("core", "all", "off")
_TYPES: Final = {"bool": bool, "str": str, "str | None": str}


_NODES: Final = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop, ast.UnaryOp),
    *(ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mod, ast.FloorDiv, ast.Tuple, ast.List, ast.Set, ast.Call),
)
"""What an expression may be made of: nothing that reaches into an object, or runs for long."""
_FUNCTIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "search": lambda pattern, text: re.search(pattern, "" if text is None else str(text)) is not None,
    "match": lambda pattern, text: re.match(pattern, "" if text is None else str(text)) is not None,
}


class _Names(dict[str, Any]):
    """Tags and functions by name; a tag that is not there is None."""

    def __missing__(self, name: str) -> Any:
        return _FUNCTIONS.get(name)


class FilterExpression:
    """A filter over tags; a name that no tag has is None.

    >>> FilterExpression("layer_id is not None and layer_id % 2 == 0")({"layer_id": 4})
    True
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError as error:
            raise OptionError(f"The filter {text!r} is no expression: {error.msg}.") from error
        for node in ast.walk(tree):
            if not isinstance(node, _NODES) or (isinstance(node, ast.Call) and not _is_known(node)):
                shown = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
                raise OptionError(
                    f"The filter {text!r} has {shown!r}; it takes names, constants, comparisons, and, or, not, + - % "
                    "//, lists, and search(pattern, name), match(pattern, name)."
                )
        self._code = compile(tree, "<filter>", "eval")

    def __call__(self, tags: Mapping[str, Any]) -> bool:
        """Return whether a dump with these tags is wanted."""
        try:
            return bool(eval(self._code, {"__builtins__": {}}, _Names(tags)))
        except TypeError as error:  # layer_id > 3, where there is no layer
            raise OptionError(
                f"The filter {self.text!r} cannot be asked of {dict(tags)}: {error}. A tag that is not there is None; "
                "write 'layer_id is not None and …'."
            ) from error


def _is_known(call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Name) and call.func.id in _FUNCTIONS
    return is_named and len(call.args) == 2 and not call.keywords


@dataclass(frozen=True, slots=True)
class DumperConfig:
    """The settings of the general dumper."""

    enable: bool = False
    """Whether anything is dumped."""
    filter: str | None = None
    """An expression over the tags, such as ``layer_id == 3 and search('mlp', name)``; None: all."""
    dir: str = field(default_factory=lambda: str(Path(tempfile.gettempdir()) / "dumper"))
    """The folder of all experiments."""
    enable_output_file: bool = True
    enable_output_console: bool = True
    """Whether a line of the log (level INFO) says what was dumped."""
    enable_value: bool = True
    enable_grad: bool = False
    """Whether the gradient of a dumped tensor is dumped when it arrives."""
    enable_model_value: bool = False
    """Whether `Dumper.dump_model` dumps parameters."""
    enable_model_grad: bool = False
    """Whether it dumps their gradients."""
    exp_name: str | None = None
    """The folder of this experiment in ``dir``; None: by the time, one for all ranks."""
    cleanup_previous: bool = False
    """Whether earlier dumps in ``dir`` are deleted before the first file."""
    non_intrusive_mode: str = "core"
    """What hooks on modules dump: ``core`` (well-known inputs of the model), ``all``, ``off``."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, wanted = getattr(self, each.name), str(each.type)
            if not isinstance(value, _TYPES[wanted]) and not (value is None and wanted.endswith("None")):
                raise OptionError(f"DumperConfig.{each.name}: expected {wanted}, got {type(value).__name__}")
        if self.non_intrusive_mode not in _MODES:
            raise OptionError(f"DumperConfig.non_intrusive_mode: {self.non_intrusive_mode!r} is none of {list(_MODES)}")
        if self.filter is not None:
            FilterExpression(self.filter)  # a mistake in it is said now, and not at the first dump

    @classmethod
    def from_env(cls) -> Self:
        """Return what the environment says; a blank variable is one that is not set."""
        return cls(**_env())

    @classmethod
    def from_pairs(cls, pairs: Iterable[str]) -> Self:
        """Return what ``["enable=true", "filter=layer_id == 0"]`` says."""
        found: dict[str, Any] = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise OptionError(f"Invalid config pair (missing '='): {pair!r}")
            found[key] = text
        return cls(**{key: _read(key, text) for key, text in found.items()})

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return these settings with others in place."""
        for key in values:
            _check_key(key)
        return dataclasses.replace(self, **values)

    def with_defaults(self, values: Mapping[str, Any]) -> Self:
        """Return these settings with others in place, but for those that the environment sets."""
        return self.changed({key: value for key, value in values.items() if not os.environ.get(PREFIX + key.upper())})


def _env() -> dict[str, Any]:
    texts = {each.name: os.environ.get(PREFIX + each.name.upper()) for each in dataclasses.fields(DumperConfig)}
    return {key: _read(key, text) for key, text in texts.items() if text}


def _check_key(key: str) -> None:
    keys = [each.name for each in dataclasses.fields(DumperConfig)]
    if key not in keys:
        raise OptionError(f"Unknown config key {key!r}.{did_you_mean(key, keys)} Valid keys: {keys}")


def _read(key: str, text: str) -> Any:
    """Return the value of a key that is written as text."""
    _check_key(key)
    kinds = {each.name: str(each.type) for each in dataclasses.fields(DumperConfig)}
    if kinds[key] == "bool":
        return text.strip().lower() in ("true", "1")
    return None if kinds[key].endswith("None") and text == "" else text
