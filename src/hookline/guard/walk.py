"""Find what a run is made of, note what every container of it holds, and put that back.

`Snapshot` (guard/snapshot.py) builds a `RunWalk` from the objects of a run (model, optimizer, scheduler, scaler,
loader, batch). guard/guard.py and guard/snapshot.py make `StateChange`s. `RunWalk` and `SavedPart` (guard/snapshot.py)
compare by `Question` what many objects are now with what they were.

A walk holds every dictionary, list, set and deque below the objects: hook tables, ``_parameters``, ``optimizer.state``,
``param_groups``, the attributes of every module and parameter. It lists the tensors, arrays and generators in them.
Containers are put back in place, so that every reference to one stays right. Other objects (a config) are not entered,
but for those of a batch.

To have the attributes of one more class saved, add it to `_TYPES` as `_OWNED`, and to ``_ENTERED`` of training/state.py
(which lists what the guard enters); test it in tests/guard/test_guard_attacks.py. The names of the roots come from
``roots_of`` (guard/snapshot.py): "optimizer" and "scheduler" decide about kinds, and below "loader…" the data is left
out. Kinds are texts that guard.py, snapshot.py and model_context.py write too: search guard/ for one before you change
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from operator import is_
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

BATCH: Final = "batch_data"
"""The root whose objects are entered whatever their class, and whose tensors may be of a kind that is not saved."""
# `_ATOM` has to be 0: ``if not category`` asks for it.
_ATOM, _TENSOR, _CONTAINER, _OWNED, _GENERATOR, _ARRAY = range(6)
_TYPES: Final[tuple[tuple[Any, int], ...]] = (
    (Tensor, _TENSOR),
    ((dict, list, set, deque, tuple), _CONTAINER),
    ((nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler), _OWNED),
    (GENERATOR_TYPES, _GENERATOR),
    (np.ndarray, _ARRAY),
)
"""The category of each type, in the order in which they are asked; all others are `_ATOM` and are not entered. The
attributes of `_OWNED` objects are part of the run."""
_CATEGORIES: Final[dict[type, int]] = {}
"""The category of each type met so far; 0.05 µs to look up, where a chain of isinstance takes 1."""
_NO_RECORDS: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device, torch.dtype)
_DATA: Final = ("dataset", "data_source")
"""The attributes by which loaders and samplers hold the data: it may be large, and is not written."""
_INNER: Final = ("_modules", "_parameters", "_buffers")
"""Keys that a path leaves out."""

_Place: TypeAlias = tuple[Any, Any]
"""Where something is: the place of the container that holds it (None for a root), and its key there."""


class StateChange(NamedTuple):
    """Something of a run that is not as it was; `Guard` decides by ``kind`` whether a scope allows it."""

    kind: str
    """"parameter", "gradient" (written), "other gradient" (another object, or none, in its place), "state" (of the
    optimizer or scheduler), "buffer", "batch", "structure", "random", "switch". ``_FORBIDDEN`` and ``_restore`` of
    guard/guard.py, and ``ALL`` of guard/snapshot.py, have these names: change them together."""
    name: str
    has_copy: bool = True
    """Whether it can be put back; not if it is a tensor that was not copied."""


class Question:
    """What many things answer to some calls, asked by ``map`` without Python code for each; and the answers before."""

    def __init__(self, things: Mapping[int, Any], *calls: Callable[[Any], Any]) -> None:
        self.things, self._calls = things, calls
        self.note()

    def note(self) -> None:
        """Note the answers of now."""
        self.before = self._ask()

    def differing(self) -> set[int]:
        """Return the indices of the things whose answer differs now."""
        now, before = self._ask(), self.before
        if now == before:
            return set()
        return {index for index, new, old in zip(self.things, now, before, strict=True) if new != old}

    def _ask(self) -> list[Any]:
        answers = [map(call, self.things.values()) for call in self._calls]
        return list(answers[0] if len(answers) == 1 else zip(*answers, strict=True))


class _Container(NamedTuple):
    """One container, its place, and what it held."""

    held: Any
    place: _Place
    keys: tuple[Any, ...] | None
    """Those of a dictionary."""
    values: tuple[Any, ...]

    @classmethod
    def of(cls, held: Any, place: _Place) -> _Container:
        """Note what a container holds now."""
        if isinstance(held, dict):
            return cls(held, place, tuple(held), tuple(held.values()))
        return cls(held, place, None, tuple(held))

    def is_same(self) -> bool:
        """Return whether it holds the very same objects."""
        held, keys = self.held, self.keys
        if len(held) != len(self.values):
            return False
        if keys is None:
            return all(map(is_, held, self.values))
        return all(map(is_, held, keys)) and all(map(is_, held.values(), self.values))

    def has_same_parts(self, other: _Container) -> bool:
        """Return whether ``other``, made of the same container, differs by plain values alone: a number, a text."""
        ours, theirs = ([value for value in one.values if _category(value)] for one in (self, other))
        return len(ours) == len(theirs) and all(map(is_, ours, theirs))

    def changed_places(self) -> list[_Place]:
        """Return the places of the items of a dictionary that differ; of a list or set, its own place."""
        if self.keys is None:
            return [self.place]
        now, before = self.held, dict(zip(self.keys, self.values, strict=True))
        keys = [key for key in before if key not in now or not _is_equal(now[key], before[key])]
        return [(self.place, key) for key in (*keys, *(key for key in now if key not in before))]

    def restore(self) -> None:
        """Put its items back, in their order.

        Hooks of hookline in torch's tables (`_is_ours`) stay as they are now: their handles alone put them there and
        take them off.
        """
        held = self.held
        if self.keys is None:
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(self.values)
            return
        ours = {key: value for key, value in held.items() if _is_ours(value)}
        items = [
            (key, ours.pop(key, value))
            for key, value in zip(self.keys, self.values, strict=True)
            if key in ours or not _is_ours(value)
        ]
        held.clear()
        for key, value in (*items, *ours.items()):
            held[key] = value  # not update(), which adds up in a Counter


class RunWalk:
    """Every container below the ``roots``, with what it holds now, and the tensors in them, each once.

    An object whose id is in ``known`` (of another walk) is not entered.
    """

    def __init__(self, roots: Mapping[str, object], known: Container[int] = ()) -> None:
        self.tensors: list[Tensor] = []
        self.kinds: list[str] = []
        """The kind of each tensor: "parameter", "state" (of the optimizer), "batch", "gradient", "buffer" (others)."""
        self.places: list[_Place] = []
        self.generators: list[Any] = []
        self.seen: dict[int, int] = {}
        """The id of everything that was met, with the index of a tensor in ``tensors``, or -1."""
        self._known = known
        self._containers: list[_Container] = []
        self._empty: list[Any] = []
        self._empty_places: list[_Place] = []
        """Containers with nothing in them, and their places; in a model most are hook tables. ``any()`` tells whether
        one has been filled."""
        self._objects: list[Any] = []
        self._own_classes: list[tuple[type, dict[str, Any]]] = []
        """Classes that were made for one object alone, and their attributes."""
        self._arrays: list[tuple[Any, Any, _Place]] = []
        """NumPy arrays that can be written, a copy of each, and its place."""
        self._todo: list[tuple[Any, int, _Place]] = []
        for self._root, root in roots.items():
            if root is not None:
                self._walk(root)
        self._classes = Question(dict(enumerate(self._objects)), type)
        self._ask_versions()

    # -- walking ---------------------------------------------------------------------------------------------------

    def _walk(self, root: Any) -> None:
        """Add everything below a root, in order; without recursion, since models can be deep."""
        stack = [(root, _category(root) or _OWNED, (None, self._root))]
        while stack:
            value, category, place = stack.pop()
            if id(value) not in self.seen and id(value) not in self._known:
                self.seen[id(value)] = -1
                self._add(value, category, place)
                stack += reversed(self._todo)
                self._todo.clear()

    def _add(self, value: Any, category: int, place: _Place) -> None:
        if category == _CONTAINER:
            self._add_container(value, place)
        elif category == _TENSOR:
            self._add_found(value, place)
        elif category == _GENERATOR:
            self.generators.append(value)
        elif category == _ARRAY:
            self._arrays += [(value, value.copy(), place)] if value.flags.writeable else []
        else:
            self._add_object(value, place)

    def _add_container(self, held: Any, place: _Place) -> None:
        container = _Container.of(held, place)
        is_tuple = isinstance(held, tuple)
        if not is_tuple:
            self._containers.append(container)
        keys, values = container.keys, container.values
        is_batch, is_loader = self._root == BATCH, self._root.startswith("loader")
        for key, value in zip(range(len(values)) if keys is None else keys, values, strict=True):
            category = _category(value)
            if category == _CONTAINER and not value and not is_tuple:
                self._add_empty(value, (place, key))
            elif not category and not (is_batch and _is_record(value)):
                continue
            elif not (is_loader and isinstance(key, str) and key in _DATA):
                self._todo.append((value, category or _OWNED, (place, key)))

    def _add_empty(self, held: Any, place: _Place) -> None:
        self._empty.append(held)
        self._empty_places.append(place)

    def _add_found(self, tensor: Tensor, place: _Place) -> None:
        is_parameter = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)  # which takes 1 µs to ask
        if is_parameter or (place[0] is not None and _is_key(place[0][1], "params")):
            kind = "parameter"
        else:
            kind = {"optimizer": "state", BATCH: "batch"}.get(self._root, "buffer")
        self.add_tensor(tensor, place, kind)
        if is_parameter and tensor.__dict__:
            self._todo.append((tensor.__dict__, _CONTAINER, place))
        elif is_parameter:
            self._add_empty(tensor.__dict__, place)

    def add_tensor(self, tensor: Tensor, place: _Place, kind: str) -> None:
        """Add a tensor; refuse one without numbers of its own, unless it is in a batch."""
        reason = _why_not_saveable(tensor)
        if not reason:
            self.seen[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.kinds.append(kind)
            self.places.append(place)
        elif kind != "batch":
            raise GuardError(f"{self._path(place)} {reason}")

    def _add_object(self, value: Any, place: _Place) -> None:
        if isinstance(value, torch.jit.ScriptModule) and any(True for _ in (*value.parameters(), *value.buffers())):
            raise GuardError(
                f"{self._path(place)} is a {type(value).__name__}: its parameters are kept outside of Python, where "
                "they cannot be looked after. Next: guard the model before it is scripted."
            )
        self._objects.append(value)
        if isinstance(value, nn.Module) and is_parametrized(value):  # its class has properties for its parameters
            self._own_classes.append((type(value), dict(vars(type(value)))))
        # A scheduler writes the attributes of callable objects it goes by into its state dict, too.
        lambdas = getattr(value, "lr_lambdas", ()) if isinstance(value, LRScheduler) else ()
        self._todo += [(vars(one), _CONTAINER, place) for one in (value, *lambdas) if hasattr(one, "__dict__")]

    def _ask_versions(self) -> None:
        """Note the versions of plain dictionaries; others are always compared.

        An OrderedDict may get another order without a new version.
        """
        containers, version = enumerate(self._containers), _torch.dict_version
        plain = {index: one.held for index, one in containers if version is not None and type(one.held) is dict}
        self._versions = Question(plain, version or id)
        self._odd = set(range(len(self._containers))).difference(plain)
        """The indices of those that are always compared."""

    # -- later -----------------------------------------------------------------------------------------------------

    def _differing(self) -> list[int]:
        """Return the indices of the containers that do not hold the very same objects any more."""
        suspects = sorted(self._odd | self._versions.differing())
        return [index for index in suspects if not self._containers[index].is_same()]

    def changed(self) -> list[_Container]:
        """Return the containers that do not hold the very same objects any more, as they were."""
        found = [self._containers[index] for index in self._differing()]
        if any(self._empty):
            filled = [(held, place) for held, place in zip(self._empty, self._empty_places, strict=True) if held]
            found += [_Container(held, place, () if isinstance(held, dict) else None, ()) for held, place in filled]
        return found

    def refresh(self) -> bool:
        """Note plain values (a learning rate) and arrays anew; return False if anything else has changed."""
        if any(self._empty) or self._classes.differing():
            return False
        differing = self._differing()
        for index in differing:
            before = self._containers[index]
            now = self._containers[index] = _Container.of(before.held, before.place)
            if not before.has_same_parts(now):
                return False
        if differing:
            self._versions.note()
        self._arrays = [(array, array.copy(), place) for array, _, place in self._arrays]
        return True

    def changes(self, changed: Iterable[_Container]) -> list[StateChange]:
        """Return what is not as it was in ``changed`` containers and in arrays, by name."""
        changes = []
        for container in changed:
            is_state = _root_of(container.place) in ("optimizer", "scheduler")
            kind = "state" if is_state else "parameter" if _is_key(container.place[1], "_parameters") else "structure"
            changes += [StateChange(kind, self._path(place)) for place in container.changed_places()]
        return changes + [StateChange("structure", self._path(entry[2])) for entry in self._changed_arrays()]

    def restore(self, changed: Iterable[_Container]) -> dict[str, str]:
        """Put back the items of ``changed`` containers, the classes of objects, and the numbers of NumPy arrays.

        Return the names of arrays that could not be put back, and why.
        """
        for index in self._classes.differing():
            self._objects[index].__class__ = self._classes.before[index]
        for cls, attributes in self._own_classes:
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name in [name for name, own in attributes.items() if vars(cls).get(name) is not own]:
                setattr(cls, name, attributes[name])
        for container in changed:
            container.restore()
        lost = [self._path(place) for array, numbers, place in self._changed_arrays() if not _fill(array, numbers)]
        return dict.fromkeys(lost, "an array of another type or size")

    def _changed_arrays(self) -> list[tuple[Any, Any, _Place]]:
        return [entry for entry in self._arrays if not _is_same_array(entry[0], entry[1])]

    def name(self, index: int) -> str:
        """Return the name of a tensor: ``model.0.weight``."""
        return self._path(self.places[index])

    def _path(self, place: _Place) -> str:
        above, key = place
        if above is None:
            return str(key)
        if isinstance(key, Tensor):
            index = self.seen.get(id(key), -1)
            key = self.name(index) if index >= 0 else f"a tensor of shape {tuple(key.shape)}"
            return f"{self._path(above)}[{key}]"
        if not isinstance(key, str):
            return f"{self._path(above)}[{key!r}]"
        return self._path(above) if key in _INNER else f"{self._path(above)}.{key}"


def _category(value: Any) -> int:
    cls = type(value)
    if cls not in _CATEGORIES:
        _CATEGORIES[cls] = next((category for types, category in _TYPES if issubclass(cls, types)), _ATOM)
    return _CATEGORIES[cls]


def _root_of(place: _Place) -> str:
    while place[0] is not None:
        place = place[0]
    return str(place[1])


def _is_key(key: Any, name: str) -> bool:
    """Return whether a key is this name; for a key that is a tensor, ``==`` would compare numbers."""
    return isinstance(key, str) and key == name


def _is_record(value: Any) -> bool:
    """Return whether an object of a batch may have tensors for attributes: a dataclass, a ``BatchEncoding``."""
    return hasattr(value, "__dict__") and not isinstance(value, _NO_RECORDS)


def _why_not_saveable(tensor: Tensor) -> str:
    """Return why a tensor has no numbers of its own, as the end of a sentence; "" for one that can be saved."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    if is_plain and not tensor.is_meta and not _torch.transforms_active():
        return ""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no numbers yet, so there is nothing to save. Next: run the model once."
    if tensor.is_meta:
        return "is on the meta device, where nothing can be saved. Next: to_empty() gives it memory."
    if not _torch.has_numbers(tensor) or hasattr(type(_torch.own_part(tensor)), "__tensor_flatten__"):
        return f"is a {type(tensor).__name__} that stands for other tensors, which would not be saved. Next: unwrap it."
    return ""


def _is_equal(now: Any, before: Any) -> bool:
    """Return whether a value is the same object, or an equal number or text."""
    return now is before or (type(now) is type(before) and isinstance(now, int | float | str) and now == before)


def _is_ours(value: Any) -> bool:
    """Return whether a value is a hook in a table of torch that ``attach`` or the like put there: a class of ``sites``.

    Hooks that other folders register by torch's own functions (integrations/follow.py) are treated as those of a user.
    """
    return type(value).__module__.startswith("hookline.sites.")


def _is_same_array(now: Any, before: Any) -> bool:
    return bool(now.shape == before.shape and now.dtype == before.dtype and now.tobytes() == before.tobytes())


def _fill(array: Any, numbers: Any) -> bool:
    """Put the numbers back into an array; return False if its type or its size is another one now."""
    try:
        if array.shape != numbers.shape:
            array.resize(numbers.shape, refcheck=False)
        array.flags.writeable = True
        array[...] = numbers
    except ValueError:
        return False
    return bool(array.dtype == numbers.dtype)
