"""Read the options of a command from its arguments.

Every command calls `parse` with a dataclass whose docstring is the help; tyro does the rest, but for the errors about
numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.conf import FlagCreatePairsOff
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hookline.errors import OptionError

__all__ = ["NUMBERS", "numbers_named", "parse"]

_Options = TypeVar("_Options")


def parse(cls: type[_Options], arguments: Sequence[str], command: str) -> _Options:
    """Return the options; a mistake in them leaves the process with exit code 2."""
    about = inspect.cleandoc(cls.__doc__ or "")
    with numbers_named(arguments):
        return tyro.cli(
            cls,
            args=list(arguments),
            prog=f"hookline {command}",
            description=about,
            config=(FlagCreatePairsOff,),
            registry=NUMBERS,
        )


class _NoNumber(Exception):
    """What was given is no number. No ValueError: tyro would draw a box around it, with the help of the flag."""

    def __init__(self, wanted: str, given: str) -> None:
        super().__init__(f"{wanted}; got {given!r}")
        self.given = given


@contextmanager
def numbers_named(arguments: Sequence[str]) -> Iterator[None]:
    """Turn what is no number into one sentence with its flag, while tyro reads ``arguments``."""
    try:
        yield
    except _NoNumber as error:
        raise OptionError(f"{_flag_of(error.given, arguments)}{error}.") from None


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


NUMBERS = ConstructorRegistry()
"""Reads whole numbers and numbers, with a plain sentence for what is none."""


@NUMBERS.primitive_rule
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
