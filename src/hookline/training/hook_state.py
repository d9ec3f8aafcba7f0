"""What a manager looks after for its hooks between firings: their tensors, their saved state, reference weights.

Asked by `HookManager` around each firing and when a run is saved. Tensors come from ``get_state_tensors`` and go to
``set_state_tensors``; reference weights come from whoever makes the manager (a mapping, a function, the path of a
file) and go to hooks that declare ``needs_reference_weights``.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel
from hookline.sites.tree import rebuilt_tuple
from hookline.training.reference_weights import read_weights

if TYPE_CHECKING:
    from hookline.training.training_hook import TrainingHook

__all__ = ["Offload", "Reference", "copied"]

_CPU = torch.device("cpu")


class Offload:
    """Where the tensors of each hook belong, while they are on the CPU."""

    def __init__(self) -> None:
        # The devices are remembered here, not taken from the model: some points are fired without one.
        self._homes: WeakKeyDictionary[TrainingHook, list[torch.device]] = WeakKeyDictionary()
        self._brought: list[TrainingHook] = []

    def bring(self, hooks: Iterable[TrainingHook]) -> None:
        """Put the tensors of these hooks back where they were."""
        for hook in hooks:
            self._brought.append(hook)
            homes = self._homes.pop(hook, None)
            if homes is not None:
                hook.set_state_tensors(mapped(hook.get_state_tensors(), partial(_back, iter(homes))))

    def send(self) -> None:
        """Move the tensors of all hooks that were brought to the CPU."""
        while self._brought:
            hook = self._brought.pop()
            homes: list[torch.device] = []
            tensors = hook.get_state_tensors()
            moved = mapped(tensors, partial(_away, homes))
            if any(home != _CPU for home in homes):
                self._homes[hook] = homes
                hook.set_state_tensors(moved)


def _away(homes: list[torch.device], tensor: Tensor) -> Tensor:
    homes.append(tensor.device)
    return tensor.to(_CPU)


def _back(homes: Iterator[torch.device], tensor: Tensor) -> Tensor:
    return tensor.to(next(homes, tensor.device))


def mapped(value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """The same structure with every tensor changed, and whatever else is no container by ``other``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        same = copy.copy(value)  # a defaultdict stays one
        same.update({key: mapped(item, change, other) for key, item in value.items()})
        return same
    if isinstance(value, deque):
        return deque((mapped(item, change, other) for item in value), value.maxlen)
    if type(value) is list:
        return [mapped(item, change, other) for item in value]
    if isinstance(value, tuple):
        return rebuilt_tuple(value, [mapped(item, change, other) for item in value])
    return other(value)


def copied(value: Any) -> Any:
    """A copy that what the hook does next does not change; tensors stay on their device, without their graph."""
    return mapped(value, lambda tensor: tensor.detach().clone(), copy.deepcopy)


Source = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | str | os.PathLike[str] | None


class Reference:
    """Reference weights that are looked for once per run.

    A path may have places for what ``set_run_context`` says: ``"runs/{strategy}/final.pt"``.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: Mapping[str, Tensor] | None = None
        self._looked = False
        self._told = False

    def reset(self) -> None:
        """Another run begins: look again."""
        self._found, self._looked = None, False

    def weights(self, context: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
        """The weights, or None if there are none; why not is warned of once."""
        if not self._looked:
            self._looked = True
            try:
                self._found = self._look(context)
            except Exception as error:
                self._tell(error)
        return self._found

    def _look(self, context: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
        source: Any = self._source
        if isinstance(source, str | os.PathLike):
            source = read_weights(os.fspath(source).format(**context))
        elif callable(source):
            source = source()
        if isinstance(source, Mapping) and isinstance(source.get("model"), Mapping):
            source = source["model"]  # a checkpoint with other things beside
        return None if source is None else {name.removeprefix("_orig_mod."): value for name, value in source.items()}

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"The reference weights {self._source!r} could not be had ({type(error).__name__}: {error}); hooks "
                "that need them go without.",
                HooklineWarning,
                stacklevel=caller_stacklevel(),
            )
