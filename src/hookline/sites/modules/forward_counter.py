"""The model a hook was attached through: which of its forwards is running, and which call of a module this is.

Takes a tick from the counter module's first pre-hook, hands step and call numbers to sites and receipts.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from hookline.errors import HooklineWarning
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.hook_at_site import next_order

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import nn

    from hookline.sites.modules.module_hooks import ModuleHooks

__all__ = ["NO_MODEL", "ForwardCounter", "StandIn"]


class _ThreadForward(threading.local):
    """The forward that this thread is in; two threads on one model count apart."""

    step: int

    def __init__(self) -> None:
        self.step = -1
        self.training: bool | None = None
        """The mode that the model was in when its forward began; None before one has."""
        self.gradients = True
        """Whether gradients were on then."""
        self.by_part = False
        """Whether a call of a part began this step, because the model's own forward is not called."""
        self.order = -1
        """When it began, on the clock of ``entry.next_order``."""
        self.calls: dict[Any, int] = {}
        self._repeated: tuple[int, dict[Any, int]] = (-1, {})

    def calls_in(self, task: int) -> dict[Any, int]:
        """The counts of this forward, or, in a backward pass that repeats parts of it, counts of their own."""
        if task == -1:
            return self.calls
        if self._repeated[0] != task:
            self._repeated = (task, {})
        return self._repeated[1]


class ForwardCounter:
    """One per module that hooks were attached through, for as long as one of them is on."""

    __slots__ = ("_counter", "_pass", "leaves", "model", "stand_in", "step", "tables", "users")

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else lambda: None
        """The module, unless it is gone."""
        self.step = -1
        """The newest forward of any thread."""
        self.users = 0
        """How many attachments go through this counter."""
        self.tables: set[ModuleHooks] = set()
        """Of the modules that hooks were put on through this counter."""
        self.leaves: Callable[[], None] | None = None
        """Has hooks on parameters follow those that were replaced; there while there are such hooks."""
        self.stand_in: StandIn | None = None
        """The module whose calls begin the steps of a model whose own forward is not called, once it was looked for."""
        self._counter = itertools.count()
        self._pass = _ThreadForward()

    @property
    def here(self) -> Any:
        """Has, in each thread, the ``step`` that this thread is in: for whoever asks too often to call `moment`."""
        return self._pass

    def begin(self, gradients: bool | None = None, *, by_part: bool = False) -> None:
        """A forward of the counter begins in this thread, with `gradients` on; as they are now, if left out.

        With `by_part`, it is a call of a part that stands in for it.
        """
        if _torch.graph_task_id() != -1:
            return  # activation checkpointing repeats one
        current = self._pass
        current.step = self.step = next(self._counter)
        current.calls = {}
        current.by_part = by_part
        current.order = next_order()
        current.training = self.training_now()
        current.gradients = torch.is_grad_enabled() if gradients is None else gradients
        for table in tuple(self.tables):
            table.keep_places()
        if self.leaves is not None:
            self.leaves()
        recompile_guard.check_compiler()
        if _torch.capturing():
            _warn_captured(self.model())

    def mode(self) -> tuple[bool, bool]:
        """Return whether the forward that is under way began in training mode, and whether gradients were on then.

        Where parts of the model are called without it, its mode tells what they are called for: gradients may be off
        for one part alone (a frozen one, or one that is checkpointed).
        """
        current, training = self._pass, self.training_now()
        if current.training is training:
            return training, current.gradients
        return training, training or torch.is_grad_enabled()

    def training_now(self) -> bool:
        """Return whether the model is in training mode at this moment."""
        model = self.model()
        return model is None or model.training

    def find_stand_in(self) -> None:
        """Where a part of the model is called and its own forward is not, have the calls of that part begin steps."""
        if self.stand_in is None and _torch.graph_task_id() == -1:
            from hookline.sites.modules.uncalled_model import find_stand_in  # it attaches, which is above this

            find_stand_in(self)

    def moment(self, key: Hashable) -> tuple[int, int]:
        """The step of this thread and how often ``key`` came by in it before; counts it."""
        current = self._pass
        if current.step == -1:
            self.find_stand_in()
        calls = current.calls_in(_torch.graph_task_id())
        call = calls.get(key, 0)
        calls[key] = call + 1
        return current.step, call


class StandIn(NamedTuple):
    """What begins the steps of a model in its place."""

    name: str
    """Its name in the model."""
    module: Callable[[], nn.Module | None]
    """The module, unless it is gone."""
    remove: Callable[[], None]
    """Has its calls begin steps no longer."""


def _warn_captured(model: nn.Module | None) -> None:
    """Once in a process: nothing of ours will ever be called from what somebody is recording."""
    if not _WarnedCaptured.done:
        _WarnedCaptured.done = True
        warnings.warn(
            f"A forward of this {type(model).__name__} is being recorded as a CUDA graph: its replays call no hooks. "
            "Run it without the graph where hooks are to fire, or use torch.compile(mode='reduce-overhead'), which "
            "makes graphs around them.",
            HooklineWarning,
            stacklevel=2,
        )


class _WarnedCaptured:
    done = False


NO_MODEL: Final = ForwardCounter()
"""Stands for the model where there is none."""
