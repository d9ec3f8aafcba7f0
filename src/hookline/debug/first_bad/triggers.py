"""Switch expensive hooks on for some steps when something happens, and off again.

Users call `on_trigger`, which makes a `TriggeredHooks`: a lifecycle hook around others. At each step it judges the
losses that have arrived on the host (`LossHistory`); a step waits for no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.messages import suggest, type_name
from hookline.observe.watch.monitor import ArrivingSteps
from hookline.report.recent_changes import LossHistory
from hookline.when import HookPoint, validate_points

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.context import RunDataContext

__all__ = ["TriggeredHooks", "on_trigger"]

_EVENTS: Final = ("nan", "loss_spike")
Make = Callable[["nn.Module"], Any]
"""Attaches something to a model, and returns what takes it off by ``remove()``."""


def on_trigger(when: str | Callable[[RunDataContext], bool], *, do: Any, steps: int = 10) -> TriggeredHooks:
    """Switch hooks on for the next ``steps`` steps when something happens, and off again.

    Recipe::

        closer = hookline.debug.on_trigger("loss_spike", do=[MyHook(), lambda model: hookline.watch(model)], steps=5)
        manager = hookline.HookManager(hooks=[closer], sinks=[...])

    Until then they cost nothing. In a loop of your own, `hookline.follow` fires the hooks of the manager.

    Args:
        when: ``"nan"`` (a loss that is not finite), ``"loss_spike"``, or a function of the context of POST_STEP.
        do: What is switched on: lifecycle hooks, or functions ``make(model)`` that attach something and return its
            handle; one, or several.
        steps: For how many steps. What happens again meanwhile counts from there.
    """
    if when not in _EVENTS and not callable(when):
        known = ", ".join(map(repr, _EVENTS))
        near = suggest(when, _EVENTS) if isinstance(when, str) else ""
        raise OptionError(f"when= is one of {known}, or a function; got {when!r}{near or '.'}")
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps= is a number of steps, 1 or more; got {steps!r}.")
    given = list(do) if isinstance(do, list | tuple) else [do]
    if not given:
        raise OptionError("do= is empty: give the hooks that are to be switched on.")
    for each in given:
        _check(each)
    return TriggeredHooks(when, given, steps)


def _check(given: Any) -> None:
    if isinstance(given, type) or not (callable(given) or isinstance(given, TrainingHook)):
        raise OptionError(f"do= takes lifecycle hooks, or functions of the model; got {type_name(given)}.")
    needs_steps = isinstance(given, TrainingHook) and (given.needs_grads or given.needs_prev_step_grads)
    if needs_steps or isinstance(given, InterventionHook):
        raise OptionError(
            f"{given.name!r} cannot be switched on for some steps: it intervenes, or the loop has to keep gradients "
            "for it at every step. Give it a schedule instead, or another hook."
        )


class TriggeredHooks(TrainingHook):
    """Hooks that are on for some steps after something has happened; `on_trigger` makes it."""

    description = "switch other hooks on when something happens"
    reduce = "mean"

    def __init__(
        self,
        when: str | Callable[[RunDataContext], bool],
        hooks: list[TrainingHook | Make],
        steps: int,
    ) -> None:
        self._when = when
        self._hooks = [each for each in hooks if isinstance(each, TrainingHook)]
        self._makes: list[Make] = [each for each in hooks if not isinstance(each, TrainingHook)]
        self._num_steps = steps
        self._losses = LossHistory()
        self._steps = ArrivingSteps()
        self._left = 0
        self._on = ExitStack()
        self.name = f"on_{when}" if isinstance(when, str) else f"on_{getattr(when, '__name__', 'trigger')}"
        self._points = {each: validate_points(each.hook_points) for each in self._hooks}
        self.hook_points = frozenset({HookPoint.POST_STEP}.union(*self._points.values()))
        self.times = 0
        """How often it was triggered."""
        self.made: list[Any] = []
        """What the functions of ``do`` returned, of the last time; taken off by now or not."""

    @property
    def is_on(self) -> bool:
        """Whether the hooks are on."""
        return self._left > 0

    def finish(self) -> None:
        """Switch everything off."""
        if self.is_on:
            self._switch_off()
        self._steps = ArrivingSteps()

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Run the hooks that are on and due here; at the end of a step, see whether to switch."""
        metrics = self._run_hooks(ctx) if self.is_on else {}
        if ctx.hook_point is HookPoint.POST_STEP:
            self._end_step(self._when(ctx) if callable(self._when) else self._judge(ctx.raw("loss")), ctx.model)
        return metrics or None

    def _run_hooks(self, ctx: RunDataContext) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for hook in self._hooks:
            if ctx.hook_point in self._points[hook]:
                found |= {f"{hook.name}/{key}": value for key, value in (hook.compute(ctx) or {}).items()}
        return found

    def _judge(self, loss: Any) -> bool:
        """Take a loss, and judge those that have arrived."""
        self._steps.add(0, loss=loss)
        happened = False
        for step in self._steps.arrived():
            value = None if step.loss is None else float(step.loss)
            is_spike, is_nan = self._losses.add(value), value is not None and not math.isfinite(value)
            happened = happened or (is_spike if self._when == "loss_spike" else is_nan)
        return happened

    def _end_step(self, happened: bool, model: nn.Module | None) -> None:
        if happened:
            self.times += 1
            if not self.is_on:
                self._switch_on(model)
            self._left = self._num_steps
        elif self.is_on:
            self._left -= 1
            if not self._left:
                self._switch_off()

    def _switch_on(self, model: nn.Module | None) -> None:
        if model is None:
            raise OptionError("The trigger does not know the model: give it to the manager's loop, or to follow().")
        with ExitStack() as opened:
            for hook in self._hooks:
                hook.start(model)
                opened.callback(hook.finish)
            self.made = []
            for make in self._makes:
                self.made.append(make(model))
                opened.callback(getattr(self.made[-1], "remove", lambda: None))
            self._on = opened.pop_all()

    def _switch_off(self) -> None:
        self._left = 0
        self._on.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: the losses so far. It goes on with the hooks off."""
        return {"losses": self._losses.state_dict(), "times": self.times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._losses.load_state_dict(state["losses"])
        self.times = state["times"]
