"""A value of a file, made what is declared: the number ``1`` a float where one is wanted, a list a tuple.

Takes values from run files, hands them to configurations and hooks.
"""

from __future__ import annotations

from typing import Any

from hookline.errors import ConfigError

__all__ = ["checked_value"]


def checked_value(value: Any, declared: Any, place: str = "") -> Any:
    """Return `value` as `declared` has it; `place` begins the error if it does not fit."""
    from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(declared, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, PydanticSchemaGenerationError, NameError):
        try:
            adapter = TypeAdapter(declared)  # a dataclass has settings of its own
        except Exception:
            return value  # nobody can tell
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        text = str(first["msg"]).removeprefix("Input should be ")
        raise ConfigError(f"{place}{': ' if place else ''}expected {text}, got {value!r}.") from None
