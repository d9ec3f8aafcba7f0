"""Make flags of the fields of a class, read them, and turn their texts into what the fields declare.

The commands call `parse` with a dataclass whose docstring is the help; `read` calls `read_flags` with the options of a
`Run` and of its experiment. What is not given is absent, and texts become values when they are declared (`declared`).
Imports pydantic only for that, so that help comes at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from hookline.errors import ConfigError, OptionError
from hookline.messages import did_you_mean, short_repr

if TYPE_CHECKING:
    from pydantic import TypeAdapter

COMMAND: Final = "Options"
"""The heading of what a command itself does: its switches have no ``--no-`` form."""
KeyPath = tuple[str | int, ...]
"""The keys and places that lead to a value."""
_Options = TypeVar("_Options")


class Show(NamedTuple):
    """Say how a field is written on the command line: ``Annotated[str, Show("FILE", is_word=True)]``."""

    metavar: str | None = None
    is_word: bool = False
    """Whether it is given by its place, without a flag."""
    short: str = ""
    """A second name, such as ``-o``."""
    name: str = ""
    """Its name, if it is not that of the field."""
    group: str = COMMAND
    """Its heading in help."""


class Option(NamedTuple):
    """A flag: what help says of it, and where its value goes."""

    name: str
    """``hook_csv`` is ``--hook-csv``."""
    hint: Any
    """The type of its field."""
    help: str
    default: Any
    show: Show
    path: KeyPath
    """Where the run has its value."""

    @property
    def flag(self) -> str:
        """How it is written; a word that is given by its place has no dashes."""
        return self.name if self.show.is_word else f"--{self.name.replace('_', '-')}"


# -- the flags there are ---------------------------------------------------------------------------------------


def options_of_model(model: Any, above: KeyPath = ()) -> Iterator[Option]:
    """Yield the flags of a model of pydantic, and of the models in it: the fields with a `Show`."""
    for key, field in model.model_fields.items():
        path = (*above, key)
        if hasattr(field.annotation, "model_fields"):
            yield from options_of_model(field.annotation, path)
        for show in field.metadata:
            if isinstance(show, Show):
                about = " ".join((field.description or "").split())
                yield Option(show.name or key, field.annotation, about, field.default, show, path)


def options_of_dataclass(cls: Any, heading: str = COMMAND, above: KeyPath = (), prefix: str = "") -> Iterator[Option]:
    """Yield the flags of a dataclass, all fields; one in it has flags with a dot."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), _field_help(cls)
    for one in dataclasses.fields(cls):
        hint, path = hints[one.name], (*above, one.name)
        if one.init and dataclasses.is_dataclass(hint):
            yield from options_of_dataclass(hint, heading, path, f"{prefix}{one.name}.")
        elif one.init:
            show = next((said for said in get_args(hint)[1:] if isinstance(said, Show)), Show())
            default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            about = texts.get(one.name, "")
            yield Option(f"{prefix}{one.name}", plain, about, default, show._replace(group=heading), path)


def _field_help(cls: type) -> dict[str, str]:
    """Return what is said of each field of a dataclass: the string under it."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in _strings_under_fields(base)}


def _strings_under_fields(cls: type) -> Iterator[tuple[str, str]]:
    try:
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # made at run time: there is no source
        return
    for line, below in itertools.pairwise(getattr(body, "body", ())):
        text = getattr(getattr(below, "value", None), "value", None) if isinstance(below, ast.Expr) else None
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(text, str):
            yield line.target.id, inspect.cleandoc(text).replace("\n", " ")


# -- reading ---------------------------------------------------------------------------------------------------


def parse(cls: type[_Options], arguments: Sequence[str], command: str) -> _Options:
    """Return the options of a command; help, or a mistake, leaves it.

    Recipe: ``options = parse(FindOptions, arguments, "find")``.
    """
    options = {one.name: one for one in options_of_dataclass(cls)}
    about = inspect.cleandoc(cls.__doc__ or "")
    values, unknown = read_flags(options.values(), arguments, f"hookline {command}", about)
    refuse_words(unknown, options, f"hookline {command}")
    for name, value in values.items():
        try:
            values[name] = declared(value, options[name].hint)
        except ConfigError as error:
            raise OptionError(f"{options[name].flag}: {error}") from None
    return cls(**values)


def refuse_words(unknown: Sequence[str], options: Mapping[str, Option], command: str) -> None:
    """Raise because of a word that means nothing here, with the nearest flag; do nothing if there is none."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if flags:
        meant = did_you_mean(flags[0], [one.flag for one in options.values()])
        raise OptionError(f"There is no option {flags[0]}.{meant} All of them: {command} --help")
    if unknown:
        raise OptionError(f"{unknown[0]!r} is one word too many. See {command} --help")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise OptionError(f"{message.removeprefix('argument ')}. See {self.prog} --help")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)  # as it is: it says itself that there may be several


