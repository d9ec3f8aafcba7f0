"""The containers a run hangs together by, and what was in them.

Takes the objects of a run (model, optimizer, scheduler, scaler) from a snapshot, and finds every dictionary, list, set
and deque below them: hook tables, ``_parameters``, ``_buffers``, ``optimizer.state``, ``param_groups``, the attributes
of every module and parameter. Hands back the tensors and generators it met, and can put every container back as it
was, in place, so that whoever refers to one still has the right one. What is inside other objects (a config) is not
looked at.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import is_, is_not, methodcaller
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from hookline.errors import GuardError
from hookline.guard.data_check import is_record, slots_of
from hookline.guard.tensor_states import can_be_saved

__all__ = ["Structure"]

_LEAF, _TENSOR, _CONTAINER, _TUPLE, _OWNED, _GENERATOR, _ARRAY = range(7)
_OWNED_TYPES: Final = (nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler)
"""Objects whose attributes are part of the run."""
_DATA: Final = ("dataset", "data_source")
"""What loaders and samplers call what they read from: it may be large, and nobody writes there."""
_INNER: Final = ("_modules", "_parameters", "_buffers", "__dict__", "_held")
_CATEGORIES: Final[dict[type, int]] = {}
"""What each type met so far is; 0.05 µs to look up, where a chain of isinstance takes 1."""
_values: Final = methodcaller("values")


class _Container(NamedTuple):
    """One container, and where it hangs."""

    held: Any
    parent: int
    """The number of the container that this one is in; -1 for a root."""
    key: Any
    root: str
    is_dict: bool
    begin: int
    end: int
    """What was in it, as a stretch of all values (and, of a dictionary, of all keys)."""


class Structure:
    """Everything that hangs together below the roots, as it is now.

    All keys and all values are in two long lists, so that whether anything is not the very same object any more is
    found out for a whole model in a fraction of a millisecond.
    """

    def __init__(self, roots: Mapping[str, object], known: Iterable[int] = ()) -> None:
        self.containers: list[_Container] = []
        self.tensors: list[Tensor] = []
        self.places: list[tuple[int, Any]] = []
        """For each tensor the number of a container it is in, and its key there."""
        self.generators: list[Any] = []
        self._is_batch = "batch_data" in roots
        self._slotted: list[tuple[Any, dict[str, Any]]] = []
        """Objects of a batch that have slots, and what was in those."""
        self._arrays: list[tuple[Any, Any, int, Any]] = []
        """Arrays of NumPy that can be written, a copy of each, and where it was met."""
        self._objects: list[Any] = []
        self._classes: list[type] = []
        """The class of each of these objects."""
        self._own_classes: list[tuple[type, dict[str, Any]]] = []
        """Classes that were made for one object alone, and what was in them."""
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self.lost: list[str] = []
        """The names of arrays that the latest `restore` could not put back."""
        self.seen: set[int] = set(known)
        """The ids of what was met, here or elsewhere, and is not to be looked at again."""
        for name, root in roots.items():
            if isinstance(root, torch.jit.ScriptModule):
                _refuse_scripted(root, name)
            if root is not None:
                self._note_class(root)
                for attributes in (vars(root), *_attributes_of_lambdas(root)):
                    self._walk(attributes, -1, name)
        # Most containers of a model are hook tables with nothing in them.
        self._empty = [container.held for container in self.containers if not container.held]
        self._dicts = [container.held for container in self.containers if container.held and container.is_dict]
        self._others = [container.held for container in self.containers if container.held and not container.is_dict]
        self._sizes = list(map(len, self._held()))
        self._arrange()

    def _walk(self, root: Any, parent: int, key: Any) -> None:
        """Note a container and what is below it; without recursion, models can be deep."""
        todo = [(root, parent, key)]
        while todo:
            held, parent, key = todo.pop()
            if id(held) in self.seen:
                continue
            self.seen.add(id(held))
            keys = tuple(held) if isinstance(held, dict) else None
            number = parent if isinstance(held, tuple) else self._note(held, parent, key)
            below: list[tuple[Any, int, Any]] = []
            for index, value in enumerate(held if keys is None else held.values()):
                category = _CATEGORIES.get(type(value))
                if category is None:
                    category = _categorize(type(value))
                if not category and self._is_batch and is_record(value):
                    self._open(value, number, index if keys is None else keys[index], below)
                elif category:
                    self._meet(value, category, number, index if keys is None else keys[index], below)
            todo += reversed(below)

    def _open(self, value: Any, number: int, key: Any, below: list[tuple[Any, int, Any]]) -> None:
        """Look into an object of a batch, of whatever class."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        below += [(value.__dict__, number, key)] if hasattr(value, "__dict__") else []
        slots = {name: getattr(value, name) for name in slots_of(value)}
        if slots:
            self._slotted.append((value, slots))
            below.append((slots, number, key))

    def _note(self, held: Any, parent: int, key: Any) -> int:
        root = key if parent < 0 else self.containers[parent].root
        self.containers.append(_Container(held, parent, key, root, isinstance(held, dict), 0, 0))
        return len(self.containers) - 1

    def _meet(self, value: Any, category: int, number: int, key: Any, below: list[tuple[Any, int, Any]]) -> None:
        if isinstance(key, str) and key in _DATA and self.containers[number].root.startswith("loader"):
            return
        if category == _OWNED:
            if isinstance(value, torch.jit.ScriptModule):
                _refuse_scripted(value, self.path(number, key))
            self._note_class(value)
            below += ((held, number, key) for held in (value.__dict__, *_attributes_of_lambdas(value)))
        elif category in (_CONTAINER, _TUPLE):
            below.append((value, number, key))
        elif id(value) not in self.seen:
            self.seen.add(id(value))
            if category == _TENSOR and self._is_batch and not can_be_saved(value):
                return
            if category == _TENSOR:
                self.tensors.append(value)
                self.places.append((number, key))
                if isinstance(value, nn.Parameter):
                    below.append((value.__dict__, number, key))
            elif category == _GENERATOR:
                self.generators.append(value)
            elif value.flags.writeable:
                self._arrays.append((value, value.copy(), number, key))

    def _note_class(self, value: Any) -> None:
        """A parametrization makes its module another class, and hangs properties on that."""
        self._objects.append(value)
        self._classes.append(type(value))
        if isinstance(value, nn.Module) and is_parametrized(value):
            self._own_classes.append((type(value), dict(vars(type(value)))))

    def _held(self) -> Iterator[Any]:
        return chain(self._dicts, self._others)

    def _arrange(self) -> None:
        """Bring keys and values into the long lists, dictionaries first."""
        self._keys, self._values = self._keys_now(), self._values_now()
        ends = dict.fromkeys((True, False), 0)
        ends[False] = len(self._keys)
        for number, container in enumerate(self.containers):
            begin = ends[container.is_dict]
            ends[container.is_dict] = end = begin + len(container.held)
            self.containers[number] = container._replace(begin=begin, end=end)

    def _keys_now(self) -> list[Any]:
        return list(chain.from_iterable(self._dicts))

    def _values_now(self) -> list[Any]:
        return list(chain(chain.from_iterable(map(_values, self._dicts)), chain.from_iterable(self._others)))

    # -- later ---------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Whether it holds for the run as it is now, but for plain values (a learning rate), which are noted anew."""
        if not self._has_same_keys():
            return False
        now = self._values_now()
        for index in np.flatnonzero(np.fromiter(map(is_not, now, self._values), bool, len(now))):
            if _category(now[index]) or _category(self._values[index]):
                return False
        self._values = now
        if list(map(type, self._objects)) != self._classes:
            return False
        self._arrays = [(array, array.copy(), *place) for array, _, *place in self._arrays]
        return True

    def _has_same_keys(self) -> bool:
        if any(self._empty) or list(map(len, self._held())) != self._sizes:
            return False
        return all(map(is_, self._keys_now(), self._keys))

    def changed(self) -> list[int]:
        """The numbers of the containers that do not hold the very same objects any more."""
        if self._has_same_keys() and all(map(is_, self._values_now(), self._values)):
            return []
        return [number for number, container in enumerate(self.containers) if not self._is_same(container)]

    def _is_same(self, container: _Container) -> bool:
        held, begin, end = container.held, container.begin, container.end
        if len(held) != end - begin:
            return False
        if not container.is_dict:
            return all(map(is_, held, self._values[begin:end]))
        same_keys = all(map(is_, held, self._keys[begin:end]))
        return same_keys and all(map(is_, held.values(), self._values[begin:end]))

    def restore(self, changed: Iterable[int]) -> None:
        """Put back what was in these containers, the classes of objects, and the numbers of NumPy arrays."""
        for value, cls in zip(self._objects, self._classes, strict=True):
            if type(value) is not cls:
                value.__class__ = cls
        for cls, attributes in self._own_classes:
            _put_attributes_back(cls, attributes)
        for number in changed:
            held, begin, end = (getattr(self.containers[number], name) for name in ("held", "begin", "end"))
            values = self._values[begin:end]
            if self.containers[number].is_dict:
                _put_items_back(held, self._keys[begin:end], values)
            elif isinstance(held, list):
                held[:] = values
            else:
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(values)
        for value, slots in self._slotted:
            for name, before in slots.items():
                if getattr(value, name, None) is not before:
                    object.__setattr__(value, name, before)
        self.lost = [
            self.path(*place) for array, numbers, *place in self._changed_arrays() if not _fill(array, numbers)
        ]

    def _changed_arrays(self) -> list[tuple[Any, Any, int, Any]]:
        return [entry for entry in self._arrays if not _is_same_array(entry[0], entry[1])]

    # -- names ---------------------------------------------------------------------------------------------------

    def differences_in_arrays(self) -> list[str]:
        """The names of arrays whose numbers are not as they were."""
        return [self.path(*place) for _, _, *place in self._changed_arrays()]

    def differences(self, number: int) -> list[str]:
        """The names of what is not as it was in one container."""
        container = self.containers[number]
        if not container.is_dict:
            return [self.path(container.parent, container.key)]
        begin, end = container.begin, container.end
        now, before = container.held, dict(zip(self._keys[begin:end], self._values[begin:end], strict=True))
        keys = [key for key in before if key not in now or not _is_equal(now[key], before[key])]
        keys += [key for key in now if key not in before]
        return [self.path(number, key) for key in keys]

    def path(self, parent: int, key: Any) -> str:
        """How one would write the way to what is under that key: ``model.0.weight``, ``optimizer.param_groups[0]``."""
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


