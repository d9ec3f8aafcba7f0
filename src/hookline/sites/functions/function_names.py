"""Select the functions that a target means.

``attach_function``, ``specs.apply_specs`` and debug/precision/precision_checker.py give objects and name globs to
`find_places`, and get `Place` objects back: a function and the name it goes by. ``targets`` matches names and takes
lists apart; ``_torch`` knows which functions torch shows to modes. torch's own table of names does not help:
``torch.overrides.resolve_name(torch.mm)`` is "torch.spmm", and a function has one name there.

The first name of a function is the one that reports and `FunctionSite.name` show, so users compare with it: the one
with the shortest last part, among these that of the first namespace. A new namespace of torch is a row of
`_NAMESPACES`, behind those whose names are to win. A function that changes its tensor and does not say so by a "_" at
the end of its name is a line of `_ABOUT_THE_TENSOR`: ``attach_function`` puts no edit of gradients on it. An operator
such as ``+`` that torch shows under another name is a row of `_SHOWN_AS`. tests/sites/functions/test_function_names.py
has the cases. (The `Place` of tests/helpers_sites.py is another class.)

    >>> [place.name for place in find_places("torch.nn.functional.*softmax")][:2]
    ['torch.nn.functional.gumbel_softmax', 'torch.nn.functional.log_softmax']
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import get_overridable_functions, resolve_name

from hookline.errors import NoMatchError, TargetError, UnhookableError
from hookline.messages import close_names
from hookline.sites import _torch
from hookline.sites.targets import as_list, describe, excluded, name_matcher


class Place(NamedTuple):
    """One function, and how it can be reached."""

    name: str
    """The name it goes by in reports."""
    func: Any
    """A function that torch functions modes see, an ``OpOverload``, or a subclass of ``autograd.Function``."""

    @property
    def is_operator(self) -> bool:
        """Return whether it is an operator, which is seen below autograd and has no gradient hooks."""
        return isinstance(self.func, _torch.OpOverload)

    @property
    def changes_tensor(self) -> bool:
        """Return whether it changes its tensor, or belongs to that very object: no alias can stand in for it."""
        parts = self.name.split(".")
        in_place = any(part.endswith("_") and not part.endswith("__") for part in parts)
        return in_place or not _ABOUT_THE_TENSOR.isdisjoint(parts)


_ABOUT_THE_TENSOR: Final = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "as_subclass", "data"}
    | {"__set__", "__setitem__", "__deepcopy__"}
)

_NAMESPACES: Final[tuple[tuple[str, Any], ...]] = (
    ("torch.nn.functional", torch.nn.functional),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch.nn.init", torch.nn.init),
    ("torch.functional", torch.functional),
    ("torch.Tensor", torch.Tensor),
)
"""Where names are looked for; of the shortest names of a function, that of the first of these is the one shown."""
_SHOWN_AS: Final = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "matmul", "neg", "abs", "ne", "lt", "le", "gt", "ge")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul")},
    **{"__radd__": "add", "__rmul__": "mul", "__mod__": "remainder", "__imod__": "remainder_"},
    **{"__truediv__": "div", "__itruediv__": "div_", "__rtruediv__": "__rdiv__"},
}
"""The methods behind operators such as ``+``, each with the method of ``torch.Tensor`` that torch shows for it."""
_EMPTY: Final = "The target is empty: give a function, or a name or glob such as '*.softmax' or 'aten.mm*'."


def find_places(target: Any, *, exclude: Any = None) -> list[Place]:
    """Return the functions that ``target`` means, each once; every element of a list has to match."""
    found: dict[Any, Place] = {}
    if isinstance(target, list | tuple | set | frozenset) and not target:
        raise TargetError(_EMPTY)
    for item in as_list(target):
        places = list(_places_of(item))
        if not places:
            raise _no_match(item)
        for place in places:
            found.setdefault(place.func, place)
    unwanted = {place.func for item in excluded(exclude) for place in _places_of(item)}
    kept = [place for place in found.values() if place.func not in unwanted]
    if not kept:
        raise NoMatchError(f"{describe(target)} matches functions, but exclude={describe(exclude)} takes all away.")
    return kept


def _places_of(item: Any) -> Iterable[Place]:
    if isinstance(item, str | re.Pattern):
        return _named(item)
    if isinstance(item, tuple):
        return [place for each in item for place in _places_of(each)]
    if item is torch.autograd.Function:
        raise TargetError("torch.autograd.Function is the base of all; give the subclass that is meant, or a glob.")
    if isinstance(item, type) and issubclass(item, torch.autograd.Function):
        return [_class_place(item)]
    operators = _torch.operators_of(item)
    if operators is not None:
        return [Place(str(operator), operator) for operator in operators]
    return [_function_place(item)]


def _function_place(item: Any) -> Place:
    if not callable(item):
        raise TargetError(
            f"{item!r} is no function; give a function of torch, a name or glob ('*.softmax', 'aten.mm*'), an "
            "operator, a subclass of torch.autograd.Function, or a list of these."
        )
    if isinstance(item, torch.nn.Module) or (isinstance(item, type) and issubclass(item, torch.nn.Module)):
        raise TargetError(f"{describe(item)} is no function: for modules, use hookline.attach; or give one as within=.")
    called = getattr(item, "__name__", "")
    if called in _SHOWN_AS and getattr(torch.Tensor, called) is item:
        item = getattr(torch.Tensor, _SHOWN_AS[called])
    known = _names_by_function().get(item) if isinstance(item, Hashable) else None
    if known is not None:
        return Place(known[0], item)
    if _torch.handles_modes(item):
        return Place(f"{item.__module__}.{item.__qualname__}", item)
    name = getattr(item, "__qualname__", None) or repr(item)
    raise UnhookableError(
        f"{name} is not a function that torch lets be overridden, so no hook on it would ever fire. Hook the functions "
        "it calls, or make it a torch.autograd.Function or a custom operator (torch.library.custom_op)."
    )


def _named(pattern: str | re.Pattern[str]) -> Iterator[Place]:
    text = _text_of(pattern)
    if not text:
        raise TargetError(_EMPTY)
    matches = name_matcher(text if isinstance(pattern, str) else pattern)
    namespace = _namespace_of(text)
    if namespace in _operator_namespaces():
        for op in _operators(namespace):
            if matches(str(op)) or matches(str(op.overloadpacket)):
                yield Place(str(op), op)
        return
    asked = text.rpartition(".")[2]
    for func, names in _names_by_function().items():
        if any(matches(name) and _is_meant(name, asked) for name in names):
            yield Place(names[0], func)
    for cls in _function_classes():
        place = _class_place(cls)
        # A glob does not mean classes of torch or hookline; their full name does.
        is_meant = not place.name.startswith(("torch.", "hookline.")) and _is_meant(place.name, asked)
        if place.name == text or (is_meant and (matches(place.name) or matches(cls.__qualname__))):
            yield place


def _text_of(pattern: str | re.Pattern[str]) -> str:
    """Return the text of a pattern; a glob as operators are called here, so "aten.mm" for "torch.ops.aten::mm"."""
    return pattern.removeprefix("torch.ops.").replace("::", ".") if isinstance(pattern, str) else pattern.pattern


def _namespace_of(text: str) -> str:
    """Return the first part of the text of a glob or regular expression."""
    return re.split(r"\\?[.:]", text)[0]


def _is_meant(name: str, asked: str) -> bool:
    """Return whether a glob that matches the name means it.

    Private functions and reads of attributes (``__get__``) are meant only if the last part of the glob, ``asked``,
    begins with "_".
    """
    last = name.rpartition(".")[2]
    private = last in ("__get__", "__set__", "__delete__") or (last[0] == "_" and last[:2] != "__")
    return not private or asked.startswith("_")


@functools.cache
def _names_by_function() -> dict[Any, list[str]]:
    """Return every function that a function mode is shown, with all its names, the best one first."""
    overridable = {each for functions in get_overridable_functions().values() for each in functions}
    names: dict[Any, list[str]] = {}
    for prefix, namespace in _NAMESPACES:
        for name in dir(namespace):
            value = getattr(namespace, name, None)
            if isinstance(value, type) or not callable(value) or not isinstance(value, Hashable):
                continue
            if value in overridable or _torch.is_native(name, value) or _torch.handles_modes(value):
                names.setdefault(value, []).append(f"{prefix}.{name}")
    for function in overridable - names.keys():  # the attributes of tensors: torch.Tensor.shape.__get__
        resolved = None if isinstance(function, type) else resolve_name(function)
        if resolved:
            names[function] = [resolved]
    for name, shown in _SHOWN_AS.items():
        names[getattr(torch.Tensor, shown)].append(f"torch.Tensor.{name}")
    for found in names.values():
        found.sort(key=lambda name: len(name.rpartition(".")[2]))  # torch.mm before torch.spmm; stable otherwise
    return names


def _class_place(cls: type[torch.autograd.Function]) -> Place:
    return Place(f"{cls.__module__}.{cls.__qualname__}", cls)


def _function_classes(
    base: type[torch.autograd.Function] = torch.autograd.Function,
) -> Iterator[type[torch.autograd.Function]]:
    """Yield every class below ``base``."""
    for cls in base.__subclasses__():
        yield cls
        yield from _function_classes(cls)


def _operator_namespaces() -> set[str]:
    return {name.partition("::")[0] for name in _torch.operator_names()}


def _operators(namespace: str) -> Iterator[_torch.OpOverload]:
    """Yield every overload of the operators in a namespace, by name."""
    for full in sorted(_torch.operator_names()):
        space, _, name = full.partition("::")
        if space == namespace:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)
            if isinstance(operator, _torch.OpOverload):
                yield operator


def _no_match(item: str | re.Pattern[str]) -> NoMatchError:
    text = _text_of(item)
    namespace, last = _namespace_of(text), text.rpartition(".")[2].strip("*")
    if namespace in _operator_namespaces():
        names = sorted({str(op.overloadpacket) for op in _operators(namespace)})
    else:
        known = [name for names in _names_by_function().values() for name in names]
        names = [name for name in known if "._" not in name] + [_class_place(cls).name for cls in _function_classes()]
    alike = [f"*.{last}"] if any(name.endswith(f".{last}") for name in names) else []
    near = alike or close_names(text.replace("*", ""), names, 4, 0.5)
    hint = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    return NoMatchError(
        f"No function or operator matches {describe(item)}{hint}. Names begin with torch. (torch.nn.functional."
        "softmax), with an operator's namespace (aten.mm), or are the full name of a torch.autograd.Function."
    )
