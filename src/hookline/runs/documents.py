"""Read a file of settings by its ending: YAML, TOML or JSON; validate it; tell all mistakes at once.

`read` and `ServerArgs` call `read_document` and `validated`. A `Document` has plain values, and names the place of a
wrong one by its line (not in TOML) and its keys. `Faults` collects the mistakes of look-ups, which are validators of
`Run`. ``hookline serve --hooks`` and the engines read hooks on modules by `specs_of_file`: what a spec names is
imported only for a run, since a server decides which code it lets in. Imports no torch.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, StrictBool, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from hookline.errors import ConfigError, HooklineError
from hookline.messages import did_you_mean
from hookline.plain import own_copy
from hookline.runs.flags import KeyPath, misfit
from hookline.specs.hook_spec import HookSpec

logger = logging.getLogger("hookline.serve")

ENDINGS: Final = (".yaml", ".yml", ".toml", ".json")
"""What the name of such a file ends in."""
NO_HOOKS: Final = "enable_hooks=True but no 'hooks' specified in server_args"
_RUN_KEYS: Final = frozenset(("experiment", "strategy", "specs", "sinks", "console", "output_dir", "save_checkpoints"))
"""Keys that a run file has, and no server."""
Fault = tuple[KeyPath, str]
"""The path to a value that is wrong, and a sentence about it."""
_NO_BLANKS: Final = re.compile("[\t\x85\u2028\u2029]")
"""Blanks in JSON, or signs of its texts, which YAML does not know, or takes for ends of lines."""
Place = Callable[[KeyPath], str]
"""Returns where a value was given, for a message."""


@dataclass(frozen=True)
class Document:
    """Hold the values of a file."""

    path: Path
    values: Any
    text: str = ""
    """What it was read from, YAML or JSON."""

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        """The line of each value, of one in a mapping that of its key; looked for only where there is an error."""
        found: dict[KeyPath, int] = {}
        try:
            root = yaml.compose(_NO_BLANKS.sub(" ", self.text), Loader=CoreLoader)
        except (RecursionError, yaml.YAMLError):
            return found
        todo: list[tuple[Any, KeyPath, Any]] = [] if root is None else [(root, (), root)]
        while todo:
            node, path, start = todo.pop()
            found[path] = start.start_mark.line + 1
            if isinstance(node, yaml.MappingNode):
                todo += [(value, (*path, str(key.value)), key) for key, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                todo += [(item, (*path, place), item) for place, item in enumerate(node.value)]
        return found

    def place(self, path: KeyPath) -> str:
        """Return where a value is, for an error: ``run.yaml, line 7, at $.hooks.names[2]``; TOML has no lines."""
        line = next((found for depth in range(len(path), -1, -1) if (found := self.lines.get(path[:depth]))), None)
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        return f"{self.path}{'' if line is None else f', line {line}'}, at ${keys}"

    def settings(self, such_as: str) -> dict[str, Any]:
        """Return the values of a file that has keys with values, `such_as` these; raise if it is another one."""
        if isinstance(self.values, dict):
            return self.values
        kinds = {type(None): "is empty", list: "holds a list", str: "holds text"}
        what = kinds.get(type(self.values), f"holds {self.values!r}")
        raise ConfigError(f"{self.path} {what}, and settings are keys with values: {such_as}, ….")

    def at(self, path: KeyPath) -> Any:
        """Return the value at `path`."""
        return functools.reduce(lambda value, key: value[key], path, self.values)


def read_document(path: str | Path) -> Document:
    """Read a file of settings.

    Recipe: ``read_document("run.yaml").values``.
    """
    path = Path(path)
    language, read = _READERS.get(path.suffix.lower(), ("", None))
    if read is None:
        raise ConfigError(f"{path} is no file of settings: its name ends in one of {', '.join(ENDINGS)}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not text.strip():
        return Document(path, None)
    try:
        return Document(path, read(text), "" if language == "TOML" else text)
    except Exception as error:
        raise ConfigError(f"{path}{_line_text(error)}: this is not {language}: {_reason(error)}.") from None


def _line_text(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = getattr(error, "lineno", None) if mark is None else mark.line + 1
    if line is None and (match := re.search(r"at line (\d+)", str(error))):
        line = int(match[1])
    return "" if line is None else f", line {line}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its brackets are nested too deeply"
    text = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error)
    return str(text).strip().rstrip(".")


# -- YAML 1.2 --------------------------------------------------------------------------------------------------


class CoreLoader(yaml.SafeLoader):
    """The safe loader by the core schema of YAML 1.2: ``on``, ``no`` and ``12:30`` are strings, ``1e-3`` is a number.

    PyYAML follows 1.1, where ``on: no`` is ``{True: False}``. A key that is there twice is an error.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (a copy of the class's)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                text = f"the key {name!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            if name is not None:
                seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
CoreLoader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)
)


