"""Define what all hooks of this folder share: a name, one state for each module they are on, and checked options.

Each factory derives its hook from `Observer` or `FactoryHook` and checks its ``config`` here. A hook is called by
hookline, which gives a ``site``, or by plain torch and systems built on it, which do not.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from hookline.errors import OptionError
from hookline.messages import suggest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.sites.hook_at_site import Site

logger = logging.getLogger("hookline.factories")

_T = TypeVar("_T")
_Factory = TypeVar("_Factory", bound=Callable[..., Any])


_UNKNOWN: Final = (
    "%s is for some %s, and it is not known which a forward has: it does not run in an engine "
    "(hookline.factories.serving), and no batch is among its inputs. It does nothing in such forwards. In a plain "
    "generate(), give hookline.patch a function"
)
CHECK: Final = "check_config"
"""The attribute of a factory that tries a config."""


class FactoryHook:
    """A forward hook that may be on many modules."""

    name = "hook"
    width: int | None = None
    """How many numbers the last dimension of an output has to have; None if any will do."""
    is_edit = False
    """Whether it is there to change values, so that ``observe`` would leave nothing of it."""
    _has_logged = False

    @property
    def __name__(self) -> str:
        """Return the name, for logs of systems that expect a function."""
        return self.name

    def expect(self, names: Iterable[str]) -> None:
        """Know the modules that it is on before they run, so that its counts of them begin at 0."""

    def log_unknown(self, what: str) -> None:
        """Log, once, that a forward came of which nothing is known."""
        if not self._has_logged:
            self._has_logged = True
            logger.warning(_UNKNOWN, self.name, what)

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics so far; at most one transfer from each device."""
        return {}

    def close(self) -> None:
        """Write what is still to be written; may be called again."""

    def __repr__(self) -> str:
        return f"<hook {self.name!r} of hookline.factories>"


class Observer(FactoryHook):
    """A hook that changes nothing. A copied or pickled model carries none: torch would copy it with the modules."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Observe the output of a module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Observer, ()


class ByModule(Generic[_T]):
    """Keep one state for each module, made at its first call or when it is expected.

    Where there is a site, modules go by their names in the model. Elsewhere a module is known by its identity, held
    weakly, and named by its own attributes: ``prefix``, its class with ``layer_id``, or its class and a count.
    """

    def __init__(self, make: Callable[[str], _T]) -> None:
        self._make = make
        self._by_name: dict[str, _T] = {}
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], _T]] = {}
        self._counts: Counter[str] = Counter()
        """By name, how many numbers behind it are taken: searching for a free one among 10,000 takes too long."""
        self._lock = threading.RLock()

    def of(self, module: nn.Module, site: Site | None) -> _T:
        """Return the state of a module."""
        if site is not None:
            return self.named(site.name, module)
        with self._lock:
            kept = self._by_id.get(id(module))
            if kept is None or kept[0]() is not module:
                kept = self._by_id[id(module)] = weakref.ref(module), self._named(self._free_name(module))
        return kept[1]

    def named(self, name: str, module: nn.Module) -> _T:
        """Return the state of the module with that name in its model, which itself has none."""
        return self._named(name or type(module).__name__)

    def expect(self, names: Iterable[str]) -> None:
        """Make the states of modules with these names now; that of a model as a whole is named at its first call."""
        for name in filter(None, names):
            self._named(name)

    def items(self) -> list[tuple[str, _T]]:
        """Return names and states, in the order in which they were made."""
        with self._lock:
            return list(self._by_name.items())

    def _named(self, name: str) -> _T:
        if name not in self._by_name:
            with self._lock:
                if name not in self._by_name:  # another thread may have been here meanwhile
                    self._by_name[name] = self._make(name)
        return self._by_name[name]

    def _free_name(self, module: nn.Module) -> str:
        """Return the name that a module of a serving system has as an attribute, or one with a number."""
        prefix, cls = getattr(module, "prefix", None), type(module).__name__
        layers = (getattr(module, key, None) for key in ("layer_id", "layer_idx"))
        layer = next((each for each in layers if type(each) is int), None)
        own = prefix if isinstance(prefix, str) and prefix else "" if layer is None else f"{cls}.{layer}"
        stem, name = own or cls, own
        while not name or name in self._by_name:  # a module may say of itself that it is called so
            name = f"{stem}.{self._counts[stem]}"
            self._counts[stem] += 1
        return name


# -- options -------------------------------------------------------------------------------------------------


def tried_by(check: Callable[[Mapping[str, Any]], object] | None = None) -> Callable[[_Factory], _Factory]:
    """Mark a factory whose config ``hookline check`` may try: by ``check``, or by the factory itself.

    What is called must raise what the factory raises, start nothing and write nothing; it may return a hook, whose
    signature is checked too. Any factory can have it: ``my_factory.check_config = my_check``.
    """

    def mark(factory: _Factory) -> _Factory:
        setattr(factory, CHECK, factory if check is None else check)
        return factory

    return mark


def read_options(factory: str, kind: type[_T], config: Mapping[str, Any] | None) -> _T:
    """Return ``config`` as an object of the dataclass ``kind``, each value checked by the annotation of its field.

    None stands for the default of a field; one without a default has to be given. Raise `OptionError` for everything
    else that is not as the dataclass says.
    """
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(f"{factory}: config is an object of names and values, got {config!r}.")
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # a type of dataclasses has no name
    given = {key: value for key, value in (config or {}).items() if value is not None or key not in names}
    for key in given.keys() - set(names):
        known = ", ".join(names) or "none"
        raise OptionError(f"{factory} has no option {key!r}{suggest(key, names) or '.'} It takes {known}.")
    for each in fields(kind):  # type: ignore[arg-type]
        if each.default is MISSING and each.name not in given:
            raise OptionError(f"{factory} needs a {each.name}: {{{each.name!r}: 'states'}}.")
    hints = get_type_hints(kind)
    return kind(**{key: checked(f"{factory}: {key}", value, hints[key]) for key, value in given.items()})


def read_tensors(factory: str, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file that a config names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with torch.inference_mode(False):
            return load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise OptionError(f"{factory}: {file} cannot be read as a safetensors file ({error}).") from None


def checked(what: str, value: Any, kind: Any) -> Any:
    """Return ``value``, a path as one that is absolute; raise `OptionError` if it is not of the annotation ``kind``."""
    if get_origin(kind) is UnionType:  # of a kind and None
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise OptionError(f"{what} is one of {', '.join(map(repr, get_args(kind)))}; got {value!r}.")
        return value
    is_one, words = _KINDS[kind]
    if not is_one(value):
        raise OptionError(f"{what} is {words}, got {value!r}.")
    return Path(value).absolute() if kind is Path else value  # it stays the same if the process changes its folder


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


_KINDS: Final[dict[Any, tuple[Callable[[Any], bool], str]]] = {
    Any: (lambda value: True, ""),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: type(value) is int and value >= 1, "a whole number from 1 on"),
    float: (_is_number, "a finite number"),
    str: (_is_text, "a text that is not empty"),
    Path: (_is_text, "a text that is not empty"),
    tuple[str, ...]: (
        lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value)),
        "a list of names",
    ),
}
"""What values of an annotation are, and how errors call them."""
