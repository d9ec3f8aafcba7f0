"""Make flags of the fields of `Run`, of an experiment's configuration and of the options of a command, and read them.

`read` calls `run_flags`; the other commands call `parse` with a dataclass whose docstring is the help. A flag has no
default and no type here: what is not given is absent, and the text of a flag becomes what its field declares when the
run is validated. Imports pydantic only for that, so that help of other commands comes at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from hookline.errors import ConfigError, OptionError
from hookline.messages import did_you_mean
from hookline.runs.values import FlagText, declared

if TYPE_CHECKING:
    from hookline.runs.documents import KeyPath
    from hookline.runs.find import FoundExperiment

__all__ = [
    "How", "Option", "Show", "flag_of", "parse", "refuse_words", "run_flags", "run_flags_by_name", "run_options",
]  # fmt: skip

_HEADINGS: Final = {
    "training": "How it is trained",
    "hooks": "Hooks",
    "sinks": "Where metrics go, beside the record log and the console",
    "output": "What it shows and leaves behind",
    "checkpoint": "Saving and going on",
}
_COMMAND: Final = "This command"
_NOT_IN_LOOP: Final = {"epoch": {"steps"}, "step": {"epochs", "eval_every"}}
_EXPERIMENT: Final = (
    "A name (mod_arithmetic, digits), path/file.py:Class, file.py:function, package.module:Class, or a run file "
    "(.yaml, .toml, .json); or a script of your own behind --, such as -- python train.py."
)
_Options = TypeVar("_Options")


class Show(NamedTuple):
    """Say how a field of a command's options is written: ``Annotated[str, Show("FILE", is_word=True)]``."""

    metavar: str | None = None
    is_word: bool = False
    """Whether it is given by its place, without a flag."""
    short: str = ""
    """A second name, such as ``-o``."""


class Option(NamedTuple):
    """A flag: what help says of it, and where its value goes."""

    name: str
    """``hook_csv`` is ``--hook-csv``."""
    hint: Any
    """The type of its field."""
    help: str
    default: Any
    show: Show
    heading: str
    path: KeyPath
    """Where the run has its value."""

    @property
    def flag(self) -> str:
        """How it is written; a word that is given by its place has no dashes."""
        return self.name if self.show.is_word else f"--{self.name.replace('_', '-')}"


@dataclass
class How:
    """What ``hookline run`` does with a run."""

    config: Annotated[str | None, Show("FILE")] = None
    """A run file whose settings hold where no flag is given; the same as giving it in place of EXPERIMENT."""
    resume: bool = False
    """Go on with the newest run of this experiment and strategy, with its options; flags given here win over them."""
    force: bool = False
    """Resume although the configuration has changed."""
    live: bool = False
    """The same as --console live."""
    silent: bool = False
    """The same as --console silent; goes before --live."""
    no_console_output: bool = False
    """The same as --console none: print nothing but errors. Goes before --silent."""
    dry_run: bool = False
    """Print the plan (which hook when, on what, at what cost in memory, which files), and leave."""
    json: bool = False
    """Print as JSON what is said at the end, what --profile-hooks measured among it, or the plan of --dry-run. Nothing
    else goes to the standard output."""
    hooks_list: bool = False
    """List all hooks, and leave."""
    hooks_describe: Annotated[tuple[str, ...] | None, Show("[HOOK ...]")] = None
    """Describe the metrics of hooks (all, if none is named), and leave."""


# -- the flags there are ---------------------------------------------------------------------------------------


@cache
def run_flags_by_name() -> dict[str, Option]:
    """Return the flags that every experiment has, by name: ``hook_csv`` is ``--hook-csv``."""
    from hookline.runs.run import Run

    return {one.name: one for one in _options_of_model(Run, ())}


def _options_of_model(model: Any, above: KeyPath) -> Iterator[Option]:
    from hookline.runs.run import Flag

    for key, field in model.model_fields.items():
        path = (*above, key)
        if hasattr(field.annotation, "model_fields"):
            yield from _options_of_model(field.annotation, path)
        for found in field.metadata:
            if isinstance(found, Flag):
                about = " ".join((field.description or "").split())
                heading = _HEADINGS[found.group or str(above[0])]
                show = Show(found.metavar)
                yield Option(found.name or key, field.annotation, about, field.default, show, heading, path)


