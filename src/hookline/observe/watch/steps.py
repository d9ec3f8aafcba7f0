"""Count the steps of a watch, and decide which passes through the model count.

A step is a step of the optimizer. `OptimizerSteps` tells `Watch`, and a trace, of each; `Steps` counts them. The hooks
of a watch enter each forward by `Passes`, which decides about it once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer

from hookline.errors import OptionError
from hookline.phases import During, phase
from hookline.sites import _torch
from hookline.sites.everywhere import attach_everywhere
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import NO_MODEL, ForwardCounter
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BY_FORWARD", "BY_HAND", "BY_OPTIMIZER", "OptimizerSteps", "Passes", "Steps"]

BY_FORWARD: Final = "one forward of the model, until an optimizer steps"
BY_OPTIMIZER: Final = "the optimizer's step"
BY_HAND: Final = "watch.step()"
_STATE: Final = ("what", "count", "is_due", "last_look", "_has_begun")
"""What a resumed watch has to know of its steps."""


class OptimizerSteps:
    """Calls `on_step` with an optimizer once for each of its steps, when gradients are final.

    That is just before the step; just after, where a closure makes the gradients in it.

    Args:
        given: The optimizers; None for every one that holds parameters of `model`.
        on_step: What is called.
        model: The model; of no account where optimizers are given.
    """

    def __init__(
        self,
        given: Optimizer | Sequence[Optimizer] | None,
        on_step: Callable[[Optimizer], None],
        model: nn.Module | None = None,
    ) -> None:
        self._on_step = on_step
        self._model = model if given is None else None
        self._holds: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Of optimizers that have stepped, whether they count."""
        self._handles = HandleSet()
        listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if not listed:
            raise OptionError("optimizer= is an empty list; leave it out, or give the optimizers whose steps count.")
        for kind, is_before in (("step_pre", True), ("step_post", False)):
            hook = _hook_for(weakref.ref(self), is_before)
            if given is None:
                self._handles.add(attach_everywhere(hook, on=kind, observe=is_before, name="watch"))
                continue
            for each in listed:
                inner = unwrap_optimizer(each)  # hooks are called with the optimizer that is inside a wrapper
                self._handles.add(attach_optimizer(inner, hook, on=kind, observe=is_before, name="watch"))
        weakref.finalize(self, self._handles.remove, quiet=True)

    def note(self, optimizer: Optimizer) -> None:
        """Tell of a step."""
        if optimizer not in self._holds:
            own = set() if self._model is None else set(map(id, self._model.parameters()))
            held = (id(each) for group in optimizer.param_groups for each in group["params"])
            self._holds[optimizer] = self._model is None or not own.isdisjoint(held)
        if self._holds[optimizer]:
            self._on_step(optimizer)

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)


def _hook_for(steps: Callable[[], OptimizerSteps | None], is_before: bool) -> Callable[[Optimizer, Any, Any], None]:
    """Return a hook on optimizers; it does not keep `steps`, and with it a watch and its model, alive."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = steps()
        has_closure = any(callable(each) for each in (*args, *kwargs.values()))
        if found is not None and is_before is not has_closure:
            found.note(optimizer)

    return hook


class Steps:
    """Counts the steps of one watch by a schedule.

    A step is one of the optimizer; of several, of the one that is ahead of the others. Until one has stepped, each
    forward that counts is a step. Once the user calls ``watch.step()``, that alone ends a step.
    """

    def __init__(self, begin: Callable[[int], bool]) -> None:
        self._begin = begin
        """Called with each step when it begins; returns whether it is due."""
        self.restart(BY_FORWARD)

    def restart(self, what: str) -> None:
        """Count from 0: no step has been made, and `what` is one, in words."""
        self.what = what
        """What a step is: `BY_FORWARD`, `BY_OPTIMIZER` or `BY_HAND`."""
        self.count = 0
        """How many steps are over."""
        self.is_due = self._begin(0)
        """Whether the step that is under way is due."""
        self.last_look: int | None = None
        """The newest step that is over and was due."""
        self._was_due = False
        self._has_begun = False
        """Whether a forward has begun, where that is a step."""
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The step that each optimizer makes next."""

    @property
    def needs_hooks(self) -> bool:
        """Whether hooks are to be on now. Forwards begin too late to put them on: those are passed over instead."""
        return self.is_due or self.what == BY_FORWARD

    def advance(self) -> None:
        """Count one more step."""
        self._was_due = self.is_due
        self.last_look = self.count if self.is_due else self.last_look
        self.count += 1
        self.is_due = self._begin(self.count)

    def begin_forward(self) -> None:
        """Count a forward that begins, where it is a step; the one before is over then."""
        if self.what == BY_FORWARD:
            if self._has_begun:
                self.advance()
            self._has_begun = True

    def is_due_for(self, optimizer: Optimizer) -> bool:
        """Return whether the step that an optimizer makes now is due; of one that is behind, the step before."""
        return self.is_due if self._step_of(optimizer) == self.count else self._was_due

    def count_step_of(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer, unless another one has ended that step."""
        step = self._step_of(optimizer)
        if step == self.count:
            self.advance()
        self._made[optimizer] = step + 1

    def _step_of(self, optimizer: Optimizer) -> int:
        """Return the step that an optimizer makes now; a new one has a part in the step that another has ended."""
        return min(self._made.get(optimizer, self.count - bool(self._made)), self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._made.clear()
        for name in _STATE:
            setattr(self, name, state[name])


class _Decision(threading.local):
    """What this thread's forward was decided to be."""

    which: tuple[int, bool] | None = None
    """When the forward began, and the mode of the model."""
    counts = False


class Passes:
    """Decides by schedule, pauses and ``during=`` whether a pass through `model` counts."""

    def __init__(self, model: nn.Module, during: During, steps: Steps) -> None:
        self.during = during
        self.steps = steps
        self.paused = 0
        """How many ``paused()`` blocks are open."""
        self.counter: ForwardCounter = NO_MODEL
        """Counts the forwards of the model while hooks are on it."""
        self.on_forward: Callable[[], None] = lambda: None
        """Called when a forward that counts begins; a monitor of steps sets it."""
        self.in_parts = False
        """Whether parts of the model were called without it."""
        self._model = model
        self._forward = _Decision()
        self._backward = -1, False
        """The last backward pass, and whether it counts."""

    def enter_forward(self) -> bool:
        """Return whether an output of the forward under way counts; the first one of a forward has that decided.

        A part that is called after the model's mode was changed is decided about anew.
        """
        if _torch.graph_task_id() != -1 and _torch.in_recomputation():  # it was counted the first time
            return False
        counter, decision = self.counter, self._forward
        if counter.here.step == -1:
            counter.find_stand_in()
        which = counter.here.order, self._model.training
        if decision.which != which:
            decision.which = which
            self.in_parts = self.in_parts or counter.here.by_part
            decision.counts = self.during.count_forward(*counter.mode(), which)
            if decision.counts:
                self.on_forward()
                self.steps.begin_forward()
        return decision.counts and self.steps.is_due and not self.paused

    def enter_backward(self) -> bool:
        """Return whether the gradients of the backward pass under way count; that is decided once."""
        task = _torch.graph_task_id()
        if task == -1 or self._backward[0] != task:
            is_due = self.steps.is_due and not self.paused
            self._backward = task, is_due and self.during.counts_backward(self._model.training)
        return self._backward[1]

    def counts_now(self) -> bool:
        """Return whether a value of the user's, or a step of an optimizer, counts now, whatever the model's mode."""
        return not self.paused and phase() in self.during.phases
