"""Describe a hook as data: which modules, which factory, which configuration; and find the code that a path names.

Users, files of settings and servers make a `HookSpec`; pydantic checks it, and makes its JSON Schema. `register_hooks`
(in ``apply_specs``) attaches it. Imports no torch, so that configuration can be checked without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Annotated, Any, Final, Literal, Self, overload

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from hookline.errors import HooklineError, NotAllowedError, OptionError
from hookline.messages import did_you_mean, short_repr
from hookline.plain import own_copy
from hookline.sites.kinds import CALL_KINDS, FUNCTION, MODULE, Kind, SiteType

_ON_FUNCTION: Final = "function_"
_UNKNOWN_KEY: Final = "unexpected_keyword_argument"


def _kind_names(site_type: SiteType) -> list[str]:
    return [str(kind) for kind in Kind if kind in site_type.args] + list(site_type.aliases)


KINDS: Final = [*_kind_names(MODULE), *(f"{_ON_FUNCTION}{name}" for name in _kind_names(FUNCTION))]
"""What ``on`` may be."""


def _parse_kind(on: str) -> tuple[Kind, SiteType]:
    if on.startswith(_ON_FUNCTION):
        return Kind.parse(on.removeprefix(_ON_FUNCTION), FUNCTION), FUNCTION
    return Kind.parse(on), MODULE


def _check_kind(on: str) -> str:
    _parse_kind(on)
    return on


def _check_factory(given: Any) -> Any:
    if given is None or isinstance(given, str) or callable(given):
        return given
    raise OptionError(f"hook_factory is a path such as 'package.module:factory', got {short_repr(given)}.")


def _listed(given: Any) -> Any:
    """Return patterns as a list: one may stand alone, and null and an empty text are none."""
    if isinstance(given, list | tuple) or not given:
        return given or ()
    if isinstance(given, str):
        return (given,)
    raise OptionError(f"Module names or patterns come in a list, got {short_repr(given)}.")


def _own_config(given: Any) -> Any:
    return own_copy(dict(given)) if isinstance(given, Mapping) else given or {}


_Patterns = Annotated[
    tuple[StrictStr, ...],
    Field(fail_fast=True),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "null"}]}),
]
_Factory = Annotated[
    str | Callable[[dict[str, Any]], Any] | None, PlainValidator(_check_factory), WithJsonSchema({"type": "string"})
]


@dataclass(
    frozen=True,
    config=ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        # A spec without them is attached nowhere, with a line in the log; an editor asks for them.
        json_schema_extra={"required": ["target_modules", "hook_factory"]},
    ),
)
class HookSpec:
    """Describe one hook: a factory and its configuration, and the modules that the hook goes to.

    Recipe::

        spec = hookline.HookSpec(
            name="shapes", target_modules=["layers.#"], hook_factory="my_project.hooks:log_shapes", config={"level": 1}
        )
        handles = hookline.register_hooks(model, [spec])
    """

    name: StrictStr = ""
    """For logs and reports; the hook's own name if empty."""
    target_modules: _Patterns = ()
    """Names or globs, of which one has to match: ``*`` crosses dots, ``#`` is one numeric part, ``[0-9]`` one digit."""
    hook_factory: _Factory = None
    """``"package.module:factory"`` or ``"package.module.factory"``; from Python, the factory itself will do.

    It is called once with a copy of the configuration, and gives the one hook that all these modules share."""
    config: Annotated[dict[Any, Any], BeforeValidator(_own_config)] = Field(default_factory=dict)
    """What the factory is called with. The spec has a copy of its own: of dicts, lists, sets and tuples; other objects
    in it, such as tensors, are the same ones."""
    on: Annotated[StrictStr, AfterValidator(_check_kind), WithJsonSchema({"enum": KINDS})] = "forward"
    """The kind of hook (see `Kind`); ``"function_forward"`` and its sisters are for functions, by name, that are
    called in the model's forwards."""
    observe: StrictBool = False
    """Ignore what the hook returns, and run it after all edits."""
    every: Annotated[StrictInt, Field(ge=1)] | None = None
    """Run it in every n-th forward of the model only: the first, number n, number 2n, …"""
    exclude: _Patterns = ()
    """Names or globs to leave out."""
    enabled: StrictBool = True
    """False passes it over."""
    on_error: Literal["raise", "warn", "disable"] = "raise"
    """What becomes of an exception in the hook: ``"raise"``; ``"warn"``, which logs the first; ``"disable"``, which
    logs it and switches the hook off."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """Take an object; null is the same as nothing."""
        if isinstance(given, Mapping):
            return {key: value for key, value in given.items() if value is not None}
        if isinstance(given, HookSpec | ArgsKwargs):
            return given
        raise OptionError(f"A hook spec is an object with target_modules and hook_factory, got {short_repr(given)}.")

    def __post_init__(self) -> None:
        """Raise for an option that does not go with the others."""
        kind, _ = self.kind_and_site_type
        if self.every is not None and kind not in (*CALL_KINDS, Kind.PARAM_GRAD):
            raise OptionError(f"every counts forwards of the model, and on={self.on!r} does not go by those.")
        if self.observe:
            kind.check_option("observe")

    @property
    def kind_and_site_type(self) -> tuple[Kind, SiteType]:
        """Return the kind that ``on`` names, and the type of its sites: module or function."""
        return _parse_kind(self.on)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec that a JSON object describes; an unknown key is an error, a key with null is left out."""
        with option_errors(cls):
            return TypeAdapter(cls).validate_python(data)