# -- JSON, and all three -----------------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} is there twice")
        found[name] = value
    return found


def _load_yaml(text: str) -> Any:
    return own_copy(yaml.load(text, CoreLoader))  # aliases are written out, so that values share nothing


_READERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    ".yaml": ("YAML", _load_yaml),
    ".yml": ("YAML", _load_yaml),
    ".json": ("JSON", partial(json.loads, object_pairs_hook=_unique_keys)),
    ".toml": ("TOML", tomllib.loads),
}
"""By ending: the language, and what reads a value from a text."""


# -- what is wrong, and where ----------------------------------------------------------------------------------


class EscapedError(Exception):
    """Carry an error of the user's own code through pydantic, which would take a ValueError for a mistake."""


class Faults(list[Fault]):
    """Hold mistakes at paths below a value, see `collected`."""

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Take an error of hookline's in the block for a mistake at `path`."""
        try:
            yield
        except HooklineError as error:
            self.append((path, str(error)))
        except (ValueError, AssertionError) as error:
            raise EscapedError from error

    def each(self, values: Mapping[str, Any], look_up: Callable[[str, Any], Any], *above: str) -> dict[str, Any]:
        """Return what `look_up` returns for each key and value; an error of it is a mistake there."""
        found = {}
        for key, value in values.items():
            with self.at(*above, key):
                found[key] = look_up(key, value)
        return found


@contextmanager
def collected() -> Iterator[Faults]:
    """Collect the mistakes that the block finds, and raise them together, from inside of a validator of pydantic."""
    faults = Faults()
    yield faults
    if faults:
        kinds = [(path, PydanticCustomError("look_up", "{text}", {"text": text})) for path, text in faults]
        details = [InitErrorDetails(type=kind, loc=path, input=None) for path, kind in kinds]
        raise ValidationError.from_exception_data("Run", details)


def validated(kind: Any, values: Any, place: Place, faults: Sequence[Fault] = (), **context: Any) -> Any:
    """Return `values` as `kind`, a type; raise one error with all that is wrong, `faults` among it.

    Recipe: ``validated(list[HookSpec], document.values, document.place)``.
    """
    found = escaped = None
    try:
        found = TypeAdapter(kind).validate_python(values, context=context)
    except EscapedError as error:
        escaped = error.__cause__ or error
    except ValidationError as error:
        faults = [*faults, *_faults_of(error, values, kind)]
    if escaped is not None:  # raised outside of the block: within it, each error would be the context of the other
        raise escaped
    refuse(place, faults)
    return found


def refuse(place: Place, faults: Sequence[Fault]) -> None:
    """Raise one error with all of `faults`; do nothing if there are none."""
    lines = [f"{place(path)}: ".removeprefix(": ") + text for path, text in faults]
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def _faults_of(error: ValidationError, values: Any, kind: Any) -> list[Fault]:
    """Return the path and a sentence for each fault; of several about one value (a union), the last."""
    found = {}
    for fault in error.errors():
        path, type_ = _known_part(fault["loc"], values), fault["type"]
        is_key = type_ in ("extra_forbidden", "unexpected_keyword_argument")
        if is_key:
            known = list(_fields_at(path[:-1], kind))
            text = f"nothing is called {path[-1]!r} here.{did_you_mean(path[-1], known)} There are: {', '.join(known)}."
        elif type_ in ("value_error", "look_up"):
            text = fault["msg"].removeprefix("Value error, ")
        else:
            text = {"invalid_key": "keys are text.", "missing": "this is missing."}.get(type_) or misfit(fault)
        found[path, is_key] = (path, text)
    return list(found.values())


