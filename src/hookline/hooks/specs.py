"""Hooks as data: which modules, which factory, with what configuration.

Written by hand, or read from JSON, YAML or TOML; `register_hooks` turns specs into attached hooks. Imports no torch,
so that configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Self

from hookline.errors import KindError, OptionError
from hookline.sites.kinds import FUNCTION, MODULE, Kind, Subject

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.handle import HandleSet

__all__ = ["HookSpec", "register_hooks"]

_ON_ERROR: Final = ("raise", "warn", "disable")
_ON_FUNCTION: Final = "function_"


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
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the factory is called with, as a dictionary."""
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
        put = object.__setattr__  # it is frozen
        put(self, "name", _text("name", self.name) if self.name else "")
        put(self, "target_modules", _patterns("target_modules", self.target_modules) or ())
        put(self, "exclude", _patterns("exclude", self.exclude) or None)
        put(self, "config", _mapping("config", self.config or {}))
        if self.hook_factory is not None and not isinstance(self.hook_factory, str) and not callable(self.hook_factory):
            raise OptionError(f"hook_factory is a path such as 'package.module:factory', got {self.hook_factory!r}.")
        self.check_options()

    def check_options(self) -> None:
        """Raise for an option that means nothing, or does not go with the others."""
        kind, _ = self.kind
        for name in ("observe", "enabled"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is true or false, got {getattr(self, name)!r}.")
        if self.sees not in (None, "edited", "raw"):
            raise OptionError(f"sees is 'edited' or 'raw', got {self.sees!r}.")
        if self.sees == "raw" and not self.observe:
            raise OptionError("sees='raw' is for observers: add observe=True, or leave sees out.")
        if self.on_error not in _ON_ERROR:
            raise OptionError(f"on_error is one of {', '.join(map(repr, _ON_ERROR))}; got {self.on_error!r}.")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise OptionError(f"every is a whole number from 1 on, got {self.every!r}.")
        if self.every is not None and not (kind.is_call or kind is Kind.PARAM_GRAD):
            raise OptionError(f"every counts forwards of the model, and on={self.on!r} does not go by those.")
        kind.check_options(observe=self.observe)

    @property
    def kind(self) -> tuple[Kind, Subject]:
        """The kind of hook, and whether it is one of modules or of functions."""
        if not isinstance(self.on, str):
            raise KindError(f"on is the name of a kind of hook, got {self.on!r}.")
        if self.on.startswith(_ON_FUNCTION):
            return Kind.parse(self.on.removeprefix(_ON_FUNCTION), FUNCTION), FUNCTION
        return Kind.parse(self.on), MODULE

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The spec that a JSON object describes; a key that no spec has is an error, one with null is left out."""
        if not isinstance(data, Mapping):
            raise OptionError(f"A hook spec is an object with target_modules and hook_factory, got {data!r}.")
        known = [each.name for each in fields(cls)]
        for key in data:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                meant = f"; did you mean {near[0]!r}?" if near else "."
                raise OptionError(f"A hook spec has no {key!r}{meant} It takes {', '.join(known)}.")
        return cls(**{key: value for key, value in data.items() if value is not None})


def register_hooks(
    model: nn.Module,
    specs: Iterable[HookSpec | Mapping[str, Any]],
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
        specs: Objects of `HookSpec`, or dictionaries with the same keys.
        strict: Raise where otherwise a line is logged and the spec passed over: no ``target_modules``, no
            ``hook_factory``, a factory that returns None, a pattern that matches nothing.
        allow: What paths of factories may begin with, see `resolve_callable`; None allows all.

    Returns:
        A handle for each spec that was attached, in their order.

    Raises:
        ValueError, AttributeError, ImportError: A path that names nothing; see `resolve_callable`.
        Exception: Whatever a factory raises. A note on the exception says which spec it was.
    """
    from hookline.hooks.apply_specs import apply_specs

    if isinstance(specs, str | Mapping | HookSpec) or not isinstance(specs, Iterable):
        raise OptionError(f"Hook specs come in a list, got {type(specs).__name__}; write [spec].")
    return apply_specs(model, list(specs), strict=strict, allow=allow)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is a string, got {value!r}.")
    return value


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    """One or several patterns as a tuple."""
    given = (value,) if isinstance(value, str) else value or ()
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
        raise OptionError(f"{name} is a list of module names or patterns, got {value!r}.")
    return tuple(given)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} is an object of names and values, got {value!r}.")
    return dict(value)
