"""Turn the text of a flag, or a value of a file, into what a hook, an experiment or a command declares.

`look_up`, `find` and `flags` call `declared`. Imports pydantic when it is called, so that help comes at once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hookline.errors import ConfigError
from hookline.messages import short_repr

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["FlagText", "declared", "from_text", "guessed", "misfit"]


class FlagText(str):
    """Mark the text of a flag whose type only an experiment or a hook knows: it is yet to become what they declare."""

    __slots__ = ()


def declared(value: Any, hint: Any) -> Any:
    """Return `value` as a type has it: 1 as a float, a list as a tuple; the text of a flag by `from_text`."""
    from pydantic import ValidationError

    adapter = _adapter(hint)
    if adapter is None:
        return value
    if isinstance(value, FlagText):
        return from_text(str(value), hint)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(misfit(error.errors()[0])) from None


def misfit(fault: Any) -> str:
    """Return a sentence about a fault of pydantic: what was expected, and what is there."""
    said = str(fault["msg"]).removeprefix("Input should be ").partition(", unable to parse")[0]
    said = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", said)
    return f"expected {said}, got {short_repr(fault['input'])}."


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    for config in (ConfigDict(arbitrary_types_allowed=True), None):  # a dataclass has settings of its own
        try:
            return TypeAdapter(hint, config=config)
        except (PydanticUserError, PydanticSchemaGenerationError, NameError):
            continue
    return None


def from_text(text: str, hint: Any) -> Any:
    """Return the text of a flag as a type has it: ``2,5,10`` as a list of numbers, ``none`` as None, ``on`` as True."""
    from pydantic import ValidationError

    adapter, guess = _adapter(hint), guessed(text)
    if adapter is None or hint is Any:
        return guess
    parts = [part.strip() for part in text.strip("[]()").split(",") if part.strip()]
    lists: list[tuple[Any, bool]] = [([guessed(part) for part in parts], False), (parts, False)]
    texts: list[tuple[Any, bool]] = [(text, False)]
    # A text is one that is no number, no bool and no list, where all of them will do.
    ordered = [*lists, *texts] if "," in text or not text else [*texts, *lists]
    for value, strict in [(guess, True), *ordered] if not isinstance(guess, str) else ordered:
        try:
            return adapter.validate_python(value, strict=strict)
        except ValidationError:
            continue
    return declared(text, hint)  # raises


def guessed(text: str) -> Any:
    """Return a text as a number, true, false or null, if it is written like one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), str(text))
