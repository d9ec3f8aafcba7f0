"""Describe a hook as data: which modules, which factory, which configuration; and find the code that a path names.

Users, files of settings and servers make a `HookSpec` or call `register_hooks`, which calls `apply_specs`. This module
imports no torch, so configuration can be checked without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, overload

from hookline.error_policy import ON_ERROR
from hookline.errors import HooklineError, KindError, NotAllowedError, OptionError
from hookline.messages import did_you_mean, short_repr, suggest
from hookline.plain import own_copy
from hookline.sites.kinds import FUNCTION, MODULE, Kind, SiteType

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.handle import HandleSet

__all__ = ["FIELD_RULES", "KINDS", "Fault", "HookSpec", "register_hooks", "resolve_callable"]

_ON_FUNCTION: Final = "function_"
_SEES: Final = ("edited", "raw")


class _Configuration:
    """The field `HookSpec.config`: copy it when it is set and whenever it is read, so that no caller can change it."""

    def __get__(self, spec: HookSpec | None, owner: type[HookSpec]) -> Mapping[str, Any]:
        # Without a spec, `dataclass` asks for the default of the field.
        return None if spec is None else own_copy(vars(spec)["_config"])  # type: ignore[return-value]

    def __set__(self, spec: HookSpec, value: Mapping[str, Any] | None) -> None:
        _check("config", value)
        vars(spec)["_config"] = own_copy(dict(value or {}))


@dataclass(frozen=True)
class HookSpec:
    """Describe one hook: a factory and its configuration, and the modules that the hook goes to.

    Recipe::

        spec = hookline.HookSpec(
            name="shapes", target_modules=["layers.#"], hook_factory="my_project.hooks:log_shapes", config={"level": 1}
        )
        handles = hookline.register_hooks(model, [spec])
    """

    name: str = ""
    """For logs and reports; the hook's own name if empty."""
    target_modules: tuple[str, ...] = ()
    """Names or globs, of which one has to match: ``*`` crosses dots, ``#`` is one numeric part, ``[0-9]`` one digit."""
    hook_factory: str | Callable[[dict[str, Any]], Any] | None = None
    """``"package.module:factory"`` or ``"package.module.factory"``; from Python, the factory itself will do.

    It is called once with the configuration, and gives the one hook that all these modules share."""
    config: _Configuration = _Configuration()
    """What the factory is called with, as a dictionary. Read it as often as you like: each time it is a copy, of its
    dicts, lists, sets and tuples; other objects in it, such as tensors, are the same ones."""
    on: str = "forward"
    """The kind of hook (see `Kind`); ``"function_forward"`` and its sisters are for functions, by name, that are
    called in the model's forwards."""
    observe: bool = False
    """Ignore what the hook returns, and run it after all edits."""
    every: int | None = None
    """Run it in every n-th forward of the model only: the first, number n, number 2n, …"""
    sees: str | None = None
    """What an observer is shown: ``"edited"`` (the default), or ``"raw"``."""
    exclude: tuple[str, ...] | None = None
    """Names or globs to leave out."""
    enabled: bool = True
    """False passes it over."""
    on_error: str = "raise"
    """What becomes of an exception in the hook: ``"raise"``; ``"warn"``, which logs the first; ``"disable"``, which
    logs it and switches the hook off."""

    def __post_init__(self) -> None:
        for name in FIELD_RULES:
            _check(name, getattr(self, name))
        self.check_options()
        put = object.__setattr__  # it is frozen
        put(self, "name", self.name or "")
        put(self, "target_modules", _patterns(self.target_modules))
        put(self, "exclude", _patterns(self.exclude) or None)

    def check_options(self) -> None:
        """Raise for an option that does not go with the others."""
        kind, _ = self.kind_and_site_type
        if self.sees == "raw" and not self.observe:
            raise OptionError("sees='raw' is for observers: add observe=True, or leave sees out.")
        if self.every is not None and not (kind.is_call or kind is Kind.PARAM_GRAD):
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
        found = cls.faults(data)
        if found:
            raise found[0].error
        return cls(**{key: value for key, value in data.items() if value is not None})

    @classmethod
    def faults(cls, data: Any) -> list[Fault]:
        """Return everything that is wrong with `data` as a spec, without making one."""
        if not isinstance(data, Mapping):
            text = f"A hook spec is an object with target_modules and hook_factory, got {short_repr(data)}."
            return [Fault((), OptionError(text))]
        known = [each.name for each in fields(cls)]
        found = [
            Fault(
                (key,),
                OptionError(f"A hook spec has no {key!r}{suggest(key, known) or '.'} It takes {', '.join(known)}."),
                is_unknown=True,
            )
            for key in data
            if key not in known
        ]
        given = {key: data[key] for key in known if data.get(key) is not None}
        for name, value in given.items():
            try:
                _check(name, value)
            except HooklineError as error:
                found.append(Fault((name, *_wrong_item(name, value)), error))
        if not found:
            try:
                cls(**given)
            except HooklineError as error:
                found.append(Fault((), error))
        return found


class Fault(NamedTuple):
    """Hold one thing that is wrong with a spec."""

    keys: tuple[Any, ...]
    """The keys that lead to it; none if it is the spec as a whole."""
    error: HooklineError
    is_unknown: bool = False
    """Whether it is a key that no spec has."""


