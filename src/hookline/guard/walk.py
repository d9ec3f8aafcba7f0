"""Find what a run is made of, note what every container of it holds, and put that back.

`Snapshot` builds a `RunWalk` from the objects of a run (model, optimizer, scheduler, scaler, loader, batch). It holds
every dictionary, list, set and deque below them: hook tables, ``_parameters``, ``optimizer.state``, ``param_groups``,
the attributes of every module and parameter; and lists the tensors, arrays and generators in them. Containers are put
back in place, so that every reference to one stays right. Other objects (a config) are not entered.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import is_, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from hookline.errors import GuardError
from hookline.guard.rng import GENERATOR_TYPES
from hookline.sites import _torch

__all__ = ["BATCH", "RunWalk", "StateChange", "check_saveable"]

BATCH: Final = "batch_data"
"""The root whose objects are entered whatever their class, and whose tensors may be of a kind that is not saved."""
_ATOM, _TENSOR, _CONTAINER, _OWNED, _GENERATOR, _ARRAY = range(6)
_TYPES: Final[tuple[tuple[Any, int], ...]] = (
    (Tensor, _TENSOR),
    ((dict, list, set, deque, tuple), _CONTAINER),
    ((nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler), _OWNED),
    (GENERATOR_TYPES, _GENERATOR),
    (np.ndarray, _ARRAY),
)
"""The category of each type; owned are objects whose attributes are part of the run."""
_CATEGORIES: Final[dict[type, int]] = {}
"""The category of each type met so far; 0.05 µs to look up, where a chain of isinstance takes 1."""
_NO_RECORDS: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device, torch.dtype)
_DATA: Final = ("dataset", "data_source")
"""The attributes by which loaders and samplers hold the data: it may be large, and is not written."""
_INNER: Final = ("_modules", "_parameters", "_buffers")
"""Keys that a path leaves out."""
_values: Final = methodcaller("values")

_Place: TypeAlias = tuple[Any, Any]
"""The place of the container that something is in, None for a root, and its key there."""


class StateChange(NamedTuple):
    """Something of a run that is not as it was."""

    kind: str
    """"parameter", "gradient" (written), "other gradient" (another object, or none, in its place), "state" (of the
    optimizer or scheduler), "buffer", "batch", "structure", "random", "switch"."""
    name: str
    has_copy: bool = True
    """Whether it can be put back; not if it is a tensor that was not copied."""


class _Container(NamedTuple):
    """One container, its place, and what it held."""

    held: Any
    place: _Place
    keys: tuple[Any, ...] | None
    """Those of a dictionary."""
    values: tuple[Any, ...]

    def is_same(self) -> bool:
        """Return whether it holds the very same objects."""
        held, keys = self.held, self.keys
        if len(held) != len(self.values):
            return False
        if keys is None:
            return all(map(is_, held, self.values))
        return all(map(is_, held, keys)) and all(map(is_, held.values(), self.values))

    def noted_anew(self) -> _Container:
        """Return the same container with the values that it holds now."""
        return self._replace(values=tuple(self.held if self.keys is None else self.held.values()))

    def restore(self) -> None:
        """Put its items back, in their order."""
        held = self.held
        if self.keys is not None:
            _restore_items(held, self.keys, self.values)
        elif isinstance(held, list):
            held[:] = self.values
        else:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(self.values)


class RunWalk:
    """Every container below the ``roots``, with what it holds now, and the tensors in them, each once.

    What is ``known`` by its id is not entered.
    """

    def __init__(self, roots: Mapping[str, object], known: Container[int] = ()) -> None:
        self.tensors: list[Tensor] = []
        self.kinds: list[str] = []
        """The kind of each tensor: "parameter", "state" (of the optimizer), "batch", "buffer" (anything else)."""
        self.generators: list[Any] = []
        self.seen: set[int] = set()
        """The ids of what was met."""
        self._known = known
        self._places: list[_Place] = []
        self._containers: list[_Container] = []
        self._empty: list[Any] = []
        """Containers with nothing in them: most of a model are hook tables."""
        self._objects: list[Any] = []
        self._own_classes: list[tuple[type, dict[str, Any]]] = []
        """Classes that were made for one object alone, and their attributes."""
        self._slotted: list[tuple[Any, dict[str, Any]]] = []
        """Objects of a batch that have slots, and the values of those."""
        self._arrays: list[tuple[Any, Any, _Place]] = []
        """NumPy arrays that can be written, a copy of each, and its place."""
        for self._root, root in roots.items():
            if root is not None:
                self._walk(root, _category(root) or _OWNED, (None, self._root))
        self._classes = list(map(type, self._objects))
        self._note_items()

    # -- walking ---------------------------------------------------------------------------------------------------

    def _walk(self, root: Any, category: int, place: _Place) -> None:
        """Add what is below a root, in order; without recursion, since models can be deep."""
        todo = [(root, category, place)]
        while todo:
            below: list[tuple[Any, int, _Place]] = []
            self._add(*todo.pop(), below)
            todo += reversed(below)

    def _add(self, value: Any, category: int, place: _Place, below: list[tuple[Any, int, _Place]]) -> None:
        if id(value) in self.seen or id(value) in self._known:
            return
        self.seen.add(id(value))
        if category == _CONTAINER:
            self._add_container(value, place, below)
        elif category == _TENSOR:
            self._add_tensor(value, place, below)
        elif category == _GENERATOR:
            self.generators.append(value)
        elif category == _ARRAY:
            self._arrays += [(value, value.copy(), place)] if value.flags.writeable else []
        else:
            self._add_object(value, place, below)

    def _add_container(self, held: Any, place: _Place, below: list[tuple[Any, int, _Place]]) -> None:
        keys, values = (tuple(held), tuple(held.values())) if isinstance(held, dict) else (None, tuple(held))
        is_tuple = isinstance(held, tuple)
        if not is_tuple:
            self._containers.append(_Container(held, place, keys, values))
        is_batch, is_loader = self._root == BATCH, self._root.startswith("loader")
        for key, value in zip(range(len(values)) if keys is None else keys, values, strict=True):
            category = _CATEGORIES.get(type(value))
            if category is None:
                category = _category(value)
            if category == _CONTAINER and not value and not is_tuple:
                self._empty.append(value)
            elif not category and not (is_batch and _is_record(value)):
                continue
            elif not (is_loader and isinstance(key, str) and key in _DATA):
                below.append((value, category or _OWNED, (place, key)))

    def _add_tensor(self, tensor: Tensor, place: _Place, below: list[tuple[Any, int, _Place]]) -> None:
        if self._root == BATCH and not _can_be_saved(tensor):
            return
        self.tensors.append(tensor)
        self._places.append(place)
        is_parameter = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)  # which takes 1 µs to ask
        if is_parameter and tensor.__dict__:
            below.append((tensor.__dict__, _CONTAINER, place))
        elif is_parameter:
            self._empty.append(tensor.__dict__)
        if is_parameter or (place[0] is not None and _is_key(place[0][1], "params")):
            self.kinds.append("parameter")
        else:
            self.kinds.append({"optimizer": "state", BATCH: "batch"}.get(self._root, "buffer"))

    def _add_object(self, value: Any, place: _Place, below: list[tuple[Any, int, _Place]]) -> None:
        if isinstance(value, torch.jit.ScriptModule):
            _refuse_scripted(value, self._path(place))
        self._objects.append(value)
        if isinstance(value, nn.Module) and is_parametrized(value):  # its class has properties for its parameters
            self._own_classes.append((type(value), dict(vars(type(value)))))
        # A scheduler writes the attributes of callable objects it goes by into its state dict, too.
        lambdas = getattr(value, "lr_lambdas", ()) if isinstance(value, LRScheduler) else ()
        below += [(vars(one), _CONTAINER, place) for one in (value, *lambdas) if hasattr(one, "__dict__")]
        slots = {name: getattr(value, name) for name in _slots_of(value)} if self._root == BATCH else {}
        if slots:
            self._slotted.append((value, slots))
            below.append((slots, _CONTAINER, place))

    def _note_items(self) -> None:
        """Note all keys and values in two long lists: one comparison then tells whether any object is another one."""
        self._dicts = [one.held for one in self._containers if one.keys is not None]
        self._others = [one.held for one in self._containers if one.keys is None]
        self._sizes = list(map(len, chain(self._dicts, self._others)))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(self._values_now())
        # An OrderedDict may be put into another order without a new version.
        self._plain = [held for held in self._dicts if type(held) is dict]
        self._odd = [one for one in self._containers if type(one.held) is not dict]
        self._versions = self._versions_now()

    def _values_now(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(_values, self._dicts)), chain.from_iterable(self._others))

    def _versions_now(self) -> list[int]:
        """Return the version of every plain dictionary; nothing where there are no versions."""
        return [] if _torch.dict_version is None else list(map(_torch.dict_version, self._plain))

    # -- later -----------------------------------------------------------------------------------------------------

    def changed(self) -> list[_Container]:
        """Return the containers that do not hold the very same objects any more, as they were."""
        if not any(self._empty):
            if self._versions and self._versions == self._versions_now() and all(map(_Container.is_same, self._odd)):
                return []
            if (
                list(map(len, chain(self._dicts, self._others))) == self._sizes
                and all(map(is_, chain.from_iterable(self._dicts), self._keys))
                and all(map(is_, self._values_now(), self._values))
            ):
                return []
        return [one for one in self._containers if not one.is_same()] + [
            _Container(held, self._place_of(held), () if isinstance(held, dict) else None, ())
            for held in self._empty
            if held
        ]

    def _place_of(self, held: Any) -> _Place:
        """Return the place of a container that had nothing in it."""
        for one in self._containers:
            for key, value in zip(count() if one.keys is None else one.keys, one.values, strict=False):
                if value is held:
                    return one.place, key
        parameters = zip(self.tensors, self._places, strict=True)
        return next((place for tensor, place in parameters if getattr(tensor, "__dict__", None) is held), (None, "run"))

    def refresh(self) -> bool:
        """Note plain values (a learning rate) and arrays anew; return False if anything else has changed."""
        changed = self.changed()
        if list(map(type, self._objects)) != self._classes or not all(map(_has_other_atoms, changed)):
            return False
        if changed:
            others = {id(one.held) for one in changed}
            self._containers = [one.noted_anew() if id(one.held) in others else one for one in self._containers]
            self._note_items()
        self._arrays = [(array, array.copy(), place) for array, _, place in self._arrays]
        return True

    def changes(self, changed: Iterable[_Container]) -> list[StateChange]:
        """Return what is not as it was in ``changed`` containers and in arrays, by name."""
        changes = []
        for container in changed:
            is_state = _root_of(container.place) in ("optimizer", "scheduler")
            kind = "state" if is_state else "parameter" if _is_key(container.place[1], "_parameters") else "structure"
            changes += [StateChange(kind, self._path(place)) for place in _changed_items(container)]
        return changes + [StateChange("structure", self._path(entry[2])) for entry in self._changed_arrays()]

    def restore(self, changed: Iterable[_Container]) -> dict[str, str]:
        """Put back the items of ``changed`` containers, the classes of objects, and the numbers of NumPy arrays.

        Return the names of arrays that could not be put back, and why.
        """
        if list(map(type, self._objects)) != self._classes:
            for value, cls in zip(self._objects, self._classes, strict=True):
                if type(value) is not cls:
                    value.__class__ = cls
        for cls, attributes in self._own_classes:
            _restore_attributes(cls, attributes)
        for container in changed:
            container.restore()
        for value, slots in self._slotted:
            for name, before in slots.items():
                if getattr(value, name, None) is not before:
                    object.__setattr__(value, name, before)
        lost = [self._path(place) for array, numbers, place in self._changed_arrays() if not _fill(array, numbers)]
        return dict.fromkeys(lost, "an array that has less memory than it had")

    def _changed_arrays(self) -> list[tuple[Any, Any, _Place]]:
        return [entry for entry in self._arrays if not _is_same_array(entry[0], entry[1])]

    # -- names -----------------------------------------------------------------------------------------------------

    def name(self, index: int) -> str:
        """Return the name of a tensor: ``model.0.weight``."""
        return self._path(self._places[index])

    def beside(self, indices: Container[int], key: str) -> set[int]:
        """Return the indices of all tensors that lie in one container with one of ``indices`` that has this ``key``."""
        places = list(enumerate(self._places))
        containers = {id(above) for index, (above, own) in places if index in indices and _is_key(own, key)}
        return {index for index, (above, _) in places if id(above) in containers} if containers else set()

    def _path(self, place: _Place) -> str:
        above, key = place
        if above is None:
            return str(key)
        if isinstance(key, Tensor):
            known = (self.name(index) for index, tensor in enumerate(self.tensors) if tensor is key)
            return f"{self._path(above)}[{next(known, f'a tensor of shape {tuple(key.shape)}')}]"
        if not isinstance(key, str):
            return f"{self._path(above)}[{key!r}]"
        return self._path(above) if key in _INNER else f"{self._path(above)}.{key}"


def _category(value: Any) -> int:
    cls = type(value)
    category = _CATEGORIES.get(cls)
    if category is None:
        category = _CATEGORIES[cls] = next((category for types, category in _TYPES if issubclass(cls, types)), _ATOM)
    return category


def _root_of(place: _Place) -> str:
    while place[0] is not None:
        place = place[0]
    return str(place[1])


def _is_key(key: Any, name: str) -> bool:
    """Return whether a key is this name; one may be a tensor, which compares numbers."""
    return isinstance(key, str) and key == name


def _is_record(value: Any) -> bool:
    """Return whether an object of a batch may have tensors for attributes: a dataclass, a ``BatchEncoding``."""
    return (hasattr(value, "__dict__") or bool(_slots_of(value))) and not isinstance(value, _NO_RECORDS)


def _slots_of(value: Any) -> list[str]:
    """Return the names of an object's slots that have a value."""
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in kinds for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


