"""What a loop may ask of a manager before it computes or allocates anything: is there a hook that wants it?

Read from the plan; nobody has to ask, `fire` asks by itself what is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hookline.lifecycle.points import HookPoint
from hookline.training.plan import Plan
from hookline.training.point_hooks import Entry

__all__ = ["Questions"]

_STEP_POINTS: Final = (HookPoint.PRE_STEP, HookPoint.POST_STEP)


class Questions:
    """The questions of `HookManager`.

    ``epoch`` (in the step loop, the step) leaves out hooks whose window does not have it; without it, a hook counts
    that may fire at some time.
    """

    _plan: Plan
    _global_step: int
    _at_steps: tuple[Entry, ...] = ()
    """The hooks at points of steps: loops ask about these at every step."""

    def has_hooks_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Whether any hook fires at one of these points."""
        return any(True for _ in self._entries(points, epoch))

    def has_interventions(self) -> bool:
        """Whether any hook intervenes anywhere."""
        return self.has_interventions_at(*HookPoint)

    def has_interventions_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Whether any hook intervenes at one of these points; if not, no ``model_ctx`` is needed there."""
        return any(entry.intervenes for entry in self._entries(points, epoch))

    def needs_grad_accumulation(self) -> bool:
        """Whether any hook has ``needs_grads``."""
        return self.needs_grad_accumulation_at(*HookPoint)

    def needs_grad_accumulation_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Whether a hook that fires at one of these points has ``needs_grads``."""
        return any(entry.hook.needs_grads for entry in self._entries(points, epoch))

    def needs_pre_epoch_state(self) -> bool:
        """Whether any hook has ``needs_pre_epoch_state``."""
        return self.needs_pre_epoch_state_at(*HookPoint)

    def needs_pre_epoch_state_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Whether a hook that fires at one of these points has ``needs_pre_epoch_state``."""
        return any(entry.hook.needs_pre_epoch_state for entry in self._entries(points, epoch))

    def needs_prev_step_grads(self) -> bool:
        """Whether any hook has ``needs_prev_step_grads``."""
        return self.needs_prev_step_grads_at(*HookPoint)

    def needs_prev_step_grads_at(self, *points: HookPoint, epoch: int | None = None) -> bool:
        """Whether a hook that fires at one of these points has ``needs_prev_step_grads``."""
        return any(entry.hook.needs_prev_step_grads for entry in self._entries(points, epoch))

    def needs_prev_step_grads_this_step(self, epoch: int | None = None) -> bool:
        """Whether a hook that is due at this step has ``needs_prev_step_grads``."""
        return any(entry.hook.needs_prev_step_grads and self._is_due(entry, epoch) for entry in self._at_steps)

    def has_active_step_hooks(self, epoch: int | None = None) -> bool:
        """Whether a hook is due at this step."""
        return any(self._is_due(entry, epoch) for entry in self._at_steps)

    def has_active_step_interventions(self, epoch: int | None = None) -> bool:
        """Whether a hook that is due at this step intervenes."""
        return any(entry.intervenes and self._is_due(entry, epoch) for entry in self._at_steps)

    def _is_due(self, entry: Entry, epoch: int | None) -> bool:
        return entry.is_due_at(self._global_step) and entry.is_open_at(epoch)

    def _entries_at_steps(self) -> tuple[Entry, ...]:
        return tuple(self._entries(_STEP_POINTS, None))

    def _entries(self, points: tuple[HookPoint, ...], epoch: int | None) -> Iterator[Entry]:
        for point in points:
            slot = self._plan.slots.get(HookPoint.of(point))
            for entry in slot.entries if slot is not None else ():
                if entry.is_open_at(epoch):
                    yield entry