def register_hooks(
    model: nn.Module,
    hook_specs: Iterable[HookSpec | Mapping[str, Any]],
    *,
    strict: bool = False,
    allow: Iterable[str] | None = None,
) -> HandleSet:
    """Attach the hooks that `hook_specs` describe, all of them or, if that fails, none.

    Recipe::

        handles = hookline.register_hooks(
            model,
            [
                {
                    "name": "capture_outer",
                    "target_modules": ["outer.0", "outer.1"],
                    "hook_factory": "my_project.hooks:dummy_hook_factory",
                    "config": {"tag": "outer"},
                }
            ],
        )
        model(x)
        handles.remove()

    A module that several patterns of a spec match, or that has several names, gets its hook once. Patterns are held
    against every name of a module, with and without the prefixes of wrappers (``module.``, ``_orig_mod.``).

    Args:
        model: The model; names are relative to it.
        hook_specs: Objects of `HookSpec`, or dictionaries with the same keys; they are only read.
        strict: Raise where otherwise a line is logged and the spec passed over: no ``target_modules``, no
            ``hook_factory``, a factory that returns None, a pattern that matches nothing.
        allow: What paths of factories may begin with, see `resolve_callable`; None allows all.

    Returns:
        A handle for each spec that was attached, in their order.

    Raises:
        ValueError, AttributeError, ImportError: A path that names nothing; see `resolve_callable`.
        Exception: Whatever a factory raises. A note on the exception says which spec it was.
    """
    from hookline.specs.apply_specs import apply_specs

    if isinstance(hook_specs, str | Mapping | HookSpec) or not isinstance(hook_specs, Iterable):
        raise OptionError(f"Hook specs come in a list, got {type(hook_specs).__name__}; write [spec].")
    return apply_specs(model, list(hook_specs), strict=strict, allow=allow)


# -- what each field may be -----------------------------------------------------------------------------------


class FieldRule(NamedTuple):
    """Say what a field of a spec may be: `check` in Python, `schema` in JSON Schema, `words` in an error."""

    words: str
    check: Callable[[Any], object]
    """Returns whether the value fits; may raise a more exact error itself."""
    schema: dict[str, Any]
    is_needed: bool = False
    """Whether an editor asks for it; a spec without it is attached nowhere."""


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _patterns_fit(value: Any) -> bool:
    return (
        not value or isinstance(value, str) or (isinstance(value, list | tuple) and not _wrong_item("exclude", value))
    )


def _parse_kind(on: Any) -> tuple[Kind, SiteType]:
    if not isinstance(on, str):
        raise KindError(f"on is the name of a kind of hook, got {short_repr(on)}.")
    if on.startswith(_ON_FUNCTION):
        return Kind.parse(on.removeprefix(_ON_FUNCTION), FUNCTION), FUNCTION
    return Kind.parse(on), MODULE


def _kind_names(site_type: SiteType) -> list[str]:
    return [str(kind) for kind in Kind if kind in site_type.args] + list(site_type.aliases)


_TEXT: Final = {"type": "string"}
_SWITCH: Final = {"type": "boolean"}
_PATTERNS: Final = {"anyOf": [{"type": "array", "items": _TEXT}, _TEXT]}
_LIST: Final = "a list of module names or patterns,"
KINDS: Final = [*_kind_names(MODULE), *(f"{_ON_FUNCTION}{name}" for name in _kind_names(FUNCTION))]
"""What ``on`` may be."""
FIELD_RULES: Final[dict[str, FieldRule]] = {
    "name": FieldRule("a string,", _text, _TEXT),
    "target_modules": FieldRule(_LIST, _patterns_fit, _PATTERNS, is_needed=True),
    "hook_factory": FieldRule(
        "a path such as 'package.module:factory',", lambda value: _text(value) or callable(value), _TEXT, is_needed=True
    ),
    "config": FieldRule(
        "an object of names and values,",
        lambda value: not value or isinstance(value, Mapping),
        {"type": "object", "additionalProperties": True},
    ),
    "on": FieldRule("the name of a kind of hook,", _parse_kind, {"enum": KINDS}),
    "observe": FieldRule("true or false,", lambda value: isinstance(value, bool), _SWITCH),
    "every": FieldRule(
        "a whole number from 1 on,",
        lambda value: value is None or (type(value) is int and value >= 1),
        {"type": "integer", "minimum": 1},
    ),
    "sees": FieldRule("'edited' or 'raw',", lambda value: value in (None, *_SEES), {"enum": list(_SEES)}),
    "exclude": FieldRule(_LIST, _patterns_fit, _PATTERNS),
    "enabled": FieldRule("true or false,", lambda value: isinstance(value, bool), _SWITCH),
    "on_error": FieldRule(
        f"one of {', '.join(map(repr, ON_ERROR))};", lambda value: value in ON_ERROR, {"enum": list(ON_ERROR)}
    ),
}
"""What each field may be: the one list that checks, JSON Schemas and bodies of requests are made of."""


def _check(name: str, value: Any) -> None:
    """Raise if the field `name` cannot be `value`."""
    rule = FIELD_RULES[name]
    if not rule.check(value):
        raise OptionError(f"{name} is {rule.words} got {short_repr(value)}.")


def _wrong_item(name: str, value: Any) -> tuple[int, ...]:
    """Return the place of the first entry that is no pattern, in a list of them."""
    if name not in ("target_modules", "exclude") or not isinstance(value, list | tuple):
        return ()
    return next(((place,) for place, item in enumerate(value) if not isinstance(item, str)), ())


def _patterns(value: Any) -> tuple[str, ...]:
    """Return one or several patterns as a tuple."""
    return (value,) if isinstance(value, str) and value else tuple(value or ())


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
