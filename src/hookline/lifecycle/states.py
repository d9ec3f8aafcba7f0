"""Talk to all hooks of a manager: start, reset, save and load them, and keep their tensors on the CPU between firings.

`HookManager` owns a `ManagedHooks`; `FiringEngine` brings the tensors of hooks back before it calls them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hookline.guard.rng import kept_rng
from hookline.tree import rebuilt_tuple

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.hook import TrainingHook

__all__ = ["ManagedHooks", "Offload", "copied", "map_tensors"]

_CPU = torch.device("cpu")


class ManagedHooks:
    """All hooks of a manager by name; random numbers that they draw here do not count."""

    def __init__(self, hooks: dict[str, TrainingHook], *, offload_state: bool) -> None:
        self.by_name = hooks
        self.offload = Offload() if offload_state else None

    def start(self, model: nn.Module, goes_on_after: Callable[[Exception], bool]) -> dict[str, Exception]:
        """Call ``start`` of every hook: training begins, or goes on; return the errors that the run goes on after."""
        failed = {}
        with kept_rng():
            for name, hook in self.by_name.items():
                try:
                    hook.start(model)
                except Exception as error:
                    error.add_note(f"Raised by the hook {name!r} when training began, in start(model).")
                    if not goes_on_after(error):
                        raise
                    failed[name] = error
        return failed

    def finish(self) -> None:
        """Call ``finish`` of every hook, the last first, also when another raises."""
        with kept_rng(), ExitStack() as stack:
            for hook in self.by_name.values():
                stack.callback(hook.finish)

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Call ``set_run_context`` of every hook."""
        with kept_rng():
            for hook in self.by_name.values():
                hook.set_run_context(**context)

    def reset(self, *, firing: bool) -> None:
        """Call ``reset`` of every hook: another run begins."""
        with self._on_device(firing):
            for hook in self.by_name.values():
                hook.reset()

    def state_dict(self, *, firing: bool) -> dict[str, Any]:
        """Return copies of the state of every hook, with tensors on the device where a resumed run must find them."""
        with self._on_device(firing):
            return {name: copied(hook.state_dict()) for name, hook in self.by_name.items()}

    def load_state_dict(self, states: Mapping[str, Any], *, firing: bool) -> None:
        """Load the states of hooks that are in `states`."""
        with self._on_device(firing):
            for name, hook in self.by_name.items():
                if name in states:
                    hook.load_state_dict(copied(states[name]))

    @contextmanager
    def _on_device(self, firing: bool) -> Iterator[None]:
        """Bring the tensors of all hooks back; outside of a firing, send them to the CPU afterwards."""
        with kept_rng():
            if self.offload is not None:
                self.offload.bring(self.by_name.values())
            try:
                yield
            finally:
                if self.offload is not None and not firing:
                    self.offload.send()


class Offload:
    """Move the tensors of hooks to the CPU and back."""

    def __init__(self) -> None:
        # The devices are remembered here, not taken from the model: some points are fired without one.
        self._homes: WeakKeyDictionary[TrainingHook, list[torch.device]] = WeakKeyDictionary()
        self._brought: list[TrainingHook] = []

    def bring(self, hooks: Iterable[TrainingHook]) -> None:
        """Move the tensors of these hooks back to where they were."""
        for hook in hooks:
            self._brought.append(hook)
            homes = self._homes.pop(hook, None)
            if homes is not None:
                hook.set_state_tensors(map_tensors(hook.get_state_tensors(), partial(_back, iter(homes))))

    def send(self) -> None:
        """Move the tensors of all hooks that were brought to the CPU."""
        while self._brought:
            hook = self._brought.pop()
            homes: list[torch.device] = []
            moved = map_tensors(hook.get_state_tensors(), partial(_away, homes))
            if any(home != _CPU for home in homes):
                self._homes[hook] = homes
                hook.set_state_tensors(moved)


def _away(homes: list[torch.device], tensor: Tensor) -> Tensor:
    homes.append(tensor.device)
    return tensor.to(_CPU)


def _back(homes: Iterator[torch.device], tensor: Tensor) -> Tensor:
    return tensor.to(next(homes, tensor.device))


def map_tensors(value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return the same structure with `change` applied to every tensor, and `other` to whatever is no container."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        same = copy.copy(value)  # a defaultdict stays one
        same.update({key: map_tensors(item, change, other) for key, item in value.items()})
        return same
    if isinstance(value, deque):
        return deque((map_tensors(item, change, other) for item in value), value.maxlen)
    if type(value) is list:
        return [map_tensors(item, change, other) for item in value]
    if isinstance(value, tuple):
        return rebuilt_tuple(value, [map_tensors(item, change, other) for item in value])
    return other(value)


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with `value`; tensors stay on their device, without their graph."""
    return map_tensors(value, lambda tensor: tensor.detach().clone(), copy.deepcopy)
