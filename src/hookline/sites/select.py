"""Which modules of a model a target means.

Takes any `Target` (glob, regular expression, type, predicate, module, list of these, None) and the model,
hands named modules to ``attach`` and ``find``.

    >>> from torch import nn
    >>> [name for name, _ in select(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "#")]
    ['0', '1']
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from hookline.errors import NoMatchError, TargetError, UnhookableError

if TYPE_CHECKING:
    from hookline.types import Target

__all__ = ["Named", "as_list", "check_model", "describe", "name_matcher", "named_modules", "select"]

Named: TypeAlias = tuple[str, nn.Module]
_Matcher: TypeAlias = Callable[[str, nn.Module], Any]

# "#" standing alone between dots is one numeric name part; this character, which no name has, holds its place
# while fnmatch turns the rest of a glob into a regular expression.
_NUMBER = "\ue000"
_NUMERIC_PART = re.compile(r"(?<![^.])#(?![^.])")


def select(model: nn.Module, target: Target = None, *, exclude: Target = None) -> list[Named]:
    """The modules of ``model`` that ``target`` means, each once, in the model's own order.

    ``None`` is the model itself. In a glob ``*`` crosses dots (``outer.*`` reaches ``outer.0.1`` but not
    ``outer``), ``#`` is one numeric part, ``[0-9]`` one character. A module that several names reach is
    taken under the first that matches. Every element of a list has to match something.
    """
    check_model(model)
    everything = list(named_modules(model))
    items = as_list(target)
    matchers = [_matcher(item if item is not None else model) for item in items]
    chosen, matched = _matches(everything, matchers)
    for item, hit in zip(items, matched, strict=True):
        if not hit:
            raise _no_match(model, everything, item)
    if exclude is None or exclude == []:
        return chosen
    unwanted, _ = _matches(everything, [_matcher(item) for item in as_list(exclude)])
    unwanted_ids = {id(module) for _, module in unwanted}
    kept = [named for named in chosen if id(named[1]) not in unwanted_ids]
    if not kept:
        raise NoMatchError(
            f"{'The model itself' if target is None else describe(target)} matches in this {type(model).__name__}, "
            f"but exclude={describe(exclude)} takes all of them away."
        )
    return kept


def check_model(model: Any) -> None:
    """Raise unless it is a module."""
    if not isinstance(model, nn.Module):
        raise UnhookableError(f"A torch.nn.Module is needed, got a {type(model).__name__}.")


def named_modules(model: nn.Module) -> Iterator[Named]:
    """Every name of every module, parents first; shared modules appear under each of their names.

    torch's own ``named_modules`` gives a shared module one name only, so half the names a user can write
    would select nothing; with its duplicates kept it does not end on a module that contains itself.
    """
    # Each item carries its chain of parents, so that a cycle is seen where it closes.
    stack: list[tuple[str, nn.Module, Any]] = [("", model, None)]
    seen: set[int] = set()
    while stack:
        name, module, parents = stack.pop()
        yield name, module
        seen.add(id(module))
        chain = (module, parents)
        for key, child in reversed(module._modules.items()):
            if child is None or (id(child) in seen and _in_chain(child, chain)):
                continue
            stack.append((f"{name}.{key}" if name else key, child, chain))


def describe(target: Any) -> str:
    """The target as a user would write it."""
    if isinstance(target, re.Pattern):
        return f"re.compile({target.pattern!r})"
    if isinstance(target, type):
        return target.__name__
    if isinstance(target, nn.Module):
        return f"the given {type(target).__name__}"
    if isinstance(target, list | tuple):
        return "[" + ", ".join(describe(item) for item in target) + "]"
    if callable(target):
        return getattr(target, "__qualname__", repr(target))
    return repr(target)


def _matches(everything: list[Named], matchers: list[_Matcher]) -> tuple[list[Named], list[bool]]:
    """The modules that at least one matcher takes, each once, and which of the matchers took any."""
    chosen: dict[int, Named] = {}
    hits = [False] * len(matchers)
    for named in everything:
        for position, matcher in enumerate(matchers):
            if matcher(*named):
                hits[position] = True
                chosen.setdefault(id(named[1]), named)
    return list(chosen.values()), hits


def as_list(target: Any) -> list[Any]:
    """The elements of a target, each of which has to match something."""
    if isinstance(target, tuple) and target and all(isinstance(item, type) for item in target):
        return [target]  # types to choose from, as isinstance takes them
    if isinstance(target, list | tuple | set | frozenset):
        if not target:
            raise TargetError("The target is empty: give a name, a glob, a type, a module, or a list of these.")
        return list(target)
    return [target]


def _matcher(item: Any) -> _Matcher:
    """One element of a target as a test of name and module."""
    if isinstance(item, str | re.Pattern):
        matches = name_matcher(item)
        return lambda name, module: matches(name)
    if isinstance(item, nn.Module):
        return lambda name, module: module is item
    if isinstance(item, type | tuple):
        return lambda name, module: isinstance(module, item)
    if callable(item):
        return item  # type: ignore[no-any-return]
    raise TargetError(
        f"{item!r} is no target; give a name, a glob, a compiled regular expression, a module type, "
        "a module, a predicate (name, module), or a list of these."
    )


def name_matcher(pattern: str | re.Pattern[str]) -> Callable[[str], Any]:
    """A glob, or a regular expression that has to match whole, as a test of names."""
    return _compile_glob(pattern) if isinstance(pattern, str) else pattern.fullmatch


@functools.lru_cache(maxsize=512)
def _compile_glob(pattern: str) -> Callable[[str], Any]:
    translated = fnmatch.translate(_NUMERIC_PART.sub(_NUMBER, pattern))
    return re.compile(translated.replace(_NUMBER, "[0-9]+")).match


def _in_chain(module: nn.Module, chain: Any) -> bool:
    while chain is not None:
        if chain[0] is module:
            return True
        chain = chain[1]
    return False


def _no_match(model: nn.Module, everything: list[Named], item: Any) -> Exception:
    kind = type(model).__name__
    if isinstance(item, nn.Module):
        return TargetError(
            f"The given {type(item).__name__} is not a module of this {kind}; it belongs to another model."
        )
    if isinstance(item, type | tuple):
        census = Counter(type(module).__name__ for _, module in everything).most_common(8)
        here = ", ".join(f"{name} ×{count}" for name, count in census)
        return NoMatchError(f"No module of this {kind} is a {describe(item)}; it has {here}.")
    names = [name for name, _ in everything if name]
    text = item if isinstance(item, str) else getattr(item, "pattern", "")
    near = difflib.get_close_matches(text, names, n=4, cutoff=0.4) if text else names[:4]
    hint = f"nearest: {', '.join(map(repr, near or names[:4]))}" if names else "it has no submodules"
    return NoMatchError(
        f"No module matches {describe(item)} in this {kind} of {len(names)} modules; {hint}. "
        "See all: print(hookline.find(model))."
    )
