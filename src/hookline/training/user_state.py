"""Save what an experiment has of its own, and load it again.

`Saving` calls it. Saved are other optimizers, modules, schedulers, generators, whatever has a ``state_dict()``, and
plain attributes (counters, lists, tensors) that have changed since the run began. An experiment that has
``state_dict()`` and ``load_state_dict()`` itself is asked instead.
"""

from __future__ import annotations

import enum
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hookline.checkpoint_file import to_savable
from hookline.errors import CheckpointError, HooklineWarning, ResumeError
from hookline.guard import rng
from hookline.guard.loaders import generators_of_loader
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.messages import caller_stacklevel
from hookline.records.readers import FanOut
from hookline.records.sink import MetricSink
from hookline.training.experiment_adapter import ExperimentAdapter
from hookline.training.extra_state import ExtraState
from hookline.training.model_state import (
    ModelState,
    check_state,
    generator_states,
    has_state,
    load_state,
    set_generators,
    state_of,
)

__all__ = ["UserState"]

_CONTAINERS: Final = (list, dict, set, deque)
_OF_MANAGERS: Final = (HookManager, TrainingHook, MetricSink, FanOut)
"""What a manager saves."""
_LARGEST: Final = 100_000
"""Items of a list or dictionary that is looked through; more are likely data, told by their number alone."""
_DEEPEST: Final = 20
_OTHERS: Final = (*_OF_MANAGERS, Tensor, np.ndarray, DataLoader, Dataset, type, enum.Enum, ModuleType)
"""What has attributes, and is not a user's plain object."""
_BLOCKS: Final = frozenset({"model", "optimizer", "scheduler", "scaler", "loader", "config"})


class UserState:
    """Save and load an experiment's own attributes."""

    def __init__(self, adapter: ExperimentAdapter) -> None:
        self._adapter = adapter
        self._experiment = adapter.experiment
        self._asked = has_state(self._experiment)
        self._warned: set[str] = set()
        self._marks = {} if self._asked else {name: _mark(value) for name, value in self._attributes()}
        """What each attribute was when the run began."""
        self._modules = {
            id(thing): _mark_of_module(thing) for thing in self._live().values() if isinstance(thing, nn.Module)
        }

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        held = getattr(self._experiment, "__dict__", {})
        return ((name, value) for name, value in list(held.items()) if name not in _BLOCKS)

    def _things(self) -> Iterator[tuple[str, Any]]:
        """Yield attributes, and what the experiment's functions use from around them, by name."""
        yield from self._attributes()
        extra_state = ExtraState(self._adapter)
        yield from ((f"of functions: {name}", value) for name, value in extra_state._used().items())

    def generators(self) -> list[Any]:
        """Return the experiment's own generators, in an order that is the same in every process."""
        found = [thing for _, value in self._things() for _, thing in _stateful(value)]
        return [thing for thing in found if isinstance(thing, rng.GENERATOR_TYPES)]

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Return the state, without copying."""
        if self._asked:
            return {"asked": self._experiment.state_dict()}
        stateful = {
            f"{name}{place}": _saved(thing)
            for name, value in self._things()
            for place, thing in _stateful(value)
            if self._is_own(thing)
        }
        changed = {name: value for name, value in self._attributes() if self._is_changed(name, value)}
        objects = {name: dict(vars(value)) for name, value in changed.items() if self._is_same_object(name, value)}
        plain = {name: value for name, value in changed.items() if name not in objects}
        return {"stateful": stateful, "plain": self._savable(plain), "objects": self._savable(objects)}

    def _savable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self._check_savable(name, value)}

    def _is_same_object(self, name: str, value: Any) -> bool:
        """Return whether it was there when the run began, so that contents can be put into it again."""
        return _is_object(value) and name in self._marks and self._marks[name][0] == _Same(value)

    def _is_own(self, thing: Any) -> bool:
        """Return whether nothing else saves it, and it may have changed."""
        adapter = self._adapter
        if any(thing is known for known in (adapter.model, adapter.optimizer, adapter.scheduler, adapter.scaler)):
            return False
        if thing is adapter.loader or thing is adapter.current_loader or isinstance(thing, _OF_MANAGERS):
            return False
        if not isinstance(thing, nn.Module):
            return True
        if any(thing is part for part in adapter.model.modules()):
            return False
        # A frozen teacher, or a criterion, is what it was; an average of weights may be frozen too, but is written to.
        return _trains(thing) or self._modules.get(id(thing)) != _mark_of_module(thing)

    def _is_changed(self, name: str, value: Any) -> bool:
        if next(iter(_stateful(value)), None) is not None or callable(value):
            return False
        return name not in self._marks or self._marks[name] != _mark(value)

    def _check_savable(self, name: str, value: Any) -> bool:
        try:
            to_savable(value, name)
        except CheckpointError as error:
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"experiment.{name} has changed since the run began, and is not saved ({error}) A resumed run "
                    "finds it as it was made. Give the experiment state_dict() and load_state_dict() if it matters.",
                    HooklineWarning,
                    stacklevel=caller_stacklevel(),
                )
            return False
        return True

    # -- loading -----------------------------------------------------------------------------------------------

    def check(self, saved: Mapping[str, Any], *, force: bool = False) -> None:
        """Refuse a saved state that does not fit; load nothing."""
        if ("asked" in saved) is not self._asked:
            raise ResumeError("The experiment was saved by its own state_dict(), or is now; it has to be as it was.")
        live = self._live()
        missing = sorted(name for name in saved.get("stateful", {}) if name not in live)
        if missing:
            raise ResumeError(
                f"The checkpoint has the state of what is not there: experiment.{', experiment.'.join(missing)}. "
                "Nothing was loaded."
            )
        for name, state in saved.get("stateful", {}).items():
            if isinstance(live[name], nn.Module):
                ModelState(live[name], f"module experiment.{name}").check(state["module"], force=force)
            elif "state" in state:
                check_state(live[name], state["state"], f"experiment.{name}", force=force)

    def _live(self) -> dict[str, Any]:
        if self._asked:
            return {}
        return {f"{name}{place}": thing for name, value in self._things() for place, thing in _stateful(value)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the experiment to a saved state, in place where others may refer to what it has."""
        if self._asked:
            self._experiment.load_state_dict(saved["asked"])
            return
        live = self._live()
        for name, state in saved["stateful"].items():
            _load(live[name], state, name)
        for name, value in saved["plain"].items():
            if not _put_in_place(vars(self._experiment).get(name), value):
                setattr(self._experiment, name, value)
        for name, value in saved["objects"].items():
            live = vars(self._experiment).get(name)
            if _is_object(live):
                vars(live).update(value)