@contextmanager
def option_errors(kind: type) -> Iterator[None]:
    """Raise the first fault that pydantic finds in the block, which reads a ``kind``, as an error of ours."""
    try:
        yield
    except ValidationError as error:
        raise error_of_faults(error.errors(), kind) from None


def fault_to_tell(faults: Sequence[Any]) -> Any:
    """Return the fault of ``ValidationError.errors()`` to tell: a key that is missing may be there, mistyped."""
    return next((each for each in faults if each["type"] == _UNKNOWN_KEY), faults[0])


def error_of_faults(faults: Sequence[Any], kind: type | None = None) -> HooklineError:
    """Return what to tell of ``ValidationError.errors()``; ``kind`` is the dataclass that was read, if it is known."""
    fault = fault_to_tell(faults)
    raised = fault.get("ctx", {}).get("error")
    if isinstance(raised, HooklineError):
        return raised
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == _UNKNOWN_KEY:
        around, _, name = place.rpartition(".")
        known = [] if around or kind is None else [each.name for each in fields(kind)]
        there = f" It takes {', '.join(known)}." if known else ""
        what = around or ("A hook spec" if kind is HookSpec else "This")
        return OptionError(f"{what} has no {name!r}.{did_you_mean(name, known)}{there}")
    text = fault["msg"].replace("Input should be", "expected")
    return OptionError(f"{place}{': ' if place else ''}{text}, got {short_repr(fault['input'])}.")


HookSpec.__init__ = option_errors(HookSpec)(HookSpec.__init__)  # type: ignore[method-assign]  # where Python makes it


# -- paths to code ----------------------------------------------------------------------------------------------


@overload
def resolve_callable(path: None, allow: Iterable[str] | None = None) -> None: ...
@overload
def resolve_callable(path: str, allow: Iterable[str] | None = None) -> Any: ...
def resolve_callable(path: str | None, allow: Iterable[str] | None = None) -> Any:
    """Return the object at ``"package.module:name"`` or ``"package.module.name"``; None for None.

    Recipe::

        factory = hookline.specs.resolve_callable("my_project.hooks:log_shapes", allow=["my_project"])

    Args:
        path: Where it is. Its module is imported, which runs that module's code.
        allow: What paths may begin with: ``"my_project"`` stands for the package and all in it, and
            ``"my_project.hooks:log_shapes"`` for that one. What an allowed module has imported from one that is not
            allowed is refused too. None allows everything; an empty list nothing.

    Raises:
        ValueError: The path has neither a colon nor a dot.
        ModuleNotFoundError, AttributeError: There is no such module, or nothing of that name in it.
        NotAllowedError: (a PermissionError) before anything is imported.
    """
    if path is None:
        return None
    if not isinstance(path, str):
        raise OptionError(f"A hook callable path is a string, got {path!r}.")
    allowed = None if allow is None else _prefixes(allow)
    module_name, name = _split_path(path)
    if allowed is not None and not _is_under(f"{module_name}.{name}", allowed):
        raise NotAllowedError(_refusal(path, allowed))
    module = importlib.import_module(module_name)
    try:
        found = getattr(module, name)
    except AttributeError as error:
        # In SGLang's words; what may have been meant is a note.
        missing = AttributeError(f"Module '{module_name}' has no attribute '{name}' (from hook path '{path}')")
        near = did_you_mean(name, [each for each in dir(module) if not each.startswith("_")])
        if near:
            missing.add_note(near.strip())
        raise missing from error
    if allowed is not None and f"{module_name}.{name}" not in allowed and not _is_under(_home(found), allowed):
        raise NotAllowedError(f"{_refusal(path, allowed)} It is there, but comes from '{_home(found)}'.")
    return found


def _split_path(path: str) -> tuple[str, str]:
    """Return the module that `path` names, and the name in it."""
    if ":" in path:
        module, _, name = path.partition(":")
    else:
        module, _, name = path.rpartition(".")
    if (not module and ":" not in path) or module.startswith("."):
        raise OptionError(
            f"Invalid hook callable path '{path}'. Expected 'module.submodule:factory' or 'module.submodule.factory'."
        )
    return module, name


def _prefixes(allow: Iterable[str]) -> list[str]:
    """Return what paths may begin with, all with dots; ``"my_project.*"`` means the same as ``"my_project"``."""
    given = [allow] if isinstance(allow, str) else list(allow)
    for prefix in given:
        if not isinstance(prefix, str) or not prefix.rstrip("*").rstrip(".:"):
            raise OptionError(f"allow= takes names such as 'my_project' or 'my_project.hooks:factory', got {prefix!r}.")
    return [prefix.rstrip("*").rstrip(".:").replace(":", ".") for prefix in given]


def _is_under(path: str, prefixes: list[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _home(found: Any) -> str:
    """Return the module that defines `found`; of an object that does not say so, the module of its type."""
    if isinstance(found, ModuleType):
        return found.__name__
    home = getattr(found, "__module__", None)
    return home if isinstance(home, str) else type(found).__module__


def _refusal(path: str, prefixes: list[str]) -> str:
    shown = ", ".join(map(repr, prefixes)) or "none"
    return f"Hook callable path '{path}' is not allowed; allowed: {shown}."
