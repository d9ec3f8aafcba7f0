"""Walk the tensors inside any value that a module takes or returns, and rebuild the value with other tensors.

It knows tensor, tuple, namedtuple, list, deque, dict and other mappings (ModelOutput), and dataclass, nested. Other
containers (a cache object, say) are leaves that are left alone. Most folders use it, among others: ``sites`` to watch
gradients (`replace`) and in compiled code, ``observe`` and ``debug`` to find tensors, ``training`` and ``lifecycle`` to
copy states.

What must not change: the compiler traces `leaves`, `inside`, `children`, `put_in`, `twin_of` and `main_tensor`
(sites/compiled, observe/patching.py), so these and what they call do only what it can trace. Paths (``"b.0"``) name
tensors in caches and traces on disk, and are the same for `leaves` and `map_tensors`.

A new kind of container is a branch in `children` and one in `twin_of`. Look too at `replace`, `rebuilt` and
`to_builtins`, and at ``describe`` and ``_construct`` of sites/compiled/value_layout.py: they ask for types. Test it in
tests/test_tree.py and tests/observe/patch/test_patch_structures.py. Checkpoints (lifecycle/checkpoint_file.py,
training/state.py) and the guard (guard/walk.py) have lists of containers of their own.

    >>> import torch
    >>> [path for path, _ in leaves({"a": torch.ones(1), "b": (torch.ones(1), 3)})]
    ['a', 'b.0', 'b.1']
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

Swapped: TypeAlias = tuple[Any, Any, Any, Any]
"""A list or dict, a key of it, what stands there now, and what stood there before."""

_DEEPEST: Final = 16
"""Containers in containers that are looked into while the compiler traces."""


def leaves(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Return every leaf with its path; a lone value is one leaf with an empty path.

    ``above`` are the containers it is in: one that contains itself ends there.
    """
    parts = None if isinstance(value, Tensor) else children(value)
    if parts is None:
        yield path, value
    elif (within := inside(value, above)) is not None:
        for key, child in parts:
            yield from leaves(child, f"{path}.{key}" if path else str(key), within)


def tensors_of(value: Any) -> list[Tensor]:
    """Return every tensor in a structure, in order."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def inside(value: Any, above: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the ``above`` for the children of a container: the containers they are in; None if it contains itself.

    The compiler of torch 2.11 has no id of a tuple that is made in the graph: there, only the depth is counted.
    """
    if torch.compiler.is_compiling():
        return (*above, 0) if len(above) < _DEEPEST else None
    return (*above, id(value)) if id(value) not in above else None


def replace(
    value: Any, swap: Callable[[Tensor], Tensor], swapped: list[Swapped] | None = None, above: tuple[int, ...] = ()
) -> Any:
    """Return the same structure with ``swap`` applied to every tensor; the very same object if nothing changed.

    Lists and dicts are changed in place, since others may hold them, and noted in ``swapped`` for
    `swap_back`; other containers are made anew. One that cannot be made stays as it is, with its old tensors.
    """
    if isinstance(value, Tensor):
        return swap(value)
    parts = children(value)
    if parts is None or (within := inside(value, above)) is None:
        return value
    changed = {}
    for key, child in parts:
        new = replace(child, swap, swapped, within)
        if new is not child:
            changed[key] = new
    if not changed:
        return value
    if isinstance(value, list | MutableMapping):
        for key, new in changed.items():
            if swapped is not None:
                swapped.append((value, key, new, value[key]))
            value[key] = new
        return value
    made = rebuilt(value, dict(parts) | changed)
    return made if type(made) is type(value) else value


def put_in(value: Any, old: Tensor, new: Tensor, above: tuple[int, ...] = ()) -> tuple[Any, bool]:
    """Return the structure with ``new`` for every ``old``, and whether it is another one.

    Containers around ``old`` are copied, never changed; the others stay the same objects. The compiler traces it, and
    cannot always tell by ``is`` whether something changed. Raises what the methods of a container raise.
    """
    if isinstance(value, Tensor):
        return (new, True) if value is old else (value, False)
    parts = children(value)
    if parts is None or (within := inside(value, above)) is None:
        return value, False
    changed = False
    items: dict[Any, Any] = {}
    for key, part in parts:
        items[key], differs = put_in(part, old, new, within)
        changed = changed or differs
    return (twin_of(value, items), True) if changed else (value, False)


