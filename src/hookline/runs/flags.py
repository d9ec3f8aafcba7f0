"""Make the flags of ``hookline run`` from the fields of `Run` and of an experiment's configuration, and read them.

`read` calls `run_flags`; the other commands read their own dataclasses by `read_flags`. What is not given is not in the
result: a flag has no default here. Imports pydantic only for `Run`, so that help of other commands comes at once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypedDict, Union, get_args, get_origin

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hookline.errors import OptionError

if TYPE_CHECKING:
    from hookline.runs.documents import KeyPath
    from hookline.runs.find import FoundExperiment

__all__ = ["How", "RunFlag", "field_help", "flag", "flag_of", "read_flags", "run_flags", "run_flags_by_name"]

_SEVERAL: Final = ("--hooks", "--hook-config", "--hook-sink", "--hooks-describe", "--show")
_GROUPS: Final = {
    "training": "How it is trained",
    "hooks": "Hooks",
    "sinks": "Where metrics go, beside the record log and the console",
    "output": "What it shows and leaves behind",
    "checkpoint": "Saving and going on",
}
"""The headings of help."""
_NOT_IN_LOOP: Final = {"epoch": {"steps"}, "step": {"epochs", "eval_every"}}


def flag(metavar: str | None = None, hint: str | None = "") -> Any:
    """Return how a flag is shown in help; ``hint`` None shows its default."""
    return arg(metavar=metavar, help_behavior_hint=hint)


Switch = Annotated[bool, FlagCreatePairsOff, flag()]


@dataclass
class How:
    """This command"""

    config: Annotated[str | None, flag("FILE")] = None
    """A run file whose settings hold where no flag is given; the same as giving it in place of EXPERIMENT."""
    resume: Switch = False
    """Go on with the newest run of this experiment and strategy, with its options; flags given here win over them."""
    force: Switch = False
    """Resume although the configuration has changed."""
    live: Switch = False
    """The same as --console live."""
    silent: Switch = False
    """The same as --console silent; goes before --live."""
    no_console_output: Switch = False
    """The same as --console none: print nothing but errors. Goes before --silent."""
    dry_run: Switch = False
    """Print the plan (which hook when, on what, at what cost in memory, which files), and leave."""
    json: Switch = False
    """Print as JSON what is said at the end, what --profile-hooks measured among it, or the plan of --dry-run. Nothing
    else goes to the standard output."""
    hooks_list: Switch = False
    """List all hooks, and leave."""
    hooks_describe: Annotated[tuple[str, ...] | None, flag("[HOOK ...]")] = None
    """Describe the metrics of hooks (all, if none is named), and leave."""


class RunFlag(NamedTuple):
    """A field of `Run` that is a flag."""

    path: KeyPath
    """Where the run has its value."""
    type: Any
    metavar: str | None
    help: str
    default: Any
    group: str


@cache
def run_flags_by_name() -> dict[str, RunFlag]:
    """Return the flags that every experiment has, by name: ``hook_csv`` is ``--hook-csv``."""
    from hookline.runs.run import Run

    return dict(_flags_in(Run, ()))


def _flags_in(model: Any, above: KeyPath) -> Iterator[tuple[str, RunFlag]]:
    from hookline.runs.run import Flag

    for key, field in model.model_fields.items():
        path = (*above, key)
        if hasattr(field.annotation, "model_fields"):
            yield from _flags_in(field.annotation, path)
        for found in field.metadata:
            if isinstance(found, Flag):
                about = " ".join((field.description or "").split())
                group = found.group or str(above[0])
                kind = _type_of(field.annotation)
                yield found.name or key, RunFlag(path, kind, found.metavar, about, field.default, group)


def _type_of(annotation: Any) -> Any:
    """Return what tyro reads for a field: no None, texts for lists, whole numbers or nothing for ``bool | int``."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType] if _is_union(annotation) else [annotation]
    if len(kinds) > 1:
        return Annotated[Any, _number_or_nothing()]
    return list[str] if get_origin(kinds[0]) in (list, dict) else kinds[0]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def flag_of(path: KeyPath) -> str:
    """Return the flag of a value of a run: ``--hooks`` for ``("hooks", "names", 2)``, ``--lr`` for an option."""
    if path[:1] == ("config",) and len(path) > 1:
        return f"--{str(path[1]).replace('_', '-')}"
    names = [name for name, one in run_flags_by_name().items() if path[: len(one.path)] == one.path]
    return f"--{names[0].replace('_', '-')}" if names else ""