def _attributes_of_lambdas(value: Any) -> list[dict[str, Any]]:
    """Of callable objects that a scheduler goes by; it writes them into its state dict, too."""
    lambdas = getattr(value, "lr_lambdas", ()) if isinstance(value, LRScheduler) else ()
    return [vars(each) for each in lambdas if hasattr(each, "__dict__")]


def _refuse_scripted(module: nn.Module, name: str) -> None:
    if any(True for _ in chain(module.parameters(), module.buffers())):
        raise GuardError(
            f"{name} is a {type(module).__name__}: its parameters are kept outside of Python, where they cannot be "
            "looked after. Next: guard the model before it is scripted."
        )


def _category(value: Any) -> int:
    category = _CATEGORIES.get(type(value))
    return _categorize(type(value)) if category is None else category


def _categorize(cls: type) -> int:
    kinds: tuple[tuple[Any, int], ...] = (
        (Tensor, _TENSOR),
        ((dict, list, set, deque), _CONTAINER),
        (tuple, _TUPLE),
        (_OWNED_TYPES, _OWNED),
        ((torch.Generator, np.random.Generator, np.random.RandomState, random.Random), _GENERATOR),
        (np.ndarray, _ARRAY),
    )
    category = next((category for types, category in kinds if issubclass(cls, types)), _LEAF)
    _CATEGORIES[cls] = category
    return category