def swap_back(swapped: Iterable[Swapped]) -> None:
    """Put back what `replace` has taken out of lists and dicts, where nobody else has put something."""
    for container, key, new, old in swapped:
        with suppress(LookupError):
            if container[key] is new:
                container[key] = old


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return keys and values of a container; None for anything else."""
    if value is None:  # the compiler of torch 2.11 cannot trace what is_dataclass asks of its class
        return None
    if isinstance(value, tuple | list | deque):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None


def map_tensors(
    value: Any,
    change: Callable[[str, Tensor], Any],
    other: Callable[[Any], Any] = lambda leaf: leaf,
    path: str = "",
    above: tuple[int, ...] = (),
) -> Any:
    """Return the same structure, in containers of its own, with ``change(path, tensor)`` for every tensor.

    Unlike `replace` it does not change lists and dicts in place. A leaf that is no tensor becomes ``other(leaf)``.
    """
    if isinstance(value, Tensor):
        return change(path, value)
    parts = children(value)
    if parts is None:
        return other(value)
    if (within := inside(value, above)) is None:
        return value  # it contains itself
    items = {key: map_tensors(item, change, other, f"{path}.{key}" if path else str(key), within)
             for key, item in parts}  # fmt: skip
    is_same = isinstance(value, tuple) and all(items[key] is item for key, item in parts)
    return value if is_same else rebuilt(value, items)


def to_builtins(value: Any, leaf: Callable[[Any], Any], above: tuple[int, ...] = ()) -> Any:
    """Return the same structure in tuples, lists and dicts alone, with ``leaf(x)`` for all that is no container."""
    parts = None if isinstance(value, Tensor) else children(value)
    if parts is None:
        return leaf(value)
    if (within := inside(value, above)) is None:
        return leaf("…")  # it contains itself
    items = {key: to_builtins(item, leaf, within) for key, item in parts}
    if isinstance(value, tuple):
        return tuple(items.values())
    return list(items.values()) if isinstance(value, list | deque) else items


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with `value`; tensors stay on their device, without their graph."""
    return map_tensors(value, lambda _, tensor: tensor.detach().clone(), copy.deepcopy)


def rebuilt(value: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the type of ``value`` with ``items``, all that it has; a plain one if none can be made."""
    # A copy of a mapping that is none of Python's own may share its items with the model.
    if isinstance(value, Mapping) and not isinstance(value, dict | UserDict):
        return items
    try:
        twin = twin_of(value, items)
    except Exception:  # whatever its own methods do
        return tuple(items.values()) if isinstance(value, tuple) else items
    return items if twin is value else twin


def twin_of(value: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the type of ``value`` with ``items``, all that it has; raise what its own methods raise.

    The compiler traces it, and can follow only constructors: no ``_make``, no copy.
    """
    kind: Any = type(value)
    is_traced = torch.compiler.is_compiling()
    if kind is list or kind is dict:
        return list(items.values()) if kind is list else items
    if isinstance(value, tuple):
        is_named = is_traced and hasattr(value, "_make")  # torch 2.11 does not trace it of the class
        return kind(*items.values()) if is_named else rebuilt_tuple(value, list(items.values()))
    if isinstance(value, deque):
        return deque(items.values(), value.maxlen)
    if is_traced or kind is OrderedDict:
        return kind(**items) if dataclasses.is_dataclass(value) else kind(items)
    twin: Any = copy.copy(value)
    if isinstance(value, list):
        twin[:] = items.values()
    for key, item in items.items() if not isinstance(value, list) else ():
        if isinstance(value, Mapping):
            twin[key] = item  # a ModelOutput keeps its attributes in step
        elif hasattr(value, key):
            object.__setattr__(twin, key, item)  # frozen dataclasses too
    return twin


def rebuilt_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Return a tuple of the type of ``value``, named or a user's own, with other items."""
    kind: Any = type(value)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and others return
        return kind(items)
    twin: Any = tuple.__new__(kind, items)  # whatever its own constructor takes
    if hasattr(value, "__dict__"):
        vars(twin).update(vars(value))
    return twin


def main_tensor(value: Any) -> Tensor | None:
    """Return the first tensor of real numbers that is more than one number, else the first tensor, else None."""
    if isinstance(value, Tensor):
        return value
    return main_of(leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def main_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the main tensor of some, as `main_tensor` does; no more of them are asked for than needed."""
    first: Tensor | None = None
    for tensor in tensors:
        if tensor.dim() and tensor.is_floating_point():
            return tensor
        first = tensor if first is None else first
    return first
