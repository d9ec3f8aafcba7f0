"""Select the modules of a model that a target means.

``attach``, ``find`` and most products with a ``target=`` (``capture``, ``watch``, ``patch``, ``specs``, ``trace``,
``serve``, ``engines``, ``factories``, …) call `select`, or `choose`, with any `Target`: glob, regular expression, role,
type, predicate, module, a list of these, None. ``parameters`` and ``functions.function_names`` have their own search
over other names, and take `name_matcher`, `as_list`, `excluded` and `describe` from here; ``debug.compare`` takes
`name_matcher`. Many call `check_model` first; ``attach_function`` calls `found_by`, ``patch`` `named_modules`.

A new form of target needs a branch in `_matching` (and its error there), in `describe`, in `_no_match`, in
``hook_types.Target``, in ``target:`` of the docstring of `attach`, in docs/tour.md, and a test in
tests/sites/test_select.py. If it holds several targets, it needs one in `as_list` and `excluded` too; if it cannot be
meant as a hook, its type in ``attach._TARGETS``; to name parameters, a branch in ``parameters``. Names come out without
wrappers (``wrappers``); users keep them in specs, caches and traces.

    >>> from torch import nn
    >>> [name for name, _ in select(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "#")]
    ['0', '1']
"""

from __future__ import annotations

import fnmatch
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from torch import Tensor, nn

from hookline.errors import HooklineWarning, NoMatchError, TargetError, UnhookableError
from hookline.messages import caller_stacklevel, counted, nearest_names, type_name
from hookline.sites.attention import PARTS, AttentionPart
from hookline.sites.roles import ROLE, find_roles, modules_in_role
from hookline.sites.wrappers import WRAPPER_KEYS, unwrap, walk

if TYPE_CHECKING:
    from hookline.hook_types import Target

Named: TypeAlias = tuple[str, nn.Module]
_Found = TypeVar("_Found")

# "#" alone between dots is one numeric part of a name. This character, which no name has, stands for it while fnmatch
# turns the rest of a glob into a regular expression.
_NUMBER = "\ue000"
_NUMERIC_PART = re.compile(r"(?<![^.])#(?![^.])")


def select(model: nn.Module, target: Target = None, *, exclude: Target = None) -> list[Named]:
    """Return the modules of ``model`` that ``target`` means, each once, in the model's own order.

    Names are those of the model without its wrappers (``wrappers`` says which), and mean the modules inside. A name
    or pattern that is written with the keys of wrappers (``"module.layers.#"``) means the same without them.

    ``None`` is the model itself, ``"role:resid"`` what has that role (``roles``). In a glob ``*`` crosses dots
    (``outer.*`` reaches ``outer.0.1`` but not ``outer``), ``#`` is one numeric part, ``[0-9]`` one character. A module
    that several names reach is taken under the first that matches. Every element of a list has to match something.
    """
    check_model(model)
    named = _by_name(model, target) if isinstance(target, str) and exclude is None else None
    if named is not None:
        return [named]
    items = as_list(target)
    everything = [*named_modules(model), *_attention_parts(model, items)]
    meant: set[tuple[str, int]] = set()
    for item in items:
        found = _matching(model, everything, item)
        if not found:
            raise _no_match(model, everything, item)
        meant.update((name, id(module)) for name, module in found)
    unwanted = {id(module) for item in excluded(exclude) for _, module in _matching(model, everything, item)}
    chosen: dict[int, Named] = {}
    for name, module in everything:
        if (name, id(module)) in meant and id(module) not in unwanted:
            chosen.setdefault(id(module), (name, module))
    if not chosen:
        raise NoMatchError(
            f"{'The model itself' if target is None else describe(target)} matches in this "
            f"{type(unwrap(model)).__name__}, but exclude={describe(exclude)} takes all of them away."
        )
    return list(chosen.values())


