"""What pydantic finds wrong with a file, in words: where it is, what was expected, what may have been meant.

Takes its errors from `run_file`, hands back a path and a sentence for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hookline.config.mistakes import Path
from hookline.config.spec_files import unknown_key
from hookline.messages import short_repr

__all__ = ["faults_of"]

_BRANCHES: Final = ("str", "int", "bool", "float", "SinkEntry", "list[str]")
"""What pydantic puts into a path for the branches of a union; no key of a file is called like that."""


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[tuple[Path, str]]:
    """Return the path and a sentence for each fault, none twice."""
    faults = error.errors()
    inside = {tuple(fault["loc"][: loc + 1]) for fault in faults for loc in range(len(fault["loc"]) - 1)}
    # Of a union, what is wrong inside of one branch says more than that the value is not of the other.
    said = [fault for fault in faults if not _is_other_branch(fault["loc"], inside)]
    return list(dict.fromkeys(_fault(fault, model) for fault in said))


def _is_other_branch(loc: tuple[Any, ...], inside: set[tuple[Any, ...]]) -> bool:
    others = [branch for branch in _BRANCHES if branch != loc[-1]] if loc and loc[-1] in _BRANCHES else []
    return any((*loc[:-1], branch) in inside for branch in others)


def _fault(fault: Any, model: type[BaseModel]) -> tuple[Path, str]:
    path = tuple(key for key in fault["loc"] if isinstance(key, int) or key not in (*_BRANCHES, "[key]"))
    return path, _sentence(fault, model, path)


def _sentence(fault: Any, model: type[BaseModel], path: Path) -> str:
    if fault["type"] == "extra_forbidden":
        return unknown_key(path[-1], list(_fields_at(model, path[:-1])))
    if fault["type"] == "invalid_key":
        return f"keys are text, got {path[-1]!r}."
    if fault["type"] == "missing":
        return "this is missing."
    text = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return text
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", text.removeprefix("Input should be "))
    return f"expected {text}, got {short_repr(fault['input'])}."


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
