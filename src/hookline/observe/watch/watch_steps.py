"""Count the steps of a watch, and decide which passes through the model count.

`Watch` makes one `StepCounter`, which tells it when a step is over; one `CountingRules`, which its hooks ask at each
firing; and where no optimizer says when gradients are final, `BackwardPasses`, which calls it at the end of each.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel, type_name
from hookline.phases import ENTERED, phase
from hookline.sites import _torch
from hookline.sites.attach import attach, new_attachment
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import NO_MODEL, AttachOptions, ForwardCounter
from hookline.sites.kinds import Kind
from hookline.sites.modules.module_hooks import existing_hooks
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.sites.parameters import NamedParameter, attach_to_parameters
from hookline.when import StepSchedule

if TYPE_CHECKING:
    from torch import nn

    from hookline.observe.watch.budgeted_schedule import BudgetedSchedule
    from hookline.observe.watch.stats_engine import WatchedPlace
    from hookline.phases import During
    from hookline.sites.handle import HookHandle
    from hookline.sites.hook_at_site import Attachment, StandIn

__all__ = [
    "BackwardPasses",
    "CountingRules",
    "ForwardSteps",
    "ManualSteps",
    "OptimizerSteps",
    "Schedule",
    "StepCounter",
]


Schedule: TypeAlias = "StepSchedule | BudgetedSchedule"
"""Says which steps are due; asked once for each, when it begins."""


class StepCounter:
    """Counts steps by a schedule."""

    what = ""
    """What a step is, in words."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        """Says which steps are due."""
        self._handles = HandleSet()
        self.last_look: int | None = None
        """The newest step that is over and was due."""
        self._set(0)

    def _set(self, count: int) -> None:
        self.count = count
        """How many steps are over."""
        self.is_due = self.schedule.is_active(count)
        """Whether the step that is under way is due."""

    def advance(self) -> None:
        """Count one more step."""
        self.last_look = self.count if self.is_due else self.last_look
        self._set(self.count + 1)

    def restart(self) -> None:
        """Count from 0 again."""
        self._set(0)

    def keeps_hooks(self) -> bool:
        """Return whether hooks stay on for steps that are not due."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._set(state["count"])

    def remove(self) -> None:
        """Take off the hooks that count."""
        self._handles.remove(quiet=True)
        if not isinstance(self.schedule, StepSchedule):
            self.schedule.leave()


class ManualSteps(StepCounter):
    """Steps that the user makes by ``watch.step()``."""

    what = "watch.step()"


