"""Read the options of a command from its arguments.

Every command calls `parse` with a dataclass whose docstring is the help; tyro does the rest, but for the errors about
numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.conf import FlagCreatePairsOff
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hookline.errors import OptionError

__all__ = ["parse", "read_flags"]

_Options = TypeVar("_Options")


def parse(cls: type[_Options], arguments: Sequence[str], command: str) -> _Options:
    """Return the options; a mistake in them leaves the process with exit code 2."""
    about = inspect.cleandoc(cls.__doc__ or "")
    options: _Options = read_flags(
        cls, arguments, f"hookline {command}", description=about, config=(FlagCreatePairsOff,)
    )
    return options


def read_flags(cls: Any, arguments: Sequence[str], prog: str, **options: Any) -> Any:
    """Return what tyro reads from ``arguments``; `parse` and the requests of ``hookline run`` call it.

    What is no number is an `OptionError` of one sentence. Any other mistake leaves the process, as tyro has it.

    Args:
        cls: The dataclass of the options.
        arguments: The words of the command line.
        prog: What the help calls the command.
        **options: As of ``tyro.cli``.
    """
    try:
        return tyro.cli(cls, args=list(arguments), prog=prog, registry=_NUMBERS, **options)
    except _NoNumber as error:
        raise OptionError(f"{_flag_of(error.given, arguments)}{error}.") from None


class _NoNumber(Exception):
    """What was given is no number. No ValueError: tyro would draw a box around it, with the help of the flag."""

    def __init__(self, wanted: str, given: str) -> None:
        super().__init__(f"{wanted}; got {given!r}")
        self.given = given


def _flag_of(given: str, arguments: Sequence[str]) -> str:
    before = ""
    for word in arguments:
        name, equals, value = word.partition("=")
        if value == given and equals and name.startswith("--"):
            return f"{name}: "
        if word == given and before.startswith("--"):
            return f"{before}: "
        before = word
    return ""


_NUMBERS = ConstructorRegistry()
"""Reads whole numbers and numbers, with a plain sentence for what is none."""


@_NUMBERS.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kinds = set(get_args(info.type)) if get_origin(info.type) in (Union, UnionType) else {info.type}
    or_none = NoneType in kinds
    kinds -= {NoneType}
    if kinds == {int}:
        return _spec(int, "a whole number is wanted, such as 10", or_none=or_none)
    if kinds == {float}:
        return _spec(float, "a number is wanted, such as 0.1 or 1e-3", or_none=or_none)
    return None


def _spec(kind: Callable[[str], Any], wanted: str, *, or_none: bool) -> PrimitiveConstructorSpec[Any]:
    def read(given: list[str]) -> Any:
        if or_none and given[0].lower() == "none":
            return None
        try:
            return kind(given[0])
        except ValueError:
            raise _NoNumber(wanted, given[0]) from None

    def fits(value: Any) -> Any:
        # As tyro has it: a whole number will do for a number.
        is_same = type(value) is kind or (or_none and value is None)
        return "~" if not is_same and kind is float and isinstance(value, int) else is_same

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=getattr(kind, "__name__", "").upper(),
        instance_from_str=read,
        is_instance=fits,
        str_from_instance=lambda value: [str(value)],
    )
