"""Find what an experiment has besides its model that belongs to the run, and put its attributes back.

A user's own step may use two optimizers, average the weights into a second model, count tokens, draw from a
generator; interventions train by that step. `Contexts` gives the guard what `ExtraState` finds, and puts the plain
attributes back after a firing.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookline.errors import GuardError
from hookline.guard.rng import GENERATOR_TYPES

if TYPE_CHECKING:
    from hookline.training.experiment_adapter import ExperimentAdapter

__all__ = ["AttributeSnapshot", "ExtraState"]

_WITH_GRADIENTS: Final = (nn.Module, nn.Parameter, Optimizer)
_SMALL: Final = (LRScheduler, torch.amp.GradScaler, *GENERATOR_TYPES)
_LARGEST_COPIED: Final = 2**20
"""Numbers in a tensor on the experiment that is copied: more are likely data, which nobody writes to."""


class _Together:
    """Hold several objects as attributes of one, which the guard looks through."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        vars(self).update(parts)


class ExtraState:
    """Find the experiment's own optimizers, modules, schedulers, generators and small tensors."""

    def __init__(self, adapter: ExperimentAdapter) -> None:
        self._adapter = adapter
        self._kept: dict[str, _Together] = {}

    @property
    def optimizer(self) -> Any:
        """The optimizer, or it and whatever else has parameters."""
        return self._joined("optimizer", self._adapter.optimizer, self._found(_WITH_GRADIENTS))

    @property
    def scheduler(self) -> Any:
        """The scheduler, or it and whatever else is small."""
        return self._joined("scheduler", self._adapter.scheduler, self._found(_SMALL) | self._small_tensors())

    @property
    def all_but_optimizer(self) -> Any:
        """The scheduler and everything that was found, where the optimizer itself has to be handed over alone."""
        found = self._found((*_WITH_GRADIENTS, *_SMALL)) | self._small_tensors()
        return self._joined("all", self._adapter.scheduler, found)

    def _joined(self, which: str, first: Any, others: dict[str, Any]) -> Any:
        """Return the same object as last time if its parts are the same: the guard keeps its memory by that."""
        if not others:
            return first
        parts = {**others, "itself": first}
        kept = self._kept.get(which)
        if kept is None or not _are_same(vars(kept), parts):
            kept = self._kept[which] = _Together(parts)
        return kept

    def _found(self, kinds: tuple[type, ...]) -> dict[str, Any]:
        items = [*self._used().items(), *self._attributes()]
        return {name: value for name, value in items if any(map(self._is_new, _of_kinds(value, kinds)))}

    def _is_new(self, item: Any) -> bool:
        """Return whether the guard does not know it anyway, and there is something to save in it."""
        adapter = self._adapter
        if item is adapter.model or item is adapter.optimizer or item is adapter.scheduler or item is adapter.scaler:
            return False
        if not isinstance(item, nn.Module):
            return True
        has_state = any(True for _ in itertools.chain(item.parameters(), item.buffers()))  # a criterion has none
        return has_state and all(item is not module for module in adapter.model.modules())

    def _small_tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._attributes() if isinstance(value, Tensor) and _is_copied(value)}

    def _attributes(self) -> Iterable[tuple[str, Any]]:
        loader = self._adapter.loader  # may be a list of batches
        return [item for item in getattr(self._adapter.experiment, "__dict__", {}).items() if item[1] is not loader]

    def _used(self) -> dict[str, Any]:
        """Return what the experiment's own functions use from around them."""
        functions = (getattr(self._adapter.experiment, name, None) for name in ("train_step", "loss_fn"))
        return {name: value for function in functions for name, value in _taken_from_outside(function).items()}


def _taken_from_outside(function: Any) -> dict[str, Any]:
    """Return the variables of a function that are neither arguments nor its own; not those of what it calls."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or function.__module__.startswith("hookline."):
        return {}
    try:
        outside = inspect.getclosurevars(function)
    except ValueError:  # a variable that has no value yet
        return {}
    return {**outside.globals, **outside.nonlocals}


def _of_kinds(value: Any, kinds: tuple[type, ...]) -> Iterable[Any]:
    """Return the value, or what is in it, as far as it is of some kinds."""
    if isinstance(value, (list, tuple, dict)):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    else:
        items = (value,)
    return (item for item in items if isinstance(item, kinds))


def _is_copied(tensor: Tensor) -> bool:
    return tensor.numel() <= _LARGEST_COPIED and not tensor.is_inference()


def _are_same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


class AttributeSnapshot:
    """Remember the experiment's plain attributes: which objects, and the contents of lists and dictionaries."""

    def __init__(self, adapter: ExperimentAdapter) -> None:
        self._there: dict[str, Any] = getattr(adapter.experiment, "__dict__", {})
        self._saved = dict(self._there)
        self._containers = [
            (value, value.copy())
            for value in self._saved.values()
            if isinstance(value, (list, dict, set, deque)) and value is not adapter.loader
        ]
        self._large = {
            name: (value, value._version)
            for name, value in self._saved.items()
            if isinstance(value, Tensor) and not value.is_inference() and not _is_copied(value)
        }

    def put_back(self) -> None:
        """Restore the attributes of the experiment."""
        self._there.clear()
        self._there.update(self._saved)
        for container, before in self._containers:
            _put_back(container, before)
        for name, (tensor, version) in self._large.items():
            if tensor._version != version:
                raise GuardError(
                    f"An intervention has changed experiment.{name}, of which no copy was taken, as it has "
                    f"{tensor.numel():,} numbers. Next: make it a buffer of the model."
                )


def _put_back(container: Any, before: Any) -> None:
    """Restore a container in place: others may refer to it."""
    if isinstance(container, (list, deque)):
        if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
            container.clear()
            container.extend(before)
    else:
        container.clear()
        container.update(before)
