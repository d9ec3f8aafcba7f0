"""The fields of an experiment's configuration, made into flags.

Takes a dataclass (or the parameters of a function), hands a dataclass of the same fields to tyro, with the help that
stands under each field, and turns what comes back into the configuration.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from hookline.errors import ConfigError, OptionError

if TYPE_CHECKING:
    from hookline.config.mistakes import Mistakes

__all__ = ["ConfigFlags", "field_help", "from_parameters"]


class ConfigFlags:
    """The flags of one configuration class.

    Recipe::

        flags = ConfigFlags(Config, taken={"seed"})
        values = tyro.cli(flags.dataclass({"epochs": 5}))
        config = flags.make(vars(values), {"seed": 3})

    Args:
        cls: The dataclass.
        taken: Names that are flags of the command line already: such a field is no flag of its own, and gets the
            value of the other.
    """

    def __init__(self, cls: type, taken: Collection[str] = ()) -> None:
        if not dataclasses.is_dataclass(cls):
            raise OptionError(f"config_class is a dataclass, whose fields become flags; got {cls!r}.")
        self.cls = cls
        self._fields = {one.name: one for one in dataclasses.fields(cls) if one.init}
        self._hints = typing.get_type_hints(cls, include_extras=True)
        self._help = field_help(cls)
        self.shared = [name for name in self._fields if name in taken]
        """The fields that take the value of a flag of the command line."""

    @property
    def names(self) -> list[str]:
        """All fields."""
        return list(self._fields)

    def on(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of the fields that are switches."""
        switches = [one for one in self._fields.values() if self._hints[one.name] is bool]
        return {one.name: given.get(one.name, one.default) for one in switches}

    def dataclass(self, given: Mapping[str, Any]) -> type:
        """What tyro asks for: the same fields, with other defaults where some are given."""
        made = []
        for name, one in self._fields.items():
            if name in self.shared:
                continue
            hint: Any = Annotated.__class_getitem__((self._hints[name], arg(help=self._help.get(name, ""))))  # type: ignore[attr-defined]
            made.append((name, hint, _default(one, given)))
        return dataclasses.make_dataclass(self.cls.__name__, made, kw_only=True)

    def make(self, values: Mapping[str, Any], shared: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """The configuration."""
        taken = {name: given[name] for name in self.shared if name in given}
        taken |= {name: shared[name] for name in self.shared if shared[name] is not None}
        return self.cls(**(dict(values) | taken))

    def checked(self, values: Mapping[str, Any], mistakes: Mistakes) -> dict[str, Any]:
        """Return the values of a file, each made what its field is declared as; those that are wrong are left out."""
        found = {}
        for name, value in values.items():
            with mistakes.at("config", name):
                found[name] = self._checked(name, value)
        return found

    def _checked(self, name: str, value: Any) -> Any:
        from hookline.config.declared_values import checked_value

        if name not in self._fields:
            near = get_close_matches(name, self._fields, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{self.cls.__qualname__} has no {name!r}.{meant} There are: {', '.join(self._fields) or 'none'}."
            )
        return checked_value(value, self._hints[name])


def _default(one: dataclasses.Field[Any], given: Mapping[str, Any]) -> Any:
    if one.name in given:
        value = given[one.name]
        return dataclasses.field(default_factory=lambda: value)
    if one.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=one.default_factory)
    return dataclasses.field() if one.default is dataclasses.MISSING else dataclasses.field(default=one.default)


def field_help(cls: type) -> dict[str, str]:
    """What is said of each field: ``metadata["help"]``, or the string under it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _strings_under_fields(base)
    for one in dataclasses.fields(cls):
        if isinstance(one.metadata.get("help"), str):
            found[one.name] = one.metadata["help"]
    return found


def _strings_under_fields(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # made at run time: there is no source
        return {}
    lines = body.body if isinstance(body, ast.ClassDef) else []
    found = {}
    for line, below in itertools.pairwise(lines):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            text = getattr(below.value, "value", None)
            if isinstance(text, str):
                found[line.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return found


def from_parameters(function: Callable[..., Any], leave_out: Collection[str] = ()) -> type | None:
    """A dataclass of a function's parameters; None if there are none that can be flags."""
    hints = typing.get_type_hints(function)
    made: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in leave_out or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        hint = hints.get(name, str if default in (None, parameter.empty) else type(default))
        made.append((name, hint) if default is parameter.empty else (name, hint, _constant(default)))
    return dataclasses.make_dataclass(function.__name__, made, kw_only=True) if made else None


def _constant(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)
