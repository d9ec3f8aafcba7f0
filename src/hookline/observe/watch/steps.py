"""Count the steps of a watch, and decide which passes through the model count.

`Watch` makes one `Steps` and one `Passes`. A pre-hook of the model has `Passes` decide once for each forward; the hooks
on modules read the answer. `OptimizerSteps` tells both, and a trace, when an optimizer steps.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch.optim import Optimizer

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel, type_name
from hookline.phases import During, known_phase, phase
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import NO_MODEL, ForwardCounter
from hookline.sites.modules.attach_everywhere import attach_everywhere
from hookline.sites.modules.module_hooks import existing_hooks
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.watch.budget import BudgetedSchedule
    from hookline.observe.watch.place import WatchedPlace

__all__ = [
    "BY_FORWARD",
    "BY_HAND",
    "BY_OPTIMIZER",
    "ForwardDecision",
    "OptimizerSteps",
    "OptimizersOf",
    "Passes",
    "Schedule",
    "Steps",
]

Schedule: TypeAlias = "StepSchedule | BudgetedSchedule"
"""Says which steps are due; asked once for each, when it begins."""
BY_FORWARD: Final = "one forward of the model; in training, one step of the optimizer"
BY_OPTIMIZER: Final = "the optimizer's step"
BY_HAND: Final = "watch.step()"
_MOST_WAITING: Final = 16
"""How often another optimizer may step before the one that was met last counts as out of use: a critic steps five times
for each step of its generator."""


class OptimizerSteps:
    """Calls `before` ahead of each step of an optimizer, and `over` after the last one's.

    Args:
        given: The optimizers whose steps count.
        before: Called with the optimizer when gradients are final: after the step, if a closure makes them in it.
        over: Called when the last optimizer has made its step.
    """

    def __init__(
        self, given: Optimizer | Sequence[Optimizer], before: Callable[[Optimizer], None], over: Callable[[], None]
    ) -> None:
        self._before, self._over = before, over
        self._handles = HandleSet()
        listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if not listed:
            raise OptionError("optimizer= is an empty list; leave it out, or give the optimizers whose steps count.")
        optimizers = [unwrap_optimizer(each) for each in listed]  # hooks are called with the one inside
        self._last: Callable[[], Any] = lambda: optimizers[-1]
        for each in optimizers:
            self._handles.add(attach_optimizer(each, self._begin, on="step_pre", observe=True, name="watch"))
            self._handles.add(attach_optimizer(each, self._end, on="step_post", name="watch"))

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):
            self._before(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            self._before(optimizer)
        if optimizer is self._last() and phase() == "train":
            self._over()

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.remove(quiet=True)


class OptimizersOf(OptimizerSteps):
    """The same for any optimizer that holds parameters of `model`; the one that was met last ends a step.

    Where that one steps no more, or rarely, another that goes on takes its place. `found` is called with the number of
    those before when another one makes its first step.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Callable[[int], None],
        before: Callable[[Optimizer], None],
        over: Callable[[], None],
    ) -> None:
        self._before, self._over, self._found = before, over, found
        self._model = weakref.ref(model)
        self._last = lambda: None
        self._holds: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """For each optimizer that has stepped: whether it holds parameters of the model."""
        self._waiting: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How often each has stepped since the last step was over."""
        self._handles = HandleSet()
        own = weakref.ref(self)  # a hook on every optimizer must not keep a watch alive

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            steps = own()
            if steps is not None and steps._counts(optimizer):
                steps._begin(optimizer, args, kwargs)

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            steps = own()
            if steps is not None and steps._counts(optimizer):
                steps._end(optimizer, args, kwargs)

        self._handles.add(attach_everywhere(begin, on="step_pre", observe=True, name="watch"))
        self._handles.add(attach_everywhere(end, on="step_post", name="watch"))
        weakref.finalize(self, self._handles.remove, quiet=True)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._end(optimizer, args, kwargs)
        if phase() != "train":
            return
        if optimizer is self._last():
            self._waiting.clear()
            return
        steps = self._waiting[optimizer] = self._waiting.get(optimizer, 0) + 1
        if steps > _MOST_WAITING:
            self._last = weakref.ref(optimizer)
            self._waiting.clear()
            for _ in range(steps):
                self._over()

    def _counts(self, optimizer: Optimizer) -> bool:
        known = self._holds.get(optimizer)
        if known is None:
            known = self._meet(optimizer)
        return known

    def _meet(self, optimizer: Optimizer) -> bool:
        """Look at an optimizer that makes its first step."""
        model = self._model()
        own = set() if model is None else {id(each) for each in model.parameters()}
        found = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
        if found:
            self._last = weakref.ref(optimizer)
            self._found(sum(self._holds.values()))
        self._holds[optimizer] = found
        return found


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(callable(each) for each in (*args, *kwargs.values()))


class Steps:
    """Counts the steps of one watch by a schedule.

    A step is one of the optimizer: of those that are given, else of any that holds parameters of the model. Until one
    has stepped, a forward in training mode with gradients on is part of the step under way, and any other forward is a
    step. Once the user calls ``watch.step()``, that alone ends a step.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        """Says which steps are due."""
        self.what = BY_FORWARD
        """What a step is, in words: `BY_FORWARD`, `BY_OPTIMIZER` or `BY_HAND`."""
        self.last_look: int | None = None
        """The newest step that has come to its end and was due."""
        self.reached = 0
        """How many steps have come to their end: their optimizer steps, or has."""
        self.has_begun = False
        """Whether a forward has begun that is a step."""
        self._set(0)

    def _set(self, count: int) -> None:
        self.count = count
        """How many steps are over."""
        self.is_due = self.schedule.is_active(count)
        """Whether the step that is under way is due."""

    @property
    def needs_hooks(self) -> bool:
        """Whether hooks are to be on now. Forwards begin too late to put them on: those are passed over instead."""
        return self.is_due or self.what is BY_FORWARD

    def reach_end(self) -> None:
        """Note that the optimizer makes the step under way; other hooks on it may report before it is over."""
        self.reached = self.count + 1
        self.last_look = self.count if self.is_due else self.last_look

    def advance(self) -> None:
        """Count one more step."""
        self.reach_end()
        self._set(self.count + 1)

    def begin_forward(self, is_training: bool) -> None:
        """Count a forward that begins, where it is a step of its own; the one before is over then."""
        if self.what is BY_FORWARD and not is_training:
            if self.has_begun:
                self.advance()
            self.has_begun = True

    def restart(self, what: str | None = None) -> None:
        """Count from 0 again: what came before was no training, or another kind of step from now on."""
        self.what = what or self.what
        self.has_begun = False
        self.reached, self.last_look = 0, None
        self._set(0)

    def take_back(self) -> None:
        """Count the last step as not over: another optimizer has a part in it."""
        self._set(max(self.count - 1, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"count": self.count, "what": self.what, "begun": self.has_begun, "last_look": self.last_look}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        known = {what: what for what in (BY_FORWARD, BY_OPTIMIZER, BY_HAND)}
        self.what, self.has_begun = known[state["what"]], state["begun"]
        self.reached, self.last_look = state["count"], state["last_look"]
        self._set(state["count"])


class ForwardDecision(threading.local):
    """The decision about the forward that this thread is in."""

    training: bool | None = None
    """The mode of the model when it was made; None before the first."""
    takes = False
    """Whether outputs of modules are taken."""


class Passes:
    """Decides by schedule, pauses and ``during=`` whether a pass through `model` counts."""

    def __init__(self, model: nn.Module, during: During, steps: Steps) -> None:
        self.during = during
        self.steps = steps
        self.paused = 0
        """How many ``paused()`` blocks are open."""
        self.counter: ForwardCounter = NO_MODEL
        self._forward = ForwardDecision()
        self.on_forward: Callable[[], None] = lambda: None
        """Called when a forward that counts begins; the monitor of steps sets it."""
        self.in_parts = False
        """Whether parts of the model were called without it."""
        self._backward = -1, False
        """The last backward pass, and whether it counts."""
        self._model = model
        self._part: nn.Module | None = None
        self._handles = HandleSet()

    def switch(self, on: bool) -> None:
        """Begin to notice forwards of the model, or end that."""
        self._handles.remove(quiet=True)
        self._handles = HandleSet()
        self._part = None
        if on:
            self._handles.add(attach(self._model, self._begin, on="forward_pre", observe=True, name="watch"))
            hooks = existing_hooks(self._model)
            self.counter = NO_MODEL if hooks is None or hooks.counter is None else hooks.counter

    def _begin(self, module: nn.Module, args: Any) -> None:
        if _torch.in_recomputation() or (module is not self._model and _torch.times_running(self._model)):
            return
        self._decide()

    def current(self) -> ForwardDecision:
        """Return the decision about the forward of this thread; make it now where a part is called without the model.

        So is what runs after the model's mode was changed.
        """
        if self._forward.training is not self._model.training:
            self._begin_part()
        return self._forward

    def _begin_part(self) -> None:
        counter = self.counter
        if counter.here.step == -1:
            counter.find_stand_in()
        part = None if counter.stand_in is None else counter.stand_in.module()
        if part is not None and self._part is None:
            self.in_parts, self._part = True, part
            self._handles.add(attach(part, self._begin, on="forward_pre", observe=True, name="watch"))
        self._decide()

    def _decide(self) -> None:
        counter, told = self.counter, known_phase()
        training, gradients = counter.mode()
        counts = self.during.count_forward(training, gradients, (id(counter), counter.here.step))
        if counts:
            self.on_forward()
            self.steps.begin_forward(told == "train" if told is not None else training and gradients)
        self._forward.training = self._model.training
        self._forward.takes = counts and self.is_due()

    def pause(self, change: int) -> None:
        """Open or close a ``paused()`` block; what runs next is decided about anew."""
        self.paused += change
        self._forward.training = None

    def is_due(self) -> bool:
        """Return whether the step under way is due, and counting is not paused."""
        return self.steps.is_due and not self.paused

    def counts_now(self) -> bool:
        """Return whether a value of the user's, or a step of an optimizer, counts now, whatever the model's mode."""
        return self.is_due() and phase() in self.during.phases

    def counts_backward(self) -> bool:
        """Return whether the gradients of the backward pass under way count."""
        task = _torch.graph_task_id()
        if task == -1 or self._backward[0] != task:
            self._backward = task, self.is_due() and self.during.counts_backward(self._model.training)
        return self._backward[1]

    def why_silent(self, place: WatchedPlace) -> str:
        """Return why `place` has no numbers, as far as is known."""
        if place.silent or place.unread:
            return place.silent or place.unread
        if self.during.left_out and not self.during.counted:
            return self.during.in_words()
        if self.in_parts and not place.name:
            return "the model's own forward is not called, only parts of it"
        return "nothing came by"

    def in_words(self) -> list[str]:
        """Return what a reader of the numbers should know: what was left out, and the budget."""
        lines = [self.during.in_words()]
        if not isinstance(self.steps.schedule, StepSchedule):
            lines.append(self.steps.schedule.in_words())
        return [line for line in lines if line]

    def warn_if_nothing_counted(self) -> None:
        """Warn if every forward was left out because of ``during=``."""
        if self.during.left_out and not self.during.counted:
            text = f"This watch of {type_name(self._model)} has counted nothing; {self.during.in_words()}."
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