def _options_of_dataclass(cls: Any, heading: str, above: KeyPath = (), prefix: str = "") -> Iterator[Option]:
    """Yield the flags of a dataclass; one in it has flags with a dot."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), _field_help(cls)
    for one in dataclasses.fields(cls):
        hint, path = hints[one.name], (*above, one.name)
        if one.init and dataclasses.is_dataclass(hint):
            yield from _options_of_dataclass(hint, heading, path, f"{prefix}{one.name}.")
        elif one.init:
            show = next((said for said in get_args(hint)[1:] if isinstance(said, Show)), Show())
            default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            yield Option(f"{prefix}{one.name}", plain, texts.get(one.name, ""), default, show, heading, path)


def run_options(found: FoundExperiment | None) -> dict[str, Option]:
    """Return the flags of ``hookline run`` by name, with those of the experiment's own options."""
    config_class = None if found is None else found.config_class
    own: dict[str, Option] = {}
    if found is not None and config_class is not None:
        options = _options_of_dataclass(config_class, f"Options of {found.name}", ("config",))
        own = {one.name: one for one in options}
    left_out = set() if found is None else _NOT_IN_LOOP.get(found.loop or "", set()) - set(own)
    if {"epochs", "steps"} & set(own):
        left_out |= {"epochs", "steps"} - set(own)
    made = {name: one for name, one in run_flags_by_name().items() if name not in left_out}
    for name in [name for name in made if name in own and made[name].default is None]:  # its own text says more
        made[name] = own[name]._replace(path=made[name].path, heading=made[name].heading)
    command = {one.name: one for one in _options_of_dataclass(How, _COMMAND)}
    return made | command | {name: one for name, one in own.items() if name not in {**made, **command}}


def flag_of(path: KeyPath) -> str:
    """Return the flag of a value of a run: ``--hooks`` for ``("hooks", "names", 2)``, ``--lr`` for an option."""
    if path[:1] == ("config",) and len(path) > 1:
        return f"--{str(path[1]).replace('_', '-')}"
    return next((one.flag for one in run_flags_by_name().values() if path[: len(one.path)] == one.path), "")


# -- reading ---------------------------------------------------------------------------------------------------


def run_flags(
    arguments: Sequence[str], found: FoundExperiment | None = None, *, about: str = "", is_first_look: bool = False
) -> tuple[dict[str, Any], How, list[str]]:
    """Return what flags say, as a run file would say it; how the command works; and the words that are left over.

    Args:
        arguments: The words of the command line.
        found: The experiment, whose options are flags too.
        about: What help says above the flags.
        is_first_look: Whether the experiment is not known yet: help waits until it is.
    """
    options = run_options(found)
    word = Show("EXPERIMENT | -- COMMAND", is_word=True)
    experiment = Option("experiment", str, _EXPERIMENT, None, word, "Arguments", ("experiment",))
    prog = "hookline run" if found is None else f"hookline run {found.path}"
    values, unknown = _read([experiment, *options.values()], arguments, prog, about, has_help=not is_first_look)
    given: dict[str, Any] = {}
    how = How()
    for name, value in values.items():
        option = options.get(name, experiment)
        if option.heading == _COMMAND:
            setattr(how, name, value)
        else:
            _put(given, option.path, value)
    modes = {"none": how.no_console_output, "silent": how.silent, "live": how.live}
    if mode := next((mode for mode, is_on in modes.items() if is_on), None):
        given["console"] = mode
    return given, how, unknown


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(str(key), {})
    if path == ("hooks", "config"):
        value = _hook_config(value)
    values[str(path[-1])] = FlagText(value) if isinstance(value, str) and path[0] == "config" else value


