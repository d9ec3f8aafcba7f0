"""Train once from a fixed start, with some hooks on or with none.

`audit` and its bisection call `Trainings.train`, which returns what was recorded. The random streams and the switches
of torch are set back before every training, so that all of them begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookline.debug.audit.audited_hook import (
    AuditedHook,
    follow_with,
    needed_arguments,
    put_around,
    put_on_model,
)
from hookline.debug.audit.run_state import Difference
from hookline.debug.audit.step_recorder import EnoughSteps, StepRecorder
from hookline.errors import OptionError
from hookline.guard.rng import RandomStates, restart_hook_stream
from hookline.guard.torch_switches import TorchSwitches
from hookline.integrations.first_step import FirstStep

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager

__all__ = ["Training", "Trainings", "did_nothing", "takes_hooks"]


@dataclass(frozen=True)
class Training:
    """What was recorded of one training."""

    recorded: StepRecorder
    error: Exception | None

    def difference(self, other: Training, *, with_batch: bool = False) -> Difference | None:
        """Return where ``other`` first differs from this one, an error that it raised included; None if nowhere."""
        found = self.recorded.difference(other.recorded, with_batch=with_batch)
        if other.error is None:
            return found
        step = len(other.recorded.states)
        if found is None or found.step >= step:
            return Difference(step, (f"error: {type(other.error).__name__}: {other.error}",))
        return found


class Trainings:
    """Train any number of times from the start at which this was made.

    Args:
        train_fn: What trains; called without arguments, or with the list of hooks.
        steps: After how many steps a training is stopped; None: not at all.
    """

    def __init__(self, train_fn: Callable[..., Any], *, steps: int | None) -> None:
        self._train_fn = train_fn
        self._steps = steps
        self._by_training = takes_hooks(train_fn)
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]  # streams that begin later could not be set back
        self._streams = RandomStates()
        self._switches = TorchSwitches()
        self.count = 0
        """How often was trained."""
        self.silent: set[str] = set()
        """Lifecycle hooks that did not fire when they were last on."""

    def set_back(self) -> None:
        """Set random streams and switches back to the start."""
        self._switches.restore()
        self._streams.restore()
        restart_hook_stream()

    def train(self, hooks: Sequence[AuditedHook] = (), reference: Training | None = None) -> Training:
        """Train with ``hooks``; stop at the first step that differs from ``reference``, if that is given.

        An error is part of the result if there are hooks; without them it is raised.
        """
        self.count += 1
        self.set_back()
        stack = ExitStack()
        recorder = self._recorder(hooks, reference, stack)
        error: Exception | None = None
        try:
            with recorder:
                # What hooks do when they are taken off belongs to the run too, also where that was stopped.
                with suppress(EnoughSteps), stack:
                    self._put_around(hooks, recorder, stack)
                    self._call_training(hooks)
                recorder.finish()
        except Exception as raised:
            if not hooks:
                raised.add_note("train_fn raised this without any hooks; audit() needs one that trains.")
                raise
            error = raised
        if error is None:
            self._check(recorder, hooks)
        return Training(recorder, error)

    def _call_training(self, hooks: Sequence[AuditedHook]) -> None:
        """Train; ``sys.exit()`` and ``sys.exit(0)`` are an end like any other, as in a script."""
        try:
            self._train_fn(*([[hook.fresh() for hook in hooks]] if self._by_training else ()))
        except SystemExit as left:
            if left.code not in (None, 0):
                raise OptionError(
                    f"The training called sys.exit({left.code!r}), which says that it failed. Next: run it without "
                    "audit(), and see why; let train_fn return where it is done."
                ) from left

    def _recorder(self, hooks: Sequence[AuditedHook], reference: Training | None, stack: ExitStack) -> StepRecorder:
        def begin(model: nn.Module, optimizer: Optimizer) -> None:
            for hook in hooks:
                put_on_model(hook, model, optimizer, stack)

        return StepRecorder(begin, steps=self._steps, reference=None if reference is None else reference.recorded)

    def _put_around(self, hooks: Sequence[AuditedHook], recorder: StepRecorder, stack: ExitStack) -> None:
        """Put on what is there before the model is; lifecycle hooks begin at the first step, when all is known."""
        lifecycle = [hook for hook in hooks if hook.way == "lifecycle"]

        def begin(optimizer: Any, first: FirstStep) -> bool:
            if recorder.model is None:
                return False
            run = follow_with(lifecycle, recorder.model, optimizer, first)
            stack.callback(self._note_silent, run.manager)
            stack.push(run)
            return True

        if lifecycle:
            stack.callback(FirstStep(begin).remove)
        for hook in hooks:
            put_around(hook, stack)

    def _note_silent(self, manager: HookManager) -> None:
        for name in manager.hooks:
            (self.silent.add if did_nothing(manager, name) else self.silent.discard)(name)

    def _check(self, recorder: StepRecorder, hooks: Sequence[AuditedHook]) -> None:
        if not recorder.states:
            raise OptionError(
                "train_fn made no step of a torch.optim.Optimizer in this process: there is nothing to compare. Next: "
                "let train_fn train, not only define how, and let it make its steps here."
            )
        if hooks and not self._by_training and not recorder.has_begun:
            raise OptionError(
                "No module has the parameters that the optimizer of train_fn trains: audit() cannot put hooks on one. "
                "Next: write train_fn(hooks), which gets the hooks and puts them on itself."
            )


def did_nothing(manager: HookManager, name: str) -> bool:
    """Return whether a hook has not fired, or has turned itself off because there was nothing to measure."""
    return not manager.hooks.fired[name] or bool(getattr(manager.hooks[name], "off", ""))


def takes_hooks(train_fn: Callable[..., Any]) -> bool:
    """Return whether a function needs an argument: the list of the hooks to train with."""
    return needed_arguments(train_fn) > 0