def run_flags(
    arguments: Sequence[str], found: FoundExperiment | None = None, *, prog: str = "hookline run", about: str = "",
    is_first_look: bool = False,
) -> tuple[dict[str, Any], How, list[str]]:  # fmt: skip
    """Return what flags say, as a run file would say it; how the command works; and the words that are no flags.

    Args:
        arguments: The words of the command line.
        found: The experiment, whose options are flags too.
        prog: What help calls the command.
        about: What help says above the flags.
        is_first_look: Whether the experiment is not known yet: words that are no flags may be its options.
    """
    words = joined_flags(arguments)
    if is_first_look:
        words = [word for word in words if word not in ("-h", "--help")]
    made = _flags_type(found)
    options: dict[str, Any] = {"description": about} if about else {}
    read = read_flags(made, words, prog, return_unknown_args=is_first_look, **options)
    values, unknown = read if is_first_look else (read, [])
    given: dict[str, Any] = {}
    for name, value in itertools.chain.from_iterable(values[group].items() for group in _GROUPS):
        _put(given, run_flags_by_name()[name].path, value)
    if own := _without_empty(values.get("config", {})):
        given["config"] = own
    if values.get("experiment", "[]") != "[]":  # tyro 1.0, for a positional that is not there beside unknown flags
        given["experiment"] = values["experiment"]
    how: How = values["command"]
    modes = {"none": how.no_console_output, "silent": how.silent, "live": how.live}
    if mode := next((mode for mode, is_on in modes.items() if is_on), None):
        given["console"] = mode
    return given, how, unknown


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(str(key), {})
    values[str(path[-1])] = _hook_config(value) if path == ("hooks", "config") else value