def _hook_config(items: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return ``hook.param=value`` words as arguments by hook; the texts become what the hook declares later."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        path, equals, text = item.partition("=")
        hook, dot, name = path.partition(".")
        if not (equals and dot and hook and name):
            raise OptionError(f"Invalid --hook-config format: '{item}' (expected hook_name.param=value)")
        found.setdefault(hook, {})[name] = FlagText(text)
    return found


def parse(cls: type[_Options], arguments: Sequence[str], command: str) -> _Options:
    """Return the options of a command; help, or a mistake, leaves it.

    Recipe: ``options = parse(FindOptions, arguments, "find")``.
    """
    options = {one.name: one for one in _options_of_dataclass(cls, "Options")}
    about = inspect.cleandoc(cls.__doc__ or "")
    values, unknown = _read(options.values(), arguments, f"hookline {command}", about)
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


def _read(
    options: Iterable[Option], arguments: Sequence[str], prog: str, about: str, *, has_help: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return the texts that were given, by name, and the words that are left over."""
    words = [one.show.metavar for one in options if one.show.is_word]
    parser = _Parser(
        prog=prog, usage=" ".join([prog, "[OPTIONS]", *map(str, words)]), description=about, formatter_class=_Help,
        argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=has_help,
    )  # fmt: skip
    headings = {one.heading: parser.add_argument_group(one.heading) for one in options}
    for one in options:
        is_needed = one.default is dataclasses.MISSING
        how: dict[str, Any] = {"help": f"{one.help} {_told(one)}".replace("%", "%%"), **_takes(one)}
        if one.show.is_word:
            several = ("*", "+") if "nargs" in how else ("?", None)
            how = {"help": how["help"], "nargs": several[is_needed]}
        else:
            how |= {"dest": one.name, "required": is_needed and one.path[0] != "config"}
        if "nargs" in how or "action" not in how:
            how["metavar"] = one.show.metavar or _metavar(one)
        names = [one.name] if one.show.is_word else [one.flag, *filter(None, [one.show.short])]
        headings[one.heading].add_argument(*names, **how)
    if has_help and not {"-h", "--help"}.isdisjoint(arguments):
        arguments = ["--help"]
    values, unknown = parser.parse_known_intermixed_args([_with_dashes(word) for word in arguments])
    return vars(values), unknown


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _kinds(hint: Any) -> list[Any]:
    """Return what a value may be, but for None."""
    return [one for one in get_args(hint) if one is not NoneType] if _is_union(hint) else [hint]


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _takes(one: Option) -> dict[str, Any]:
    """Return how many values a flag takes."""
    kinds = _kinds(one.hint)
    if kinds == [bool]:
        has_off = one.heading not in (_COMMAND, "Options")
        return {"action": argparse.BooleanOptionalAction if has_off else "store_true"}
    if any((get_origin(kind) or kind) in (list, tuple, dict, set, frozenset) for kind in kinds):
        return {"nargs": "*", "action": "extend"}
    if len(kinds) > 1 and any(kind is bool or bool in get_args(kind) for kind in kinds):
        return {"nargs": "?", "const": True}  # a number, or none at all
    return {}


def _metavar(one: Option) -> str:
    (kind, *_) = _kinds(one.hint)
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    several = " ..." if "nargs" in _takes(one) else ""
    inner = next((part for part in get_args(kind) if part is not Ellipsis), kind) if several else kind
    return f"{getattr(inner, '__name__', str(inner)).upper()}{several}"


def _told(one: Option) -> str:
    if one.default is dataclasses.MISSING:
        return "" if one.show.is_word else "(needed)"
    is_told = one.default is not None and not isinstance(one.default, bool) and one.default not in ([], {}, (), "")
    return f"(default: {one.default})" if is_told and not one.show.is_word else ""


# -- texts under fields ----------------------------------------------------------------------------------------


def _field_help(cls: type) -> dict[str, str]:
    """Return what is said of each field of a dataclass: ``metadata["help"]``, or the string under it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _strings_under_fields(base)
    return found | {
        one.name: one.metadata["help"] for one in dataclasses.fields(cls) if isinstance(one.metadata.get("help"), str)
    }


def _strings_under_fields(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # made at run time: there is no source
        return {}
    found = {}
    for line, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            text = getattr(below.value, "value", None)
            if isinstance(text, str):
                found[line.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return found