def _by_name(model: nn.Module, name: str) -> Named | None:
    """Return the module with exactly that name, without a look at all others; None if there is none, or a wrapper is on
    the way: then the slow way of `select` decides, which has to agree.
    """
    module: nn.Module | None = model
    for part in [*name.split("."), None]:
        children = getattr(module, "_modules", None)
        if module is None or not isinstance(children, dict) or not WRAPPER_KEYS.isdisjoint(children):
            return None
        module = module if part is None else children.get(part)
    return None if module is None else (name, module)


def _attention_parts(model: nn.Module, items: list[Any]) -> Iterator[Named]:
    """Yield the places inside of attention that are asked for by their roles: no module of the model is there."""
    for item in items:
        named: list[Named] = []
        if isinstance(item, str) and item.startswith(ROLE):
            named = modules_in_role(model, item)
        elif isinstance(item, str) and item.rpartition(":")[2] in PARTS:  # as it is called in a cache: attn:q
            named = [each for each in modules_in_role(model, f"{ROLE}{item.rpartition(':')[2]}") if each[0] == item]
        yield from (each for each in named if isinstance(each[1], AttentionPart))


def choose(model: nn.Module, target: Target, exclude: Target, *, strict: bool) -> list[Named]:
    """Return the modules that a target means and hooks can be put on; if nothing matches, do as `found_by` does."""
    return found_by(lambda: select(model, target, exclude=exclude), strict=strict)


def found_by(search: Callable[[], list[_Found]], *, strict: bool) -> list[_Found]:
    """Return what a search finds; if that raises `NoMatchError`, warn and return nothing, unless ``strict``."""
    try:
        return search()
    except NoMatchError as error:
        if strict:
            raise
        warnings.warn(HooklineWarning(*error.args), stacklevel=caller_stacklevel())
        return []


def check_model(model: Any, then: Any = None) -> None:
    """Raise unless ``model`` is a module; if the argument after it, ``then``, is one, say that they are swapped."""
    if not isinstance(model, nn.Module):
        hint = " The arguments are swapped: the model comes first." if isinstance(then, nn.Module) else ""
        raise UnhookableError(f"A torch.nn.Module is needed, got {type_name(model)}.{hint}")


def named_modules(model: nn.Module) -> Iterator[Named]:
    """Return every name of every module, without wrappers, parents first; shared modules appear under each of their
    names.
    """
    return ((name, module) for name, module, inner in walk(model) if inner is None)


def describe(target: Any) -> str:
    """Return the target as a user would write it."""
    if isinstance(target, re.Pattern):
        return f"re.compile({target.pattern!r})"
    if isinstance(target, type):
        return target.__name__
    if isinstance(target, nn.Module):
        return f"the given {type(target).__name__}"
    if isinstance(target, Tensor):
        return f"the given {type(target).__name__} of shape {tuple(target.shape)}"  # not all its numbers
    if isinstance(target, list | tuple):
        return "[" + ", ".join(describe(item) for item in target) + "]"
    if callable(target):
        return getattr(target, "__qualname__", repr(target))
    return repr(target)


def as_list(target: Any) -> list[Any]:
    """Return the elements of a target, each of which has to match something."""
    if isinstance(target, tuple) and target and all(isinstance(item, type) for item in target):
        return [target]  # types to choose from, as isinstance takes them
    if isinstance(target, list | tuple | set | frozenset):
        if not target:
            raise TargetError("The target is empty: give a name, a glob, a type, a module, or a list of these.")
        return list(target)
    return [target]


def excluded(exclude: Any) -> list[Any]:
    """Return the elements of what is to be left out: of None, or of a list of nothing, none."""
    is_nothing = exclude is None or (isinstance(exclude, list | tuple | set | frozenset) and not exclude)
    return [] if is_nothing else as_list(exclude)


def _matching(model: nn.Module, everything: list[Named], item: Any) -> list[Named]:
    """Return what one element of a target means, under each of its names."""
    if item is None or isinstance(item, nn.Module):
        wanted = unwrap(model if item is None else item)
        return [named for named in everything if named[1] is wanted]
    if isinstance(item, str) and item.startswith(ROLE):
        ids = {id(module) for _, module in modules_in_role(model, item)}
        return [named for named in everything if id(named[1]) in ids]
    if isinstance(item, str | re.Pattern):
        matches = name_matcher(clean_pattern(model, item, [name for name, _ in everything]))
        return [named for named in everything if matches(named[0])]
    if isinstance(item, type | tuple):
        return [named for named in everything if isinstance(named[1], item)]
    if callable(item):
        return [named for named in everything if item(*named)]
    raise TargetError(
        f"{item!r} is no target; give a name, a glob, a compiled regular expression, a module type, "
        "a module, a predicate (name, module), or a list of these."
    )