def _hook_config(items: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return ``hook.param=value`` words as arguments by hook; the texts become what the hook declares later."""
    from hookline.runs.look_up import FlagText

    found: dict[str, dict[str, Any]] = {}
    for item in items:
        path, equals, text = item.partition("=")
        hook, dot, name = path.partition(".")
        if not (equals and dot and hook and name):
            raise OptionError(f"Invalid --hook-config format: '{item}' (expected hook_name.param=value)")
        found.setdefault(hook, {})[name] = FlagText(text)
    return found


def _without_empty(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    kept = {key: _without_empty(value) for key, value in values.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _flags_type(found: FoundExperiment | None) -> Any:
    """Return the type that tyro reads: all flags in groups, and those of the experiment's own options."""
    experiment: Any = Annotated[
        Positional[str], arg(metavar="EXPERIMENT | -- COMMAND", help=_EXPERIMENT, help_behavior_hint="")
    ]
    made: dict[str, Any] = {"experiment": experiment}
    own = {} if found is None else _own_flags(found)
    left_out = set() if found is None else _NOT_IN_LOOP.get(found.loop or "", set()) - set(own)
    if {"epochs", "steps"} & set(own):
        left_out |= {"epochs", "steps"} - set(own)
    for group, title in _GROUPS.items():
        flags = {}
        for name, one in run_flags_by_name().items():
            if one.group == group and name not in left_out:
                is_own = name in own and one.default is None  # the experiment says more of it
                flags[name] = own[name] if is_own else _annotated(one.type, one.metavar, one.help, one.default)
        made[group] = Annotated[_dict_type(title, flags), OmitArgPrefixes]
    made["command"] = Annotated[How, OmitArgPrefixes]
    others = {name: hint for name, hint in own.items() if name not in run_flags_by_name() and not hasattr(How, name)}
    if found is not None and others:
        made["config"] = Annotated[_dict_type(f"Options of {found.name}", others), arg(name="")]
    return _dict_type("Flags", made)


_EXPERIMENT: Final = (
    "A name (mod_arithmetic, digits), path/file.py:Class, file.py:function, package.module:Class, or a run file "
    "(.yaml, .toml, .json); or a script of your own behind --, such as -- python train.py."
)


def _dict_type(title: str, fields: Mapping[str, Any]) -> Any:
    make: Any = TypedDict
    made = make(title.replace(" ", ""), dict(fields), total=False)
    made.__doc__ = title
    return made


def _own_flags(found: FoundExperiment) -> dict[str, Any]:
    return {} if found.config_class is None else _flags_of_dataclass(found.config_class)


def _flags_of_dataclass(cls: Any) -> dict[str, Any]:
    """Return the flags of a configuration; a dataclass in it has flags with a dot."""
    from typing import get_type_hints

    hints, texts = get_type_hints(cls, include_extras=True), field_help(cls)
    made = {}
    for one in dataclasses.fields(cls):
        if not one.init:
            continue
        hint = hints[one.name]
        if dataclasses.is_dataclass(hint):
            made[one.name] = _dict_type(one.name, _flags_of_dataclass(hint))
        else:
            made[one.name] = _annotated(hint, None, texts.get(one.name, ""), _default_of(one))
    return made


def _default_of(one: dataclasses.Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default


def _annotated(hint: Any, metavar: str | None, text: str, default: Any) -> Any:
    is_told = default is not None and not isinstance(default, bool) and default not in ([], {}, ())
    told = f"(default: {default})" if is_told else ""
    if default is dataclasses.MISSING:
        told = "(needed)"
    return Annotated[hint, arg(metavar=metavar, help=text, help_behavior_hint=told)]


def joined_flags(arguments: Sequence[str]) -> list[str]:
    """Return the words; a flag of several values that is given twice has all of them at its first place."""
    rest: list[str] = []
    several: dict[str, list[str]] = {}
    current: str | None = None
    for argument in arguments:
        name, equals, value = argument.partition("=")
        spelled = name.replace("_", "-")
        if spelled in _SEVERAL:
            current = spelled
            if current not in several:
                several[current] = []
                rest.append(current)
            several[current] += [value] if equals else []
        elif argument.startswith("--") or current is None:
            current = None
            rest.append(argument)
        else:
            several[current].append(argument)
    return [one for argument in rest for one in (argument, *several.get(argument, ()))]


# -- tyro, with plain sentences about numbers ------------------------------------------------------------------


def read_flags(cls: Any, arguments: Sequence[str], prog: str, **options: Any) -> Any:
    """Return what tyro reads from ``arguments``.

    What is no number is an `OptionError` of one sentence. Any other mistake leaves the process, as tyro has it.

    Args:
        cls: The class of the options.
        arguments: The words of the command line.
        prog: What the help calls the command.
        **options: As of ``tyro.cli``.
    """
    try:
        return tyro.cli(cls, args=list(arguments), prog=prog, registry=_NUMBERS, **options)
    except _NoNumber as error:
        raise OptionError(f"{_flag_before(error.given, arguments)}{error}.") from None


class _NoNumber(Exception):
    """What was given is no number. No ValueError: tyro would draw a box around it, with the help of the flag."""

    def __init__(self, wanted: str, given: str) -> None:
        super().__init__(f"{wanted}; got {given!r}")
        self.given = given


def _flag_before(given: str, arguments: Sequence[str]) -> str:
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
    kinds = set(get_args(info.type)) if _is_union(info.type) else {info.type}
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


def _number_or_nothing() -> Any:
    """Return how a flag reads a whole number, or none, which is True."""

    def read(given: list[str]) -> int | bool:
        try:
            return int(given[0]) if given else True
        except ValueError:
            raise _NoNumber("a whole number is wanted, such as 10, or none at all", " ".join(given)) from None

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[N]",
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


# -- texts under fields ----------------------------------------------------------------------------------------


def field_help(cls: type) -> dict[str, str]:
    """Return what is said of each field of a dataclass: ``metadata["help"]``, or the string under it."""
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
