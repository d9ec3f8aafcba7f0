"""Validate what a file or a command line says by pydantic, and tell all mistakes at once, each with its place.

`read` calls `validated` for a `Run`, `spec_files` for hooks on modules. `Faults` collects the mistakes of look-ups,
which are validators of `Run`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from hookline.errors import ConfigError, HooklineError
from hookline.messages import did_you_mean
from hookline.runs.values import misfit

if TYPE_CHECKING:
    from hookline.runs.documents import Fault, KeyPath

__all__ = ["EscapedError", "Faults", "Places", "refuse", "validated"]


class Places(Protocol):
    """Where values were given: a `Document`, or several sources."""

    def place(self, path: KeyPath) -> str:
        """Return where a value stands, for a message."""

    def line_of(self, path: KeyPath) -> int | None:
        """Return its line."""


class EscapedError(Exception):
    """Carry an error of the user's own code through pydantic, which would take a ValueError for a mistake."""


class Faults:
    """Collect mistakes at paths below a value, and raise them together."""

    def __init__(self) -> None:
        self._found: list[InitErrorDetails] = []

    def add(self, path: KeyPath, text: str) -> None:
        """Add one."""
        kind = PydanticCustomError("look_up", "{text}", {"text": text})
        self._found.append(InitErrorDetails(type=kind, loc=path, input=None))

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Take an error of hookline's in the block for a mistake at `path`."""
        try:
            yield
        except HooklineError as error:
            self.add(path, str(error))
        except (ValueError, AssertionError) as error:
            raise EscapedError from error

    def check(self) -> None:
        """Raise if there are any."""
        if self._found:
            raise ValidationError.from_exception_data("Run", self._found)


def validated(kind: Any, values: Any, places: Places, faults: Sequence[Fault] = (), **context: Any) -> Any:
    """Return `values` as `kind`, a type; raise one error with all that is wrong, `faults` among it.

    Recipe: ``validated(list[HookSpec], document.values, document)``.
    """
    found = None
    try:
        found = TypeAdapter(kind).validate_python(values, context=context)
    except EscapedError as error:
        raise error.__cause__ or error from None
    except ValidationError as error:
        faults = [*faults, *_faults_of(error, values, kind)]
    refuse(places, faults)
    return found


def refuse(places: Places, faults: Sequence[Fault]) -> None:
    """Raise one error with all of `faults`, by line; do nothing if there are none."""
    if not faults:
        return
    ordered = sorted(faults, key=lambda fault: places.line_of(fault[0]) or 0)
    lines = [f"{places.place(path)}: ".removeprefix(": ") + text for path, text in ordered]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def _faults_of(error: ValidationError, values: Any, kind: Any) -> list[Fault]:
    """Return the path and a sentence for each fault; of several about one value (a union), the last."""
    found = {}
    for fault in error.errors():
        path = _known_part(fault["loc"], values)
        is_key = fault["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        if is_key:
            known = list(_fields_at(path[:-1], kind))
            text = f"nothing is called {path[-1]!r} here.{did_you_mean(path[-1], known)} There are: {', '.join(known)}."
        else:
            text = _sentence(fault, path)
        found[(*path, None) if is_key else path] = (path, text)
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


def _sentence(fault: Any, path: KeyPath) -> str:
    if fault["type"] == "invalid_key":
        return f"keys are text, got {path[-1]!r}."
    if fault["type"] == "missing":
        return "this is missing."
    if fault["type"] in ("value_error", "look_up"):
        return str(fault["msg"]).removeprefix("Value error, ")
    return misfit(fault)


def _fields_at(path: KeyPath, kind: Any) -> Mapping[str, Any]:
    """Return the keys that there are where an unknown one was found."""
    here = _model_in(kind)
    for key in path:
        if here is not None and key in here.__pydantic_fields__:
            here = _model_in(here.__pydantic_fields__[key].annotation)
    return {} if here is None else here.__pydantic_fields__


def _model_in(annotation: Any) -> Any:
    """Return the model, or dataclass of pydantic, of an annotation such as a list of them."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
