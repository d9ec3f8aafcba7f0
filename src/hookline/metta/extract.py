"""Which tensor of an output a tracker looks at.

Takes what the user wrote as ``extractor=``, hands the hooks a function from outputs to tensors.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Extractor", "KeyExtractor", "build_extractor", "mark_of"]

Extractor: TypeAlias = Callable[[Any], Any]
"""From an output to the tensor to look at; anything that is no tensor is passed over."""


def build_extractor(spec: Any) -> Extractor | None:
    """The function that ``extractor=spec`` stands for, or None if it stands for none.

    Recipe::

        hookline.metta.build_extractor("hidden")({"hidden": x, "value": v})  # x
        hookline.metta.build_extractor("hidden")(x)  # x: an output that is a tensor is meant itself
        hookline.metta.build_extractor(lambda output: output[0])((x, state))  # x

    Args:
        spec: A function, which is used as it is (if it raises in a tracker's hook, there is one warning, and the output
            is passed over); or a key: it looks into a dict, a TensorDict or whatever else has keys and values, and
            finds nothing (None) if the key is missing, or in outputs of another make. Keys of nested TensorDicts are
            tuples.
    """
    if callable(spec):
        extract: Extractor = spec
        return extract
    if isinstance(spec, str) or (isinstance(spec, tuple) and spec and all(isinstance(part, str) for part in spec)):
        return KeyExtractor(spec)
    return None


class KeyExtractor:
    """Looks a key up; two that look for the same key are equal."""

    __slots__ = ("_key",)

    def __init__(self, key: str | tuple[str, ...]) -> None:
        self._key = key

    def __call__(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            return output
        if not (isinstance(output, Mapping) or hasattr(type(output), "keys")):
            return None
        try:
            found = output[self._key]
        except (LookupError, TypeError, ValueError):
            return None
        return found if isinstance(found, Tensor) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyExtractor) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._key)


def mark_of(extract: Extractor) -> object:
    """By which a tracker notices that somebody wants another extractor for the same component."""
    return extract if isinstance(extract, KeyExtractor) else _FunctionMark(extract)


class _FunctionMark:
    """Stands for a function as long as that lives: a tracker keeps neither it nor what it refers to.

    Whether two functions do the same, nobody can tell, so only the same function is equal. One that is gone extracts
    nothing any more, and any other may take its place.
    """

    __slots__ = ("_ref",)

    def __init__(self, function: Any = None) -> None:
        self._ref: Callable[[], Any]
        try:
            self._ref = weakref.WeakMethod(function) if inspect.ismethod(function) else weakref.ref(function)
        except TypeError:  # there are none to what comes from C, operator.itemgetter say
            self._ref = lambda: function

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _FunctionMark):
            return self._ref() is None
        mine, theirs = self._ref(), other._ref()
        return mine is None or theirs is None or bool(mine == theirs)

    def __repr__(self) -> str:
        function = self._ref()
        return getattr(function, "__qualname__", repr(function))

    def __reduce__(self) -> tuple[Any, ...]:
        return _FunctionMark, ()  # a lambda cannot be pickled; a copy of a tracker has none of its hooks
