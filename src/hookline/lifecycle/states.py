"""Talk to all hooks of a manager: start, reset, save and load them, and keep their tensors on the CPU between firings.

`HookManager` owns a `ManagedHooks`, and enters `on_device` around each firing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hookline.guard.rng import kept_rng
from hookline.tree import map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.hook import TrainingHook

__all__ = ["ManagedHooks", "copied"]

_CPU: Final = torch.device("cpu")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class ManagedHooks:
    """All hooks of a manager by name; random numbers that they draw here do not count."""

    def __init__(self, hooks: Mapping[str, TrainingHook], *, offload: bool) -> None:
        self._hooks = hooks
        self.offloads = offload
        """Whether tensors of hooks wait on the CPU between firings."""
        # The devices are remembered here, not taken from the model: some points are fired without one.
        self._homes: WeakKeyDictionary[TrainingHook, list[torch.device]] = WeakKeyDictionary()
        self._brought: list[TrainingHook] = []
        self._depth = 0

    def start(self, model: nn.Module, goes_on_after: Callable[[Exception], bool]) -> dict[str, Exception]:
        """Call ``start`` of every hook: training begins, or goes on; return the errors that the run goes on after."""
        failed = {}
        with kept_rng():
            for name, hook in self._hooks.items():
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
            for hook in self._hooks.values():
                stack.callback(hook.finish)

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Call ``set_run_context`` of every hook."""
        with kept_rng():
            for hook in self._hooks.values():
                hook.set_run_context(**context)

    def reset(self) -> None:
        """Call ``reset`` of every hook: another run begins."""
        with kept_rng(), self.on_device(self._hooks.values()):
            for hook in self._hooks.values():
                hook.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state of every hook, with tensors on the device where a resumed run must find them."""
        with kept_rng(), self.on_device(self._hooks.values()):
            return {name: copied(hook.state_dict()) for name, hook in self._hooks.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the states of hooks that are in `states`."""
        with kept_rng(), self.on_device(self._hooks.values()):
            for name, hook in self._hooks.items():
                if name in states:
                    hook.load_state_dict(copied(states[name]))

    # -- tensors that wait on the CPU ------------------------------------------------------------------------

    def on_device(self, hooks: Iterable[TrainingHook]) -> AbstractContextManager[None]:
        """Return a context in which the tensors of `hooks` are where they were; after the outermost, on the CPU."""
        return self._moved(hooks) if self.offloads else _NOTHING

    @contextmanager
    def _moved(self, hooks: Iterable[TrainingHook]) -> Iterator[None]:
        self._depth += 1
        try:
            for hook in hooks:
                self._brought.append(hook)
                homes = self._homes.pop(hook, None)
                if homes is not None:
                    hook.set_state_tensors(map_tensors(hook.get_state_tensors(), partial(_back, iter(homes))))
            yield
        finally:
            self._depth -= 1
            while self._brought and not self._depth:
                self._send(self._brought.pop())

    def _send(self, hook: TrainingHook) -> None:
        homes: list[torch.device] = []
        moved = map_tensors(hook.get_state_tensors(), partial(_away, homes))
        if any(home != _CPU for home in homes):
            self._homes[hook] = homes
            hook.set_state_tensors(moved)


def _away(homes: list[torch.device], _: str, tensor: Tensor) -> Tensor:
    homes.append(tensor.device)
    return tensor.to(_CPU)


def _back(homes: Iterator[torch.device], _: str, tensor: Tensor) -> Tensor:
    return tensor.to(next(homes, tensor.device))


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with `value`; tensors stay on their device, without their graph."""
    return map_tensors(value, lambda _, tensor: tensor.detach().clone(), copy.deepcopy)
