"""What pydantic finds wrong with a file, in words: where it is, what was expected, what may have been meant.

Takes its errors from `run_file`, hands back one sentence for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hookline.config.spec_files import unknown_key
from hookline.wording import shown

__all__ = ["sentences"]

_BRANCHES: Final = ("str", "int", "bool", "float", "SinkEntry", "list[str]")
"""What pydantic puts into a path for the branches of a union; no key of a file is called like that."""


def sentences(error: ValidationError, model: type[BaseModel], place: Callable[[Sequence[str | int]], str]) -> list[str]:
    """One for each fault, in the order of the file's keys, none twice."""
    return list(dict.fromkeys(_sentence(fault, model, place) for fault in error.errors()))


def _sentence(fault: Any, model: type[BaseModel], place: Callable[[Sequence[str | int]], str]) -> str:
    path = tuple(key for key in fault["loc"] if isinstance(key, int) or key not in (*_BRANCHES, "[key]"))
    where = place(path)
    if fault["type"] == "extra_forbidden":
        return f"{where}: {unknown_key(path[-1], list(_fields_at(model, path[:-1])))}"
    if fault["type"] == "invalid_key":
        return f"{where}: keys are text, got {path[-1]!r}."
    if fault["type"] == "missing":
        return f"{where}: this is missing."
    text = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{where}: {text}"
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", text.removeprefix("Input should be "))
    return f"{where}: expected {text}, got {shown(fault['input'])}."


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> Mapping[str, FieldInfo]:
    """The keys that there are where an unknown one was found."""
    here: Any = model
    for key in path:
        if isinstance(key, int):
            continue
        if get_origin(here) is dict:  # the key is a name of the user's
            here = _model_in(here)
            continue
        field = getattr(_model_in(here), "model_fields", {}).get(key)
        here = None if field is None else field.annotation
    here = _model_in(here)
    fields: Mapping[str, FieldInfo] = getattr(here, "model_fields", {})
    return fields


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if (found := _model_in(part)) is not None:
            return found
    return None
