"""Find the containers of a run, note what is in them, and put it back.

`SnapshotPart` builds a `ContainerTree` from the objects of a run (model, optimizer, scheduler, scaler). It holds every
dictionary, list, set and deque below them: hook tables, ``_parameters``, ``_buffers``, ``optimizer.state``,
``param_groups``, the attributes of every module and parameter; and lists the tensors and generators in them. Containers
are put back in place, so that every reference to one stays right. Other objects (a config) are not entered.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import is_, is_not, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from hookline.errors import GuardError
from hookline.guard.rng import GENERATOR_TYPES
from hookline.guard.saveable import can_be_saved
from hookline.sites import _torch

__all__ = ["ContainerTree"]

_LEAF, _TENSOR, _CONTAINER, _OWNED, _GENERATOR, _ARRAY = range(6)
_TYPES: Final[tuple[tuple[Any, int], ...]] = (
    (Tensor, _TENSOR),
    ((dict, list, set, deque, tuple), _CONTAINER),
    ((nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler), _OWNED),
    (GENERATOR_TYPES, _GENERATOR),
    (np.ndarray, _ARRAY),
)
"""The category of each type; owned are objects whose attributes are part of the run."""
_NO_RECORDS: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device, torch.dtype)
_DATA: Final = ("dataset", "data_source")
"""The attributes by which loaders and samplers hold the data: it may be large, and is not written."""
_INNER: Final = ("_modules", "_parameters", "_buffers", "__dict__", "_held")
"""Keys that a path leaves out."""
_CATEGORIES: Final[dict[type, int]] = {}
"""The category of each type met so far; 0.05 µs to look up, where a chain of isinstance takes 1."""
_values: Final = methodcaller("values")


class _Container(NamedTuple):
    """One container and its place."""

    held: Any
    parent: int
    """The number of the container that this one is in; -1 for a root."""
    key: Any
    root: str
    is_dict: bool
    begin: int = 0
    end: int = 0
    """Where its items are in the list of all values (and, of a dictionary, of all keys)."""


class ContainerTree:
    """Every container below the roots, with the items it has now.

    All keys and all values are in two long lists, so that one comparison of a fraction of a millisecond tells for a
    whole model whether any object is another one now.
    """

    def __init__(self, roots: Mapping[str, object], known: Iterable[int] = ()) -> None:
        self.containers: list[_Container] = []
        self.tensors: list[Tensor] = []
        self.places: list[tuple[int, Any]] = []
        """For each tensor the number of a container it is in, and its key there."""
        self.generators: list[Any] = []
        self._is_batch = "batch_data" in roots
        self._slotted: list[tuple[Any, dict[str, Any]]] = []
        """Objects of a batch that have slots, and the values of those."""
        self._arrays: list[tuple[Any, Any, int, Any]] = []
        """NumPy arrays that can be written, a copy of each, and its place."""
        self._objects: list[Any] = []
        self._classes: list[type] = []
        """The class of each of these objects."""
        self._own_classes: list[tuple[type, dict[str, Any]]] = []
        """Classes that were made for one object alone, and their attributes."""
        self._changed: list[int] = []
        """What `changed` has found."""
        self.lost: list[str] = []
        """The names of arrays that the latest `restore` could not put back."""
        self.seen: set[int] = set(known)
        """The ids of what was met, here or elsewhere, and is not entered again."""
        for name, root in roots.items():
            if root is not None:
                for attributes in self._enter(root, -1, name):
                    self._walk(attributes, name)
        self.is_empty = not self._objects
        # Most containers of a model are hook tables with nothing in them.
        self._empty = [container.held for container in self.containers if not container.held]
        self._dicts = [container.held for container in self.containers if container.held and container.is_dict]
        self._others = [container.held for container in self.containers if container.held and not container.is_dict]
        # An OrderedDict may be put into another order without a new version.
        self._plain = [held for held in self._dicts if type(held) is dict] if _torch.dict_version is not None else []
        self._odd = [held for held in self._filled() if type(held) is not dict]
        self._sizes = list(map(len, self._filled()))
        self._keys, self._values = self._keys_now(), self._values_now()
        self._versions = self._versions_now()
        ends = {True: 0, False: len(self._keys)}  # the values of dictionaries come first
        for number, container in enumerate(self.containers):
            begin = ends[container.is_dict]
            ends[container.is_dict] = end = begin + len(container.held)
            self.containers[number] = container._replace(begin=begin, end=end)

    def _walk(self, root: Any, name: str) -> None:
        """Add a container and what is below it; without recursion, since models can be deep."""
        todo = [(root, -1, name)]
        while todo:
            held, parent, key = todo.pop()
            if id(held) in self.seen:
                continue
            self.seen.add(id(held))
            keys = tuple(held) if isinstance(held, dict) else None
            number = parent if isinstance(held, tuple) else self._add_container(held, parent, key)
            below: list[tuple[Any, int, Any]] = []
            for index, value in enumerate(held if keys is None else held.values()):
                category = _CATEGORIES.get(type(value))
                if category is None:
                    category = _category(value)
                if not category and self._is_batch and _is_record(value):
                    self._add_record(value, number, index if keys is None else keys[index], below)
                elif category:
                    self._add_value(value, category, number, index if keys is None else keys[index], below)
            todo += reversed(below)

    def _add_container(self, held: Any, parent: int, key: Any) -> int:
        root = key if parent < 0 else self.containers[parent].root
        self.containers.append(_Container(held, parent, key, root, isinstance(held, dict)))
        return len(self.containers) - 1

    def _add_record(self, value: Any, number: int, key: Any, below: list[tuple[Any, int, Any]]) -> None:
        """Enter an object of a batch, of any class."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        below += [(value.__dict__, number, key)] if hasattr(value, "__dict__") else []
        slots = {name: getattr(value, name) for name in _slots_of(value)}
        if slots:
            self._slotted.append((value, slots))
            below.append((slots, number, key))

    def _add_value(self, value: Any, category: int, number: int, key: Any, below: list[tuple[Any, int, Any]]) -> None:
        if isinstance(key, str) and key in _DATA and self.containers[number].root.startswith("loader"):
            return
        if category == _OWNED:
            below += ((held, number, key) for held in self._enter(value, number, key))
        elif category == _CONTAINER:
            below.append((value, number, key))
        elif id(value) not in self.seen:
            self.seen.add(id(value))
            if category == _GENERATOR:
                self.generators.append(value)
            elif category == _ARRAY:
                self._arrays += [(value, value.copy(), number, key)] if value.flags.writeable else []
            elif not self._is_batch or can_be_saved(value):
                self.tensors.append(value)
                self.places.append((number, key))
                if isinstance(value, nn.Parameter):
                    below.append((value.__dict__, number, key))

    def _enter(self, value: Any, parent: int, key: Any) -> list[dict[str, Any]]:
        """Note the class of an object, and return its attributes; refuse a scripted module."""
        if isinstance(value, torch.jit.ScriptModule):
            _refuse_scripted(value, self.path(parent, key))
        self._objects.append(value)
        self._classes.append(type(value))
        if isinstance(value, nn.Module) and is_parametrized(value):  # its class has properties for its parameters
            self._own_classes.append((type(value), dict(vars(type(value)))))
        # A scheduler writes the attributes of callable objects it goes by into its state dict, too.
        lambdas = getattr(value, "lr_lambdas", ()) if isinstance(value, LRScheduler) else ()
        return [vars(each) for each in (value, *lambdas) if hasattr(each, "__dict__")]

    def _filled(self) -> Iterator[Any]:
        return chain(self._dicts, self._others)

    def _keys_now(self) -> list[Any]:
        return list(chain.from_iterable(self._dicts))

    def _values_now(self) -> list[Any]:
        return list(chain(chain.from_iterable(map(_values, self._dicts)), chain.from_iterable(self._others)))

    def _versions_now(self) -> list[Any]:
        """Return the versions of plain dictionaries, and all that is in other containers; nothing without versions."""
        if _torch.dict_version is None:
            return []
        odd = [tuple(map(id, (*held, *held.values()) if isinstance(held, dict) else held)) for held in self._odd]
        return [*map(_torch.dict_version, self._plain), *odd]

    # -- later ---------------------------------------------------------------------------------------------------

    def _is_untouched(self) -> bool:
        """Return whether versions show that all is as it was noted; if not, the items have to be compared."""
        return bool(self._versions) and not any(self._empty) and self._versions_now() == self._versions

    def refresh(self) -> bool:
        """Note plain values (a learning rate) and arrays anew; return False if anything else has changed."""
        if not self._is_untouched() and not self._note_values():
            return False
        if list(map(type, self._objects)) != self._classes:
            return False
        self._arrays = [(array, array.copy(), *place) for array, _, *place in self._arrays]
        return True

    def _note_values(self) -> bool:
        """Note plain values anew; return False if anything else has changed."""
        if not self._has_same_keys():
            return False
        versions, now = self._versions_now(), self._values_now()
        for index in np.flatnonzero(np.fromiter(map(is_not, now, self._values), bool, len(now))):
            if _category(now[index]) or _category(self._values[index]):
                return False
        self._values, self._versions = now, versions
        return True

    def _has_same_keys(self) -> bool:
        if any(self._empty) or list(map(len, self._filled())) != self._sizes:
            return False
        return all(map(is_, self._keys_now(), self._keys))

    def changed(self, *, looked: bool = False) -> list[int]:
        """Return the numbers of the containers that do not hold the very same objects any more.

        ``looked``: nothing has happened since it was last asked (0.3 ms for 4,000 values).
        """
        if not looked:
            if self._is_untouched() or (self._has_same_keys() and all(map(is_, self._values_now(), self._values))):
                self._changed = []
            else:
                numbered = enumerate(self.containers)
                self._changed = [number for number, container in numbered if not self._is_same(container)]
        return self._changed

    def _items_of(self, container: _Container) -> tuple[list[Any], list[Any]]:
        """Return the keys and values that a container had; only those of a dictionary have keys."""
        begin, end = container.begin, container.end
        return self._keys[begin:end] if container.is_dict else [], self._values[begin:end]

    def _is_same(self, container: _Container) -> bool:
        held, (keys, values) = container.held, self._items_of(container)
        if len(held) != len(values):
            return False
        if not container.is_dict:
            return all(map(is_, held, values))
        return all(map(is_, held, keys)) and all(map(is_, held.values(), values))

    def restore(self, changed: Iterable[int]) -> None:
        """Put back the items of these containers, the classes of objects, and the numbers of NumPy arrays."""
        if list(map(type, self._objects)) != self._classes:
            for value, cls in zip(self._objects, self._classes, strict=True):
                if type(value) is not cls:
                    value.__class__ = cls
        for cls, attributes in self._own_classes:
            _restore_attributes(cls, attributes)
        for container in map(self.containers.__getitem__, changed):
            held, (keys, values) = container.held, self._items_of(container)
            if container.is_dict:
                _restore_items(held, keys, values)
            elif isinstance(held, list):
                held[:] = values
            else:
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(values)
        for value, slots in self._slotted:
            for name, before in slots.items():
                if getattr(value, name, None) is not before:
                    object.__setattr__(value, name, before)
        changed_arrays = self._changed_arrays()
        self.lost = [self.path(*place) for array, numbers, *place in changed_arrays if not _fill(array, numbers)]

    def _changed_arrays(self) -> list[tuple[Any, Any, int, Any]]:
        return [entry for entry in self._arrays if not _is_same_array(entry[0], entry[1])]

    # -- names ---------------------------------------------------------------------------------------------------

    def names_of_changed_arrays(self) -> list[str]:
        """Return the names of arrays whose numbers are not as they were."""
        return [self.path(*place) for _, _, *place in self._changed_arrays()]

    def names_of_changed_items(self, number: int) -> list[str]:
        """Return the names of what is not as it was in container ``number``."""
        container = self.containers[number]
        if not container.is_dict:
            return [self.path(container.parent, container.key)]
        now, before = container.held, dict(zip(*self._items_of(container), strict=True))
        keys = [key for key in before if key not in now or not _is_equal(now[key], before[key])]
        keys += [key for key in now if key not in before]
        return [self.path(number, key) for key in keys]

    def path(self, parent: int, key: Any) -> str:
        """Return the path to what is under ``key`` in container ``parent``: ``model.0.weight``."""
        if parent < 0:
            return str(key)
        above = self.containers[parent]
        before = self.path(above.parent, above.key)
        if isinstance(key, Tensor):
            return f"{before}[{self._name_of_tensor(key)}]"
        if not isinstance(key, str):
            return f"{before}[{key!r}]"
        return before if key in _INNER else f"{before}.{key}"

    def _name_of_tensor(self, tensor: Tensor) -> str:
        for known, place in zip(self.tensors, self.places, strict=True):
            if known is tensor:
                return self.path(*place)
        return f"a tensor of shape {tuple(tensor.shape)}"