# -- what cannot be saved ------------------------------------------------------------------------------------------


def check_saveable(tensor: Tensor, name: Callable[[], str]) -> None:
    """Raise a `GuardError` that names a tensor without numbers of its own."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    if is_plain and not tensor.is_meta and not _torch.transforms_active():
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise GuardError(f"{name()} has no numbers yet, so there is nothing to save. Next: run the model once.")
    if tensor.is_meta:
        raise GuardError(
            f"{name()} is on the meta device, where nothing can be saved. Next: to_empty() gives it memory."
        )
    if not _torch.has_numbers(tensor):
        raise GuardError(f"{name()} stands for other tensors (a trace, a transform), and cannot be saved there.")
    if hasattr(type(_torch.own_part(tensor)), "__tensor_flatten__"):
        raise GuardError(
            f"{name()} is a {type(tensor).__name__}, which wraps other tensors that would not be saved. "
            "Next: guard it unwrapped."
        )


def _can_be_saved(tensor: Tensor) -> bool:
    try:
        check_saveable(tensor, str)
    except GuardError:
        return False
    return True


def _refuse_scripted(module: nn.Module, name: str) -> None:
    if any(True for _ in chain(module.parameters(), module.buffers())):
        raise GuardError(
            f"{name} is a {type(module).__name__}: its parameters are kept outside of Python, where they cannot be "
            "looked after. Next: guard the model before it is scripted."
        )


# -- items, classes, arrays ----------------------------------------------------------------------------------------


def _has_other_atoms(container: _Container) -> bool:
    """Return whether a container differs by plain values alone, under the same keys."""
    held, keys = container.held, container.keys
    if len(held) != len(container.values) or (keys is not None and not all(map(is_, held, keys))):
        return False
    pairs = zip(held if keys is None else held.values(), container.values, strict=True)
    return not any(_category(now) or _category(before) for now, before in pairs if now is not before)


def _changed_items(container: _Container) -> list[_Place]:
    """Return the places of what is not as it was; of a list or set its own."""
    if container.keys is None:
        return [container.place]
    now, before = container.held, dict(zip(container.keys, container.values, strict=True))
    keys = [key for key in before if key not in now or not _is_equal(now[key], before[key])]
    return [(container.place, key) for key in (*keys, *(key for key in now if key not in before))]


def _is_equal(now: Any, before: Any) -> bool:
    """Return whether a value is the same object, or an equal number or text."""
    return now is before or (type(now) is type(before) and isinstance(now, int | float | str) and now == before)


def _restore_items(held: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
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


def _restore_attributes(cls: type, before: dict[str, Any]) -> None:
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        delattr(cls, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(cls, name, value)


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
