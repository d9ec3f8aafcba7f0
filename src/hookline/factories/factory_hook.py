"""What all hooks of this folder share: a name, one state for each module they sit on, and options that are checked.

Takes a ``config`` from the factories beside it, and calls from whoever has put the hook on a module: hookline, which
says where (``site``), or plain torch and systems built on it, which say nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hookline.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = [
    "ByModule",
    "FactoryHook",
    "Observer",
    "checked_options",
    "choice",
    "number",
    "path",
    "text",
    "whole",
    "yes_or_no",
]

_T = TypeVar("_T")


class FactoryHook:
    """A forward hook that may sit on many modules; made by a factory, called by whoever attached it."""

    name = "hook"

    @property
    def __name__(self) -> str:
        """For logs of systems that look for the name of a function."""
        return self.name

    def to_metrics(self) -> dict[str, float]:
        """What there is to tell so far; at most one transfer from each device."""
        return {}

    def close(self) -> None:
        """Write what is still to be written; once or more often."""

    def __repr__(self) -> str:
        return f"<hook {self.name!r} of hookline.factories>"


class Observer(FactoryHook):
    """A hook that only looks. A copied or pickled model carries none: torch would copy it with the modules."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """A module has given this out."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Observer, ()


class ByModule(Generic[_T]):
    """One state for each module, made when the module first comes by.

    Where hookline tells the site, modules go by their names in the model. Elsewhere a module is known by itself, held
    weakly, and named after what it says of itself: ``prefix``, its class with ``layer_id``, or its class and a count.
    """

    def __init__(self, make: Callable[[str], _T]) -> None:
        self._make = make
        self._by_name: dict[str, _T] = {}
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], _T]] = {}
        self._counts: dict[str, int] = {}
        """By name, how many numbers behind it are taken: looking for a free one among 10,000 takes too long."""
        self._lock = threading.Lock()

    def of(self, module: nn.Module, site: Site | None) -> _T:
        """The state of a module."""
        if site is not None:
            found = self._by_name.get(site.name or type(module).__name__)
            return self._new(site.name or type(module).__name__) if found is None else found
        kept = self._by_id.get(id(module))
        if kept is not None and kept[0]() is module:
            return kept[1]
        return self._met(module)

    def items(self) -> list[tuple[str, _T]]:
        """Names and states, in the order in which modules came by."""
        with self._lock:
            return list(self._by_name.items())

    def values(self) -> list[_T]:
        """The states alone."""
        return [state for _, state in self.items()]

    def _new(self, name: str) -> _T:
        with self._lock:
            if name not in self._by_name:  # another thread may have been here meanwhile
                self._by_name[name] = self._make(name)
            return self._by_name[name]

    def _met(self, module: nn.Module) -> _T:
        """The state of a module that nobody has named."""
        with self._lock:
            kept = self._by_id.get(id(module))
            if kept is not None and kept[0]() is module:
                return kept[1]
            name = self._free(_own_name(module), type(module).__name__)
            state = self._by_name[name] = self._make(name)
            self._by_id[id(module)] = (weakref.ref(module), state)
            return state

    def _free(self, wanted: str | None, kind: str) -> str:
        if wanted is not None and wanted not in self._by_name:
            return wanted
        stem = wanted or kind
        count = self._counts.get(stem, 0)
        while f"{stem}.{count}" in self._by_name:  # a module may say of itself that it is called so
            count += 1
        self._counts[stem] = count + 1
        return f"{stem}.{count}"


def _own_name(module: nn.Module) -> str | None:
    """What a module of a serving system says that it is called."""
    prefix = getattr(module, "prefix", None)
    if isinstance(prefix, str) and prefix:
        return prefix
    for key in ("layer_id", "layer_idx"):
        layer = getattr(module, key, None)
        if type(layer) is int:
            return f"{type(module).__name__}.{layer}"
    return None


# -- options -------------------------------------------------------------------------------------------------


def checked_options(factory: str, config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a factory over its defaults; a key that it does not have is an error."""
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(f"{factory}: config is an object of names and values, got {config!r}.")
    for key in config or {}:
        if key not in defaults:
            near = get_close_matches(str(key), list(defaults), n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{factory} has no option {key!r}.{meant} It takes {', '.join(defaults)}.")
    given = {key: value for key, value in (config or {}).items() if value is not None}
    return {**defaults, **given}


def choice(factory: str, key: str, value: Any, among: tuple[str, ...]) -> str:
    """One of several words."""
    if value not in among:
        raise OptionError(f"{factory}: {key} is one of {', '.join(map(repr, among))}; got {value!r}.")
    return str(value)


def whole(factory: str, key: str, value: Any, *, least: int = 1) -> int:
    """A whole number."""
    if type(value) is not int or value < least:
        raise OptionError(f"{factory}: {key} is a whole number from {least} on, got {value!r}.")
    return value


def number(factory: str, key: str, value: Any) -> float:
    """Any finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise OptionError(f"{factory}: {key} is a finite number, got {value!r}.")
    return float(value)


def yes_or_no(factory: str, key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{factory}: {key} is true or false, got {value!r}.")
    return value


def path(factory: str, key: str, value: Any) -> Path:
    """A path, which means the same wherever the process goes later."""
    return Path(text(factory, key, value)).absolute()


def text(factory: str, key: str, value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise OptionError(f"{factory}: {key} is a text that is not empty, got {value!r}.")
    return value