def clean_pattern(model: nn.Module, pattern: str | re.Pattern[str], names: Iterable[str]) -> str | re.Pattern[str]:
    """Return a pattern without keys of wrappers of the model (``_orig_mod.``), as far as it needs that to match a name.

    Keys are taken out one by one, the first one first, only until the pattern matches one of ``names``: a module of the
    user's may be called like a key.
    """
    keys = "|".join({inner for *_, inner in walk(model) if inner is not None})
    text = pattern if isinstance(pattern, str) else pattern.pattern
    while keys and not any(map(name_matcher(pattern), names)):
        text, count = re.subn(rf"(^|(?<=\.))({keys})(\\?\.|$)", "", text, count=1)
        if not count:
            break
        pattern = text.rstrip(".") if isinstance(pattern, str) else re.compile(text)
    return pattern


def name_matcher(pattern: str | re.Pattern[str]) -> Callable[[str], Any]:
    """Return a test of names: for a glob, or for a regular expression, which has to match the whole name."""
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch
    return pattern.__eq__ if _GLOB.isdisjoint(pattern) else _compile_glob(pattern)


_GLOB: Final = frozenset("*?[#")
_SEE_ALL: Final = "See all: hookline.find(model) (in a shell: hookline find MODEL)."


@functools.lru_cache(maxsize=512)
def _compile_glob(pattern: str) -> Callable[[str], Any]:
    translated = fnmatch.translate(_NUMERIC_PART.sub(_NUMBER, pattern))
    return re.compile(translated.replace(_NUMBER, "[0-9]+")).match


def _no_match(model: nn.Module, everything: list[Named], item: Any) -> Exception:
    kind = type(unwrap(model)).__name__
    if isinstance(item, nn.Module):
        return TargetError(
            f"The given {type(item).__name__} is not a module of this {kind}; it belongs to another model."
        )
    if isinstance(item, type | tuple):
        census = Counter(type(module).__name__ for _, module in everything).most_common(8)
        here = ", ".join(f"{name} ×{count}" for name, count in census)
        return NoMatchError(f"No module of this {kind} is a {describe(item)}; it has {here}.")
    if isinstance(item, str) and item.startswith(ROLE):
        found = ", ".join(f"{role} ×{len(names)}" for role, names in find_roles(model).items())
        return NoMatchError(
            f"No module of this {kind} has the role {item.removeprefix(ROLE)!r}; found by structure: {found or 'none'}"
            f". Name the modules instead. {_SEE_ALL}"
        )
    names = [name for name, _ in everything if name]
    text = item if isinstance(item, str) else getattr(item, "pattern", "")
    near = f"nearest: {', '.join(map(repr, nearest_names(text, names)))}" if names else "it has no submodules"
    if isinstance(item, str) and _NUMERIC_PART.search(item):
        near += ". '#' stands for one numeric part ('blocks.#'); '*' is every module"
    near += _other_grammar(item) if isinstance(item, str) else ""
    return NoMatchError(
        f"No module matches {describe(item)} in this {kind} of {counted(len(names), 'module')}; {near}. {_SEE_ALL}"
    )


def _other_grammar(text: str) -> str:
    """Return a hint where a target is written as Python or a regular expression is."""
    dotted = _BRACKETS.sub(r".\1", text)
    if dotted != text:
        return f". Names have dots, not brackets: {dotted!r}"
    if not _EXPRESSION.isdisjoint(text):
        return f". A regular expression is re.compile({text!r})"
    return ""


_BRACKETS: Final = re.compile(r"(?<=\w)\[(-?\d+)\]")
_EXPRESSION: Final = frozenset("()|^$\\+")
