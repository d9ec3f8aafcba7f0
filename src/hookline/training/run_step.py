"""Make a step of a run through the hooks that look at steps from their beginning to their end.

`Run.train_step` calls what `step_through_hooks` returns; hooks with ``wraps_steps`` are given a `RunStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.training.extra_state import AttributeSnapshot, ExtraState

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.training.run import Run
    from hookline.training.step import StepResult

__all__ = ["RunStep", "step_through_hooks"]


class RunStep:
    """One step of a run, as a hook may make it; call it with the batch."""

    def __init__(self, run: Run, make: Callable[[Any], StepResult]) -> None:
        self._run = run
        self._make = make
        self._extra_state = ExtraState(run.adapter)

    def __call__(self, batch: Any) -> StepResult:
        """Make the step."""
        return self._make(batch)

    def repeat(self, batch: Any) -> StepResult:
        """Make the step once more, without the hooks around it; the caller puts the run back."""
        return self._run.adapter.train_and_schedule(batch)

    @property
    def number(self) -> int:
        """The step of the run, counted from 0."""
        return self._run.step

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self._run.epoch

    @property
    def batch_idx(self) -> int | None:
        """The batch within the epoch."""
        return self._run.batch_idx

    @property
    def lr(self) -> Any:
        """The learning rate; a tensor if it is one."""
        return self._run.adapter.lr

    @property
    def parts(self) -> tuple[Any, Any, Any, Any, Any]:
        """What a guard has to save: model, optimizer, scheduler, scaler, loader, with all that belongs to them."""
        adapter, extra = self._run.adapter, self._extra_state
        return adapter.model, extra.optimizer, extra.scheduler, adapter.scaler, adapter.current_loader

    def save_attributes(self) -> Callable[[], None]:
        """Save the plain attributes of the experiment; return what puts them back."""
        return AttributeSnapshot(self._run.adapter).put_back


def step_through_hooks(run: Run, hooks: Sequence[TrainingHook]) -> Callable[[Any], StepResult]:
    """Return what makes a step of ``run``: the experiment's own step, inside of the hooks that wrap steps."""
    make: Callable[[Any], StepResult] = run.adapter.train_and_schedule
    for hook in reversed(hooks):
        make = partial(_through, hook, RunStep(run, make))
    return make


def _through(hook: TrainingHook, step: RunStep, batch: Any) -> StepResult:
    result: StepResult = hook.around_step(step, batch)
    return result
