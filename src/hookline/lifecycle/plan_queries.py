"""Answer what a loop may ask before it computes or allocates anything: is there a hook that needs it?

The loops ask; this base class of `HookManager` reads the plan and the current step. ``epoch`` (in the step loop, the
step) leaves out hooks whose window does not have it; without it, a hook counts that may fire at some time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hookline.lifecycle.plan import Plan, PlannedHook
from hookline.when import HookPoint

__all__ = ["PlanQueries"]

_STEP_POINTS: Final = (HookPoint.PRE_STEP, HookPoint.POST_STEP)


class PlanQueries:
    """Hold the plan and the current step, and answer questions about them."""

    def __init__(self) -> None:
        self._global_step = -1
        self._set_plan(Plan({}, {}))

    def _set_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._at_steps = tuple(plan.hooks_at(_STEP_POINTS))  # loops ask about these at every step
        self._points_of_steps = tuple(filter(None, map(plan.points.get, _STEP_POINTS)))

    def plan(self) -> Plan:
        """Return which hook runs at which point, in which order, on which steps, and what it needs."""
        return self._plan

    @property
    def global_step(self) -> int:
        """The current step of the run, counted from 0; -1 before the first."""
        return self._global_step

    def continue_from(self, step: int) -> None:
        """Let ``step`` be the last one that was made: the next ``advance_step()`` begins the one after it."""
        self._set_step(step)

    def _set_step(self, step: int) -> None:
        self._global_step = step
        for hooks in self._plan.points.values():
            hooks.next_due = -2  # it was worked out from a later step

    def will_fire(self, points: Iterable[HookPoint]) -> tuple[str, ...]:
        """Return a sentence for each hook that never fires if the run has only these points."""
        there = [point for point in HookPoint if point in {HookPoint.of(given) for given in points}]
        fires = ", ".join(point.name for point in there) or "nothing"
        return tuple(
            f"Hook {name!r} will not fire: it waits for {', '.join(names)}, and the run fires {fires}."
            for name, names in self._plan.silent_without(there).items()
        )

    def may_fire(self, point: HookPoint) -> bool:
        """Return whether a hook may be due at ``point`` now; its window is not looked at."""
        hooks = self._plan.points.get(point)
        return hooks is not None and self._global_step >= hooks.next_due

    def has_hooks_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether any hook fires at one of these points."""
        return any(True for _ in self._plan.hooks_at(points, epoch))

    def has_interventions(self) -> bool:
        """Return whether any hook intervenes anywhere."""
        return self.has_interventions_at(*HookPoint)

    def has_interventions_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether any hook intervenes at one of these points; if not, no ``model_ctx`` is needed there."""
        return any(planned.intervenes for planned in self._plan.hooks_at(points, epoch))

    def needs_grad_accumulation(self) -> bool:
        """Return whether any hook has ``needs_grads``."""
        return self.needs_grad_accumulation_at(*HookPoint)

    def needs_grad_accumulation_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether a hook at one of these points has ``needs_grads``."""
        return any(planned.hook.needs_grads for planned in self._plan.hooks_at(points, epoch))

    def needs_pre_epoch_state(self) -> bool:
        """Return whether any hook has ``needs_pre_epoch_state``."""
        return self.needs_pre_epoch_state_at(*HookPoint)

    def needs_pre_epoch_state_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether a hook at one of these points has ``needs_pre_epoch_state``."""
        return any(planned.hook.needs_pre_epoch_state for planned in self._plan.hooks_at(points, epoch))

    def needs_prev_step_grads(self) -> bool:
        """Return whether any hook has ``needs_prev_step_grads``."""
        return self.needs_prev_step_grads_at(*HookPoint)

    def needs_prev_step_grads_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Return whether a hook at one of these points has ``needs_prev_step_grads``."""
        return any(planned.hook.needs_prev_step_grads for planned in self._plan.hooks_at(points, epoch))

    def needs_prev_step_grads_this_step(self, epoch: int | None = None) -> bool:
        """Return whether a hook that is due at this step has ``needs_prev_step_grads``."""
        return any(planned.hook.needs_prev_step_grads and self._is_due(planned, epoch) for planned in self._at_steps)

    def needs_prev_step_grads_next_step(self) -> bool:
        """Return whether a hook that may be due at the next step has ``needs_prev_step_grads``."""
        step = self._global_step + 1
        return any(planned.hook.needs_prev_step_grads and planned.is_due_at(step) for planned in self._at_steps)

    def is_next_step_quiet(self) -> bool:
        """Return whether no hook is due at a point of the next step, as far as schedules tell."""
        step = self._global_step + 1
        for hooks in self._points_of_steps:  # noqa: SIM110 - a generator takes twice as long
            if step >= hooks.next_due:
                return False
        return True

    def has_active_step_hooks(self, epoch: int | None = None) -> bool:
        """Return whether a hook is due at this step."""
        return any(self._is_due(planned, epoch) for planned in self._at_steps)

    def has_active_step_interventions(self, epoch: int | None = None) -> bool:
        """Return whether a hook that is due at this step intervenes."""
        return any(planned.intervenes and self._is_due(planned, epoch) for planned in self._at_steps)

    def _is_due(self, planned: PlannedHook, epoch: int | None) -> bool:
        return planned.is_due_at(self._global_step) and planned.is_open_at(epoch)
