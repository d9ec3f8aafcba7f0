"""Find the operator that made the first NaN or infinity, in any loop.

Users call `find_bad_operations`. It tells a `BadOperationFinder` when steps begin and end: by ``check.step(batch)``
where it knows the step, else by the forwards of the model and the steps of the optimizer (`FollowedSteps`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from hookline.debug.first_bad.bad_operation import BadStep
from hookline.debug.first_bad.bad_operation_finder import BadOperationFinder
from hookline.debug.first_bad.followed_steps import FollowedSteps
from hookline.debug.first_bad.kept_steps import SecondRun
from hookline.debug.first_bad.run_optimizers import OtherOptimizers, join_optimizers, list_optimizers
from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.phases import phase
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.sites.targets import check_model
from hookline.tables import OFF, ON, ShownAsTable, Table

if TYPE_CHECKING:
    from hookline.guard.tensors import Where
    from hookline.hook_types import Target

__all__ = ["BadOperations", "find_bad_operations"]

logger = logging.getLogger("hookline.debug.first_bad")


def find_bad_operations(
    model: nn.Module,
    optimizer: Any = None,
    *,
    step_fn: Callable[[Any], Any] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    target: Target = "*",
    exclude: Target = None,
    every: int = 16,
    where: Where = "auto",
    most: int = 10,
    batch_ids: Callable[[Any], Any] | None = None,
    on_report: Callable[[BadStep], Any] | None = None,
) -> BadOperations:
    """Find the operator that made the first NaN or infinity.

    Recipe::

        with hookline.debug.find_bad_operations(model, optimizer, step_fn=train_step) as check:
            for batch in loader:
                loss = check.step(batch)  # calls train_step(batch)
        print(check)

    The outputs of modules and their gradients are checked at every step, by statistics that wait for no device. When
    one is not finite, the run goes back to the beginning of that step, makes it again operator by operator, and names
    the first operator whose result was not finite although its inputs were. Then the state is put back, bit for bit,
    and the run goes on. Reports are logged (logger ``hookline.debug.first_bad``) and kept in ``check.reports``.

    Without ``step_fn`` write your loop as it is, and give the optimizer: its step ends a step. Forward and backward of
    the model are run again, on what it was given and the gradients that came back; the loss and the optimizer are not.
    ``check.note_batch(batch)`` before a forward names the batch for the report.

    Args:
        model: The model.
        optimizer: What trains it; a list of all optimizers where there are several. Without ``step_fn`` the step of the
            last one ends a step.
        step_fn: ``step_fn(batch)`` makes one whole step and returns the loss. All that it changes beside the parts
            given here, and what it prints, happens again in the second run.
        scheduler: The scheduler, if the step moves it.
        scaler: The ``GradScaler`` in use. Gradients that overflow under it are its own affair, and are counted in
            ``check.scaled_steps``.
        loader: The loader, if the step reads from it.
        target: Which modules are checked, as in ``attach``; all by default.
        exclude: Modules to leave out.
        every: How many steps one snapshot of the run serves; the steps since are run again to get to a later one. Only
            with ``step_fn``, else every step has its own.
        where: Where the copies go: ``"device"``, ``"host"`` or ``"auto"``.
        most: How many bad steps are run again; more are counted.
        batch_ids: ``batch_ids(batch)`` names the samples of a batch, for the report. By default the entry ``"ids"``,
            ``"id"``, ``"indices"``, ``"index"`` or ``"idx"`` of a dictionary.
        on_report: Called with each report, a `BadStep`.
    """
    check_model(model, target)
    if every < 1 or most < 0:
        raise OptionError(f"every= is at least 1 and most= at least 0; got {every!r} and {most!r}.")
    if step_fn is not None and not callable(step_fn):
        raise OptionError(f"step_fn= is a function of the batch that makes a step; got {type_name(step_fn)}.")
    if step_fn is None and optimizer is None:
        raise OptionError("Nothing says when a step is over: give step_fn=, or the optimizer.")
    joined = join_optimizers(optimizer)
    finder = BadOperationFinder(
        model,
        lambda: (model, joined, scheduler, scaler, loader),
        target=target,
        exclude=exclude,
        every=every if step_fn is not None else 1,
        where=where,
        most=most,
        batch_ids=batch_ids,
        on_report=on_report,
    )
    try:
        return BadOperations(finder, model, optimizer, step_fn)
    except BaseException:
        finder.remove()
        raise


class BadOperations(ShownAsTable):
    """The bad steps that one `find_bad_operations` has found; prints as a table.

    Recipe: ``check = hookline.debug.find_bad_operations(model, optimizer, step_fn=train_step)``; then
    ``check.step(batch)``, ``print(check)``, ``check.reports``. Comes off by ``check.remove()``, or at the end of a
    ``with`` block.
    """

    def __init__(
        self,
        finder: BadOperationFinder,
        model: nn.Module,
        optimizer: Any,
        step_fn: Callable[[Any], Any] | None,
    ) -> None:
        self._finder = finder
        self._step_fn = step_fn
        self._removed = False
        self._has_warned = False
        self._followed: FollowedSteps | None = None
        self._others: OtherOptimizers | None = None
        self._handle: Any = None
        if step_fn is None:
            self._followed = FollowedSteps(finder, model)
            last = unwrap_optimizer(list_optimizers(optimizer)[-1])
            self._handle = attach_optimizer(last, self._end_followed, on="step_post", name="first bad operation")
        else:
            self._others = OtherOptimizers(model, optimizer)

    @property
    def reports(self) -> list[BadStep]:
        """What was found, the first first."""
        return self._finder.reports

    @property
    def meant(self) -> list[BadStep]:
        """Infinities that were put in and reach neither the loss nor a gradient, as those of a mask; no fault."""
        return self._finder.meant

    @property
    def bad_steps(self) -> int:
        """The number of steps that had something that was not finite."""
        return self._finder.bad_steps

    @property
    def scaled_steps(self) -> int:
        """The number of steps with overflows in gradients alone, which the scaler skips."""
        return self._finder.scaled_steps

    def step(self, batch: Any = None, *, ids: Any = None) -> Any:
        """Make a step by ``step_fn(batch)``, and check it; return what that returned."""
        if self._step_fn is None or self._removed:
            raise OptionError("check.step(batch) calls step_fn(batch), which was not given, or the check is off.")
        if batch is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "check.step() was called without a batch: if step_fn fetches its data itself, a second run takes the "
                "next data of the run. Next: fetch the batch in the loop, and call check.step(batch)."
            )
        self._finder.begin_step(batch, self._again, ids=ids)
        result = self._step_fn(batch)
        self._finder.end_step(result, self._again)
        return result

    def note_batch(self, batch: Any, *, ids: Any = None) -> None:
        """Name the batch of the forward that follows; only where no ``step_fn`` was given."""
        if self._followed is None:
            raise OptionError("check.step(batch) knows the batch; note_batch() is for a check without step_fn=.")
        self._followed.note_batch(batch, ids)

    def flush(self) -> list[BadStep]:
        """Wait for the numbers of all steps; return the reports that they gave rise to."""
        if self._followed is not None:
            return self._followed.flush()
        return self._finder.flush(self._again)

    def remove(self) -> None:
        """Take all hooks off; what was found stays."""
        if self._removed:
            return
        self._removed = True
        if self._handle is not None:
            self._handle.remove(quiet=True)
        for part in (self._followed, self._others):
            if part is not None:
                part.remove()
        self._finder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if exc_info[0] is None and not self._removed:
                self.flush()
        finally:
            self.remove()

    @property
    def _again(self) -> SecondRun:
        step_fn = self._step_fn
        if step_fn is None or (self._others is not None and self._others.note):
            return SecondRun(None, "" if self._others is None else self._others.note)
        return SecondRun(lambda kept: step_fn(kept.batch))

    def _end_followed(self, *args: Any) -> None:
        if self._followed is not None and phase() != "intervention":
            self._followed.end_step(None)

    def _table(self) -> Table:
        if not self.reports:
            return Table(title=f"{self._finder.steps} steps, all finite" if not self.bad_steps else self._counted())
        return Table(title=self._counted(), foot=[str(report) for report in self.reports])

    def _counted(self) -> str:
        return f"{self.bad_steps} of {self._finder.steps} steps had numbers that were not finite"

    def _state(self) -> str:
        return OFF if self._removed else ON
