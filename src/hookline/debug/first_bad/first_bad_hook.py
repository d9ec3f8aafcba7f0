"""Find the first bad operation of a run by a lifecycle hook: in run files, on the command line, in a `HookManager`.

The loops of hookline hand it every step (``around_step``); in a loop that is only followed it begins steps at forwards
of the model and ends them at POST_STEP. `BadOperationFinder` does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.debug.first_bad.bad_operation import BadStep, name_batch
from hookline.debug.first_bad.bad_operation_finder import BadOperationFinder
from hookline.debug.first_bad.followed_steps import FollowedSteps
from hookline.debug.first_bad.kept_steps import SecondRun
from hookline.files import replace_file
from hookline.lifecycle.hook import MetricInfo, TrainingHook
from hookline.when import HookPoint

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.context import RunDataContext
    from hookline.training.run import RunStep

__all__ = ["FirstBadOperation"]

_METRICS = (
    ("bad_steps", "steps so far in which something was not finite"),
    ("reports", "of these, how many were run again, operator by operator"),
)


class FirstBadOperation(TrainingHook):
    """Find the operator that made the first NaN or infinity of a run.

    Recipe: ``HookManager(hooks=[hookline.debug.FirstBadOperation()])``; ``hookline run EXPERIMENT --hooks
    first_bad_operation``.

    Reports are logged (logger ``hookline.debug.first_bad``), kept in ``reports``, and written to
    ``first_bad_operation.json`` in the folder of the run, if it has one.

    Args:
        every: How many steps one snapshot of the run serves, in the loops of hookline.
        most: How many bad steps are run again; more are counted.
        on_report: Called with each report.
    """

    name = "first_bad_operation"
    description = "check every module; name the operator that made the first NaN or infinity"
    hook_points = frozenset({HookPoint.POST_STEP})
    wraps_steps = True
    pure = True
    debug = True
    reduce = "max"

    def __init__(
        self,
        *,
        every: int = 16,
        most: int = 10,
        on_report: Callable[[BadStep], Any] | None = None,
    ) -> None:
        self._every, self._most = every, most
        self._on_report = on_report
        self._folder: Path | None = None
        self._finder: BadOperationFinder | None = None
        self._followed: FollowedSteps | None = None
        self._model: nn.Module | None = None
        self._step: RunStep | None = None
        self._told = 0
        self.reports: list[BadStep] = []
        """What was found, the first first."""

    @property
    def bad_steps(self) -> int:
        """The number of steps of this run that had something that was not finite."""
        return 0 if self._finder is None else self._finder.bad_steps

    def set_run_context(self, **context: Any) -> None:
        """Learn where the run is kept."""
        if context.get("run_dir") is not None:
            self._folder = Path(context["run_dir"])

    def start(self, model: nn.Module) -> None:
        """Begin to check; until a step is handed over, as in a loop that is only followed."""
        self._model = model
        self._finder = self._make_finder(1)
        self._followed = FollowedSteps(self._finder, model)

    def finish(self) -> None:
        """Judge the last steps, and take everything off."""
        if self._finder is not None:
            if self._followed is not None:
                self._followed.flush()
                self._followed.remove()
            else:
                self._finder.flush(self._again)
            self._finder.remove()
        self._finder = self._followed = self._step = None

    def reset(self) -> None:
        """Forget the last run."""
        self.reports, self._told = [], 0

    def around_step(self, step: RunStep, batch: Any) -> Any:
        """Make a step, and check it."""
        if self._finder is None or self._model is None:
            return step(batch)
        if self._followed is not None:  # the loop is ours: whole steps can be made again
            self._followed.remove()
            self._finder.remove()
            self._followed, self._step = None, step
            self._finder = self._make_finder(self._every)
        finder, run = self._finder, step.run
        ids = name_batch(finder.ids_of(batch), run.batch_idx, run.epoch)
        finder.begin_step(batch, self._again, run.guarded.save_attributes, ids, number=run.step)
        result = step(batch)
        finder.end_step(result.loss, self._again)
        return result

    @property
    def _again(self) -> SecondRun:
        step = self._step
        return SecondRun(None if step is None else lambda kept: step.repeat(kept.batch).loss)

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """End a step of a loop that is only followed; return how many steps were bad when that has changed."""
        if self._followed is not None:
            self._followed.end_step(ctx.raw("loss"), ctx.batch_data)
            if self._finder is not None and self.manager is not None:
                # `hookline run -- python train.py` begins in the middle of a step, whose forward was not seen here.
                self._finder.steps = max(self._finder.steps, self.manager.global_step + 1)
        bad = self.bad_steps
        if bad == self._told:
            return None
        self._told = bad
        return {"bad_steps": bad, "reports": len(self.reports)}

    def describe_metrics(self) -> list[MetricInfo]:
        """Return the meaning of each metric."""
        return [MetricInfo(*row) for row in _METRICS]

    def _make_finder(self, every: int) -> BadOperationFinder:
        assert self._model is not None
        model = self._model
        return BadOperationFinder(
            model,
            lambda: (model, None, None, None, None) if self._step is None else self._step.parts,
            every=every,
            most=self._most,
            on_report=self._take,
        )

    def _take(self, report: BadStep) -> None:
        self.reports.append(report)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            told = [
                {"headline": each.headline(), **each.to_dict()} for each in self.reports
            ]  # the page shows the lines
            text = json.dumps(told, indent=1, default=str)
            replace_file(self._folder / "first_bad_operation.json", text)
        if self._on_report is not None:
            self._on_report(report)