def _known_part(path: KeyPath, values: Any) -> KeyPath:
    """Return the part of a path that is in the values, with one key more; pydantic adds names of branches of unions."""
    for depth, key in enumerate(path):
        if isinstance(values, Mapping):
            values = values.get(key)
        elif isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            return path[:depth]
    return path


def _fields_at(path: KeyPath, kind: Any) -> Mapping[str, Any]:
    """Return the keys that there are where an unknown one was found."""
    here = _model_in(kind)
    for key in path:
        if str(key) in (fields := _fields_of(here)):
            here = _model_in(getattr(fields[str(key)], "annotation", None))
    return _fields_of(here)


def _fields_of(model: Any) -> Mapping[str, Any]:
    return getattr(model, "__pydantic_fields__", None) or getattr(model, "__dataclass_fields__", {})


def _model_in(annotation: Any) -> Any:
    """Return the model, or dataclass, of an annotation such as a list of them."""
    if _fields_of(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


# -- hooks on modules, in files ----------------------------------------------------------------------------------


def _checked(spec: HookSpec, info: ValidationInfo) -> HookSpec:
    if not (info.context or {}).get("is_server"):
        from hookline.runs.build import check_spec

        check_spec(spec)
    return spec


Spec = Annotated[HookSpec, AfterValidator(_checked)]
"""A hook on modules whose factory can be imported, and takes its config."""


class ServerFile(BaseModel):
    """The settings of a server: hooks on modules, and other keys, which are the server's own."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)
    enable_hooks: StrictBool | None = None
    """Whether hooks are attached; default false."""
    hooks: list[Spec] | None = None
    """Hooks on modules, attached if enable_hooks is true."""
    forward_hooks: list[Spec] | None = None
    """The same, attached in any case."""


def specs_of_file(path: str | Path) -> list[dict[str, Any]]:
    """Return the specs of a file of hooks, as it has them; log if there are none."""
    document = read_document(path)
    values = document.values
    if values is None:
        raise ConfigError(f"{path} is empty; a file of hooks is a list of specs.")
    specs = [document.at(place) for place in placed_specs(document, is_server=True)]
    if isinstance(values, dict) and values.get("enable_hooks") and not values.get("hooks"):
        logger.warning(NO_HOOKS)
    elif not specs:
        logger.warning("%s has no hooks that are switched on; nothing is attached from it", path)
    return specs


def placed_specs(document: Document, *, is_server: bool, even_off: bool = False) -> dict[KeyPath, HookSpec]:
    """Return the hooks on modules of a file that is there for them, by the path to each.

    ``hooks`` count unless ``enable_hooks`` is false: the file was asked for by name.

    Args:
        document: The file.
        is_server: Whether nothing is imported yet.
        even_off: Whether they count in any case.
    """
    if isinstance(document.values, list):
        listed = validated(list[Spec], document.values, document.place, is_server=is_server)
        return {(number,): spec for number, spec in enumerate(listed)}
    settings = _validated_server(document, is_server=is_server)
    is_off = settings.enable_hooks is False and not even_off
    lists = {"hooks": () if is_off else settings.hooks, "forward_hooks": settings.forward_hooks}
    return {(key, number): spec for key, specs in lists.items() for number, spec in enumerate(specs or ())}


def specs_for_run(path: str | Path) -> list[HookSpec]:
    """Return the hooks on modules of a file, for a run: their factories can be had."""
    return list(placed_specs(read_document(path), is_server=False).values())


def is_server_file(values: Any) -> bool:
    """Return whether these are settings of a server: with hooks on modules, and without keys that only a run has."""
    if not isinstance(values, Mapping) or not _RUN_KEYS.isdisjoint(values):
        return False
    hooks = values.get("hooks")
    is_list_of_specs = isinstance(hooks, list) and not (hooks and all(isinstance(entry, str) for entry in hooks))
    return "enable_hooks" in values or "forward_hooks" in values or is_list_of_specs


def server_settings(document: Document) -> dict[str, Any]:
    """Return the settings of a server, their hooks checked; other keys are as they are."""
    _validated_server(document, is_server=True)
    return dict(document.values)


def _validated_server(document: Document, *, is_server: bool) -> Any:
    return validated(ServerFile, document.settings("enable_hooks, hooks"), document.place, is_server=is_server)