def _category(value: Any) -> int:
    cls = type(value)
    category = _CATEGORIES.get(cls)
    if category is None:
        category = _CATEGORIES[cls] = next((category for types, category in _TYPES if issubclass(cls, types)), _LEAF)
    return category


def _is_record(value: Any) -> bool:
    """Return whether an object of a batch may have tensors for attributes: a dataclass, a ``BatchEncoding``."""
    return (hasattr(value, "__dict__") or bool(_slots_of(value))) and not isinstance(value, _NO_RECORDS)


def _slots_of(value: Any) -> list[str]:
    """Return the names of an object's slots that have a value."""
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in kinds for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _refuse_scripted(module: nn.Module, name: str) -> None:
    if any(True for _ in chain(module.parameters(), module.buffers())):
        raise GuardError(
            f"{name} is a {type(module).__name__}: its parameters are kept outside of Python, where they cannot be "
            "looked after. Next: guard the model before it is scripted."
        )


def _is_same_array(now: Any, before: Any) -> bool:
    return bool(now.shape == before.shape and now.dtype == before.dtype and now.tobytes() == before.tobytes())


def _fill(array: Any, numbers: Any) -> bool:
    """Restore an array; return False if that fails, since it has less memory than it had."""
    try:
        if array.dtype != numbers.dtype:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy has no other way to set the type of an array in place
                array.dtype = numbers.dtype
        if array.shape != numbers.shape:
            array.resize(numbers.shape, refcheck=False)
        array.flags.writeable = True
        array[...] = numbers
    except ValueError:
        return False
    return bool(array.dtype == numbers.dtype)


def _restore_attributes(cls: type, before: dict[str, Any]) -> None:
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        delattr(cls, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(cls, name, value)


def _is_equal(now: Any, before: Any) -> bool:
    """Return whether a value is the same object, or an equal number or text."""
    return now is before or (type(now) is type(before) and isinstance(now, int | float | str) and now == before)


def _restore_items(held: Any, keys: list[Any], values: list[Any]) -> None:
    """Put items back in their old order; leave those of hookline, which looks after its own in torch's tables."""
    if len(held) == len(keys) and all(map(is_, held, keys)):
        for key, value in zip(keys, values, strict=True):
            if held[key] is not value and not _is_ours(value) and not _is_ours(held[key]):
                held[key] = value
        return
    ours = {key: value for key, value in held.items() if _is_ours(value)}
    items = [(key, value) for key, value in zip(keys, values, strict=True) if not _is_ours(value) or key in ours]
    held.clear()
    for key, value in (*items, *ours.items()):
        held[key] = value  # update() adds up in a Counter


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("hookline.sites.")