class OptimizerSteps(StepCounter):
    """The steps of one or more optimizers; ``before`` is called ahead of each, ``over`` after the last one's."""

    what = "the optimizer's step"

    def __init__(
        self,
        schedule: Schedule,
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


class ForwardSteps(StepCounter):
    """Outermost forwards of the model; where only parts of it are called, the calls of the first of them.

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
        schedule: Schedule,
        model: nn.Module,
        counts: Callable[[], bool],
        over: Callable[[], None],
        started: Callable[[], None],
    ) -> None:
        super().__init__(schedule)
        self.has_begun = False
        """Whether a forward has begun."""
        self.is_beginning = False
        """Whether a step begins at this moment, in the pre-hooks of a forward."""
        self._is_compiled = self._follows = False
        self._leaves_steps_out = schedule != StepSchedule()
        self._model = weakref.ref(model)
        self._counts, self._over, self._started = counts, over, started
        self._handles.add(attach(model, self._begin, on="forward_pre", observe=True, name="watch"))

    def state_dict(self) -> dict[str, Any]:
        """Return also whether a forward has begun; it is over when the next one begins."""
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
        """Count calls of `stand_in`, one of which is under way, since the model itself is not called."""
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
        if self._leaves_steps_out and not self._is_compiled:
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

        In compiled code the forward that is under way was chosen before this object is called. Before the first forward
        it is not known yet whether the model itself is called at all.
        """
        return self._is_compiled or not self.has_begun


class CountingRules:
    """Decides by schedule, pauses and ``during=`` whether a pass through `model` counts."""

    def __init__(self, model: nn.Module, during: During, steps: StepCounter) -> None:
        self.during = during
        self.steps = steps
        """Counts the steps; replaced when the user calls ``watch.step()``."""
        self.paused = 0
        """How many ``paused()`` blocks are open."""
        self.counter: ForwardCounter = NO_MODEL
        self.on_part: Callable[[StandIn], None] = lambda stand_in: None
        """Called at outputs of parts of the model whose own forward is not called, with what stands in for it."""
        self._model = model
        self._is_in_parts = False
        self._taken: tuple[Any, bool] = None, False
        self._counted: tuple[Any, bool] = None, False
        """What the last answers to `take_output` and `counts_backward` depended on, and the answers."""

    def find_counter(self) -> None:
        """Look up what counts the forwards of the model now; it changes when all hooks were off."""
        hooks = existing_hooks(self._model)
        self.counter = NO_MODEL if hooks is None or hooks.counter is None else hooks.counter

    def new_attachment(self, hook: Any, kind: Kind, name: str) -> Attachment:
        """Return the attachment of an observer; where it comes on because a step begins, it is as old as the step.

        A gradient hook that comes on in the middle of a forward waits for the next one, and a step begins in the
        pre-hooks of the forward that is due.
        """
        attachment = new_attachment(hook, kind, AttachOptions(observe=True, name=name))
        if isinstance(self.steps, ForwardSteps) and self.steps.is_beginning:
            attachment.order = self.counter.here.order
        return attachment

    def needs_hooks(self) -> bool:
        """Return whether the hooks of the watch have to be on now."""
        return self.steps.is_due or self.steps.keeps_hooks()

    def is_due(self) -> bool:
        """Return whether the step under way is due, and counting is not paused."""
        return self.steps.is_due and not self.paused

    def counts_now(self) -> bool:
        """Return whether a value of the user's, or a step of an optimizer, counts now, whatever the model's mode."""
        return self.is_due() and phase() in self.during.phases

    def counts_forward(self) -> bool:
        """Return whether ``during=`` asks for the forward that is under way in this thread."""
        counter = self.counter
        return self.during.count_forward(*counter.mode(), (id(counter), counter.here.step))

    def take_output(self) -> bool:
        """Return whether the output of a module counts; follow that module if the model's own forward is not called."""
        steps, counter, training = self.steps, self.counter, self._model.training
        # Every module asks: one comparison, where the whole answer takes nine calls.
        now = counter, counter.here.step, training, ENTERED.changes, self.during.best
        known = self._taken
        if known[0] == now:
            return known[1] and steps.is_due and not self.paused
        if counter.here.step == -1:
            counter.find_stand_in()
        if counter.stand_in is not None:
            self._is_in_parts = True
            self.on_part(counter.stand_in)
            if isinstance(steps, ForwardSteps) and not steps.has_begun:
                steps.follow(counter.stand_in)
        if not self.is_due():
            return False
        takes = self.counts_forward()
        here = counter.here
        if here.step != -1 and counter.stand_in is None and here.training is training:
            self._taken = (*now[:4], self.during.best), takes
        return takes

    def counts_backward(self) -> bool:
        """Return whether the gradients of the backward pass under way count."""
        training = self._model.training
        now = training, ENTERED.changes, self.during.best
        known = self._counted
        if known[0] != now:
            known = self._counted = now, self.during.counts_backward(training)
        return known[1] and self.steps.is_due and not self.paused

    def counts_parts(self) -> bool:
        """Return whether steps are counted by something else than forwards of the model, since it has none."""
        return isinstance(self.steps, ForwardSteps) and self.steps.what != ForwardSteps.what

    def why_silent(self, place: WatchedPlace) -> str:
        """Return why `place` has no numbers, as far as is known."""
        steps = self.steps
        if place.silent or place.unread:
            return place.silent or place.unread
        if self.during.left_out and not self.during.counted:
            return self.during.in_words()
        if self._is_in_parts and not place.name:
            return "the model's own forward is not called, only parts of it"
        if place.kind == "param_grad" and isinstance(steps, ForwardSteps) and not (steps.has_begun or steps.count):
            return "no forward of the model began, so no step did: give optimizer=, or call watch.step()"
        return "nothing came by"

    def in_words(self) -> list[str]:
        """Return what a reader of the numbers should know: what was left out, an unusual kind of step, the budget."""
        lines = [self.during.in_words()]
        if self.counts_parts():
            lines.append(f"a step is {self.steps.what}; optimizer= makes it the optimizer's")
        if not isinstance(self.steps.schedule, StepSchedule):
            lines.append(self.steps.schedule.in_words())
        return [line for line in lines if line]

    def warn_if_nothing_counted(self) -> None:
        """Warn if every forward was left out because of ``during=``."""
        if self.during.left_out and not self.during.counted:
            text = f"This watch of {type_name(self._model)} has counted nothing; {self.during.in_words()}."
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())


class BackwardPasses:
    """Calls `over` at the end of each backward pass through `model`.

    A pass is noticed at the model's output; where the model's own forward is not called, and it has no output, at
    `parameters`, whose gradients are read.
    """

    def __init__(self, model: nn.Module, parameters: list[NamedParameter], over: Callable[[], None]) -> None:
        self._model = model
        self._parameters = [item for item in parameters if not is_lazy(item.parameter)]
        self._over = over
        self._handle: HookHandle | None = None
        self._latest = -1

    def begin(self, module: nn.Module, grads: Any) -> None:
        """Note that a pass has come to the model's output; to be attached there as ``backward_pre``."""
        # Queued from the end of the pass, so that it comes after DDP, which averages gradients there. A pass inside of
        # this one, as reentrant checkpointing makes them, ends before.
        _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._over))

    def hook_parameters(self) -> None:
        """Notice passes at the parameters from now on; the compiled code of modules stays as it is."""
        if self._handle is None and self._parameters:
            attachment = new_attachment(self._take_gradient, Kind.PARAM_GRAD, AttachOptions(name="watch"))
            self._handle = attach_to_parameters(attachment, self._model, self._parameters)

    def unhook_parameters(self) -> None:
        """Notice passes at the parameters no more."""
        if self._handle is not None:
            self._handle.remove(quiet=True)
            self._handle = None

    def _take_gradient(self, parameter: Tensor) -> None:
        current = _torch.graph_task_id()
        if current not in (self._latest, -1):  # the first gradient of this pass
            self._latest = current
            _torch.queue_end_of_backward(lambda: _torch.queue_end_of_backward(self._end))

    def _end(self) -> None:
        if self._handle is not None:
            self._over()