def _stateful(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what has a state in a value, and its place: itself, or items of lists, tuples and dictionaries."""
    if isinstance(value, DataLoader):  # to ask one that can tell its state would start it
        for number, generator in enumerate(generators_of_loader(value)):
            yield f"{place} generator {number}", generator
    elif isinstance(value, rng.GENERATOR_TYPES) or (has_state(value) and not isinstance(value, type)):
        yield place, value
    elif isinstance(value, (list, tuple, dict)) and len(value) <= _LARGEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if not isinstance(item, (int, float, str, Tensor)):
                yield from _stateful(item, f"{place}[{key!r}]")


def _trains(module: nn.Module) -> bool:
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    return any(part.training and part._buffers for part in module.modules())  # batch norm, which leaves no mark


def _mark_of_module(module: nn.Module) -> Any:
    return [_mark(tensor) for held in (module.parameters(), module.buffers()) for tensor in held]


def _saved(thing: Any) -> dict[str, Any]:
    if isinstance(thing, nn.Module):
        return {"module": ModelState(thing).save(gradients=True)}
    if isinstance(thing, rng.GENERATOR_TYPES):
        return {"generator": generator_states([thing])[0]}
    return {"state": state_of(thing, "the experiment")}


def _load(thing: Any, state: Mapping[str, Any], name: str) -> None:
    if "module" in state:
        ModelState(thing, name).load(state["module"])
    elif "generator" in state:
        set_generators([thing], [state["generator"]], f"experiment.{name}")
    else:
        load_state(thing, state["state"])


def _put_in_place(live: Any, value: Any) -> bool:
    """Put saved contents into the live object; return whether that was possible."""
    if isinstance(live, Tensor) and isinstance(value, Tensor):
        if live.shape != value.shape or live.dtype != value.dtype or live.is_inference():
            return False
        with torch.no_grad():
            live.copy_(value)
        return True
    if isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and live.shape == value.shape:
        live[...] = value
        return True
    if type(live) is not type(value) or not isinstance(live, _CONTAINERS):
        return False
    live.clear()
    (live.extend if isinstance(live, (list, deque)) else live.update)(value)
    return True


# -- what something was ----------------------------------------------------------------------------------------


class _Same:
    """Compare equal only to another that holds the very same object."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]


def _is_object(value: Any) -> bool:
    """Return whether it is an instance with attributes (a dataclass, a namespace) that nothing else saves."""
    if isinstance(value, (*_OTHERS, *_CONTAINERS, tuple)) or not hasattr(value, "__dict__") or callable(value):
        return False
    return not has_state(value) and not type(value).__module__.startswith("hookline.")


def _mark(value: Any, depth: int = 0) -> Any:
    """Return a mark that stays equal as long as the value has not changed."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return (type(value), value)
    if isinstance(value, Tensor):
        return (_Same(value), None if value.is_inference() else value._version)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return (_Same(value), zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data) if value.size else 0)
    if _is_object(value) and depth <= _DEEPEST:
        inside = {name: _mark(item, depth + _DEEPEST // 2) for name, item in vars(value).items()}
        return (_Same(value), inside)
    if not isinstance(value, (*_CONTAINERS, tuple)) or depth > _DEEPEST:
        return _Same(value)
    if len(value) > _LARGEST:
        return (_Same(value), len(value))
    if isinstance(value, dict):
        return (dict, [(_mark(key, depth + 1), _mark(item, depth + 1)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return (set, set(value))
    return (type(value), [_mark(item, depth + 1) for item in value])