def _is_same_array(now: Any, before: Any) -> bool:
    return bool(now.shape == before.shape and now.dtype == before.dtype and now.tobytes() == before.tobytes())


def _fill(array: Any, numbers: Any) -> bool:
    """Have an array be as it was; return False if it cannot be, as it has less memory than it had."""
    try:
        if array.dtype != numbers.dtype:
            _set_dtype(array, numbers.dtype)
        if array.shape != numbers.shape:
            array.resize(numbers.shape, refcheck=False)
        array.flags.writeable = True
        array[...] = numbers
    except ValueError:
        return False
    return bool(array.dtype == numbers.dtype)


def _set_dtype(array: Any, dtype: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy has other ways to see an array otherwise, none to set one right
        array.dtype = dtype


def _put_attributes_back(cls: type, before: dict[str, Any]) -> None:
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        delattr(cls, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(cls, name, value)


def _is_equal(now: Any, before: Any) -> bool:
    """Whether a value is the same, or as good as: numbers and texts are told by what they say."""
    return now is before or (type(now) is type(before) and isinstance(now, int | float | str) and now == before)


def _put_items_back(held: Any, keys: list[Any], values: list[Any]) -> None:
    """In their old order. What hookline keeps in torch's tables it looks after itself: that stays as it is now."""
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
