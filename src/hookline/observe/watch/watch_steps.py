"""What a step is for a watch, and whether it is due.

Tells the watch when one is over: an optimizer's step, a forward of the model, or a call of ``watch.step()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from hookline.errors import OptionError
from hookline.lifecycle.run_phase import phase
from hookline.lifecycle.schedule import StepSchedule
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.optimizers.optimizer_hooks import attach_optimizer
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.modules.forward_counter import StandIn

__all__ = ["ByForward", "ByHand", "ByOptimizer", "Steps"]


class Steps:
    """Counts steps by a schedule."""

    what = ""
    """What a step is, in words."""

    def __init__(self, schedule: StepSchedule, count: int = 0) -> None:
        self._schedule = schedule
        self.count = count
        """How many are over."""
        self.is_due = schedule.is_active(count)
        """Whether the one that is under way is."""
        self._handles = HandleSet()

    def advance(self) -> None:
        """One more is over."""
        self.count += 1
        self.is_due = self._schedule.is_active(self.count)

    def restart(self) -> None:
        """Count from 0 again."""
        self.count = 0
        self.is_due = self._schedule.is_active(0)

    def keeps_hooks(self) -> bool:
        """Whether hooks stay on for steps that are not due."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.count = state["count"]
        self.is_due = self._schedule.is_active(self.count)

    def remove(self) -> None:
        """Count no more."""
        self._handles.remove(quiet=True)


class ByHand(Steps):
    """Steps that the user tells of."""

    what = "watch.step()"


class ByOptimizer(Steps):
    """The steps of an optimizer."""

    what = "the optimizer's step"

    def __init__(
        self,
        schedule: StepSchedule,
        optimizer: Optimizer | Sequence[Optimizer],
        before: Callable[[Optimizer], None],
        over: Callable[[], None],
    ) -> None:
        super().__init__(schedule)
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [unwrap_optimizer(each) for each in optimizers]  # hooks are called with the one inside
        if not optimizers:
            raise OptionError("optimizer= is an empty list; leave it out, or give the optimizers whose steps count.")

        def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not _has_closure(args, kwargs):
                before(optimizer)

        def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if _has_closure(args, kwargs):  # which makes the gradients, in the middle of the step
                before(optimizer)
            if optimizer is optimizers[-1] and phase() == "train":
                over()

        for each in optimizers:
            self._handles.add(attach_optimizer(each, pre, on="step_pre", observe=True, name="watch"))
            self._handles.add(attach_optimizer(each, post, on="step_post", name="watch"))


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(callable(each) for each in (*args, *kwargs.values()))


class ByForward(Steps):
    """Outermost forwards of the model that count; where only parts of it are called, the calls of the first of them.

    Args:
        schedule: Which steps are due.
        model: The model.
        counts: Returns whether the forward that has just begun counts.
        over: Called when a step is over, because the next one begins.
        started: Called when the first one begins.
    """

    what = "one forward of the model"

    def __init__(
        self,
        schedule: StepSchedule,
        model: nn.Module,
        counts: Callable[[], bool],
        over: Callable[[], None],
        started: Callable[[], None],
    ) -> None:
        super().__init__(schedule)
        self.has_begun = self._is_compiled = False
        """Whether a forward has begun."""
        self.is_beginning = False
        """Whether a step begins at this moment, in the pre-hooks of a forward."""
        self._comes_and_goes = schedule != StepSchedule()
        self._model = weakref.ref(model)
        self._counts, self._over, self._started = counts, over, started
        self._follows = False
        self._handles.add(attach(model, self._begin, on="forward_pre", observe=True, name="watch"))

    def state_dict(self) -> dict[str, Any]:
        """Also whether a forward has begun, which is over when the next one begins."""
        return super().state_dict() | {"begun": self.has_begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        super().load_state_dict(state)
        self.has_begun = state.get("begun", False)

    def restart(self) -> None:
        """Count from 0 with the forward that begins now: what came before was no training."""
        super().restart()
        self.has_begun = False

    def follow(self, stand_in: StandIn) -> None:
        """Have the calls of `stand_in`, one of which is under way, make the steps: the model itself is not called."""
        module = stand_in.module()
        if self._follows or module is None:
            return
        self._follows = True
        self.what = f"one call of {stand_in.name!r}, since the model's own forward is not called"
        self._handles.add(attach(module, self._begin, on="forward_pre", observe=True, name="watch"))
        if self._counts():
            self._begin_step()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if _torch.in_recomputation():
            return
        if self._comes_and_goes and not self._is_compiled:
            self._is_compiled = _torch.in_compiled_code()
        model = self._model()
        if module is not model and model is not None and _torch.times_running(model):
            return  # a forward of the model has begun, which counts
        if self._counts():
            self._begin_step()

    def _begin_step(self) -> None:
        self.is_beginning = True
        try:
            if self.has_begun:
                self._over()
            else:
                self.has_begun = True
                self._started()
        finally:
            self.is_beginning = False

    def keeps_hooks(self) -> bool:
        """Return whether hooks stay on for steps that are not due.

        In compiled code the forward that is under way was chosen before we are told that it begins. Before the first
        one it is not known yet whether the model itself is called at all.
        """
        return self._is_compiled or not self.has_begun