def read_flags(
    options: Iterable[Option], arguments: Sequence[str], prog: str, about: str, *, has_help: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return the texts that were given, by name, and the words that are left over."""
    words = [str(one.show.metavar) for one in options if one.show.is_word]
    parser = _Parser(
        prog=prog, usage=" ".join([prog, "[OPTIONS]", *words]), description=about, formatter_class=_Help,
        argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=has_help,
    )  # fmt: skip
    groups = {one.show.group: parser.add_argument_group(one.show.group) for one in options}
    for one in options:
        _add(groups[one.show.group], one)
    if has_help and not {"-h", "--help"}.isdisjoint(arguments):
        arguments = ["--help"]
    values, unknown = parser.parse_known_intermixed_args([_with_dashes(word) for word in arguments])
    return vars(values), unknown


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _add(group: Any, one: Option) -> None:
    """Add a flag, or a word, to a group of a parser."""
    kinds = _kinds(one.hint)
    is_needed = one.default is dataclasses.MISSING
    is_list = any((get_origin(kind) or kind) in (list, tuple, dict, set, frozenset) for kind in kinds)
    about = f"{one.help} {_told(one, is_needed)}".replace("%", "%%")
    metavar = one.show.metavar or _metavar(kinds[0], is_list)
    if one.show.is_word:
        several = ("*", "+") if is_list else ("?", None)
        group.add_argument(one.name, help=about, metavar=metavar, nargs=several[is_needed])
        return
    takes: dict[str, Any] = {"metavar": metavar}
    if kinds == [bool]:
        takes = {"action": "store_true" if one.show.group == COMMAND else argparse.BooleanOptionalAction}
    elif is_list:
        takes |= {"nargs": "*", "action": "extend"}
    elif len(kinds) > 1 and any(kind is bool or bool in get_args(kind) for kind in kinds):
        takes |= {"nargs": "?", "const": True}  # a number, or none at all
    names = [one.flag, *filter(None, [one.show.short])]
    group.add_argument(*names, dest=one.name, help=about, required=is_needed and one.path[0] != "config", **takes)


def _kinds(hint: Any) -> list[Any]:
    """Return what a value may be, but for None."""
    is_union = get_origin(hint) in (Union, UnionType)
    return [one for one in get_args(hint) if one is not NoneType] if is_union else [hint]


def _metavar(kind: Any, is_list: bool) -> str:
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    inner = next((part for part in get_args(kind) if part is not Ellipsis), kind) if is_list else kind
    return f"{getattr(inner, '__name__', str(inner)).upper()}{' ...' * is_list}"


def _told(one: Option, is_needed: bool) -> str:
    if one.show.is_word or one.default in (None, [], {}, (), "") or isinstance(one.default, bool):
        return ""
    return "(needed)" if is_needed else f"(default: {one.default})"


# -- values ----------------------------------------------------------------------------------------------------


class FlagText(str):
    """Mark the text of a flag whose type only an experiment or a hook knows: it is yet to become what they declare."""

    __slots__ = ()


def declared(value: Any, hint: Any) -> Any:
    """Return `value` as a type has it: 1 as a float, a list as a tuple; the text of a flag by `from_text`."""
    from pydantic import ValidationError

    adapter = _adapter(hint)
    if adapter is None:
        return value
    if isinstance(value, FlagText):
        return from_text(str(value), hint)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(misfit(error.errors()[0])) from None


def misfit(fault: Any) -> str:
    """Return a sentence about a fault of pydantic: what was expected, and what is there."""
    said = str(fault["msg"]).removeprefix("Input should be ").partition(", unable to parse")[0]
    said = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", said)
    return f"expected {said}, got {short_repr(fault['input'])}."


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    for config in (ConfigDict(arbitrary_types_allowed=True), None):  # a dataclass has settings of its own
        try:
            return TypeAdapter(hint, config=config)
        except (PydanticUserError, PydanticSchemaGenerationError, NameError):
            continue
    return None


def from_text(text: str, hint: Any) -> Any:
    """Return the text of a flag as a type has it: ``2,5,10`` as a list of numbers, ``none`` as None, ``on`` as True."""
    from pydantic import ValidationError

    adapter, guess = _adapter(hint), guessed(text)
    if adapter is None or hint is Any:
        return guess
    parts = [part.strip() for part in text.strip("[]()").split(",") if part.strip()]
    lists = [[guessed(part) for part in parts], parts]
    values = [*lists, text] if "," in text or not text else [text, *lists]
    # A text is one that is no number, no bool and no list, where all of them will do.
    for value, strict in [*([] if isinstance(guess, str) else [(guess, True)]), *((value, False) for value in values)]:
        try:
            return adapter.validate_python(value, strict=strict)
        except ValidationError:
            continue
    return declared(text, hint)  # raises


def guessed(text: str) -> Any:
    """Return a text as a number, true, false or null, if it is written like one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), str(text))
