"""Hooks as data: which modules, which factory, with what configuration.

Written by hand, or read from JSON, YAML or TOML; `register_hooks` turns specs into attached hooks. Imports no torch,
so that configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from hookline.errors import HooklineError, KindError, OptionError
from hookline.messages import short_repr
from hookline.sites.kinds import FUNCTION, MODULE, Kind, SiteType
from hookline.specs.copy_config import own_copy

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.handle import HandleSet

__all__ = ["Fault", "HookSpec", "register_hooks"]

_ON_ERROR: Final = ("raise", "warn", "disable")
_ON_FUNCTION: Final = "function_"


class _Configuration:
    """The field `HookSpec.config`: copied when it is set and whenever it is read, so that nobody can write into it."""

    def __get__(self, spec: HookSpec | None, owner: type[HookSpec]) -> Mapping[str, Any]:
        # Asked of the class, this is the default of the field.
        return None if spec is None else own_copy(vars(spec)["_config"])  # type: ignore[return-value]

    def __set__(self, spec: HookSpec, value: Mapping[str, Any] | None) -> None:
        _check_mapping("config", value)
        vars(spec)["_config"] = own_copy(dict(value or {}))


@dataclass(frozen=True)
class HookSpec:
    """One hook, described: what a factory makes of a configuration, on all modules that match.

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
        for name in _CHECKS:
            _check(name, getattr(self, name))
        self.check_options()
        put = object.__setattr__  # it is frozen
        put(self, "name", self.name or "")
        put(self, "target_modules", _patterns(self.target_modules))
        put(self, "exclude", _patterns(self.exclude) or None)

    def check_options(self) -> None:
        """Raise for an option that means nothing, or does not go with the others."""
        kind, _ = self.kind
        if self.sees == "raw" and not self.observe:
            raise OptionError("sees='raw' is for observers: add observe=True, or leave sees out.")
        if self.every is not None and not (kind.is_call or kind is Kind.PARAM_GRAD):
            raise OptionError(f"every counts forwards of the model, and on={self.on!r} does not go by those.")
        kind.check_options(observe=self.observe)

    @property
    def kind(self) -> tuple[Kind, SiteType]:
        """The kind of hook, and whether it is one of modules or of functions."""
        return _kind(self.on)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The spec that a JSON object describes; a key that no spec has is an error, one with null is left out."""
        found = cls.faults(data)
        if found:
            raise found[0].error
        return cls(**{key: value for key, value in data.items() if value is not None})

    @classmethod
    def faults(cls, data: Any) -> list[Fault]:
        """All that is wrong with a JSON object that is to be a spec; nothing is made of it."""
        if not isinstance(data, Mapping):
            text = f"A hook spec is an object with target_modules and hook_factory, got {short_repr(data)}."
            return [Fault((), OptionError(text))]
        known = [each.name for each in fields(cls)]
        found = [Fault((key,), _unknown(key, known), is_unknown=True) for key in data if key not in known]
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
    """One thing that is wrong with a spec."""

    keys: tuple[Any, ...]
    """What leads to it; nothing if it is the spec as a whole."""
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
    """Attach the hooks that specs describe, all of them or, if that fails, none.

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


# -- one field after the other -------------------------------------------------------------------------------


def _check(name: str, value: Any) -> None:
    """Raise if a field cannot have that value."""
    _CHECKS[name](name, value)


def _check_text(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise OptionError(f"{name} is a string, got {short_repr(value)}.")


def _check_patterns(name: str, value: Any) -> None:
    if value and not isinstance(value, str) and (not isinstance(value, list | tuple) or _wrong_item(name, value)):
        raise OptionError(f"{name} is a list of module names or patterns, got {short_repr(value)}.")


def _check_factory(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str) and not callable(value):
        raise OptionError(f"{name} is a path such as 'package.module:factory', got {short_repr(value)}.")


def _check_mapping(name: str, value: Any) -> None:
    if value and not isinstance(value, Mapping):
        raise OptionError(f"{name} is an object of names and values, got {short_repr(value)}.")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is true or false, got {short_repr(value)}.")


def _check_every(name: str, value: Any) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise OptionError(f"{name} is a whole number from 1 on, got {short_repr(value)}.")


def _check_sees(name: str, value: Any) -> None:
    if value not in (None, "edited", "raw"):
        raise OptionError(f"{name} is 'edited' or 'raw', got {short_repr(value)}.")


def _check_on_error(name: str, value: Any) -> None:
    if value not in _ON_ERROR:
        raise OptionError(f"{name} is one of {', '.join(map(repr, _ON_ERROR))}; got {short_repr(value)}.")


def _kind(on: Any) -> tuple[Kind, SiteType]:
    if not isinstance(on, str):
        raise KindError(f"on is the name of a kind of hook, got {short_repr(on)}.")
    if on.startswith(_ON_FUNCTION):
        return Kind.parse(on.removeprefix(_ON_FUNCTION), FUNCTION), FUNCTION
    return Kind.parse(on), MODULE


_CHECKS: Final[dict[str, Callable[[str, Any], object]]] = {
    "name": _check_text,
    "target_modules": _check_patterns,
    "hook_factory": _check_factory,
    "config": _check_mapping,
    "on": lambda name, value: _kind(value),
    "observe": _check_switch,
    "every": _check_every,
    "sees": _check_sees,
    "exclude": _check_patterns,
    "enabled": _check_switch,
    "on_error": _check_on_error,
}
"""What each field may be."""


def _wrong_item(name: str, value: Any) -> tuple[int, ...]:
    """The place of the first entry that is no pattern, in a list of them."""
    if name not in ("target_modules", "exclude") or not isinstance(value, list | tuple):
        return ()
    return next(((place,) for place, item in enumerate(value) if not isinstance(item, str)), ())


def _patterns(value: Any) -> tuple[str, ...]:
    """One or several patterns as a tuple."""
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _unknown(key: Any, known: list[str]) -> OptionError:
    near = get_close_matches(str(key), known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return OptionError(f"A hook spec has no {key!r}{meant} It takes {', '.join(known)}.")
