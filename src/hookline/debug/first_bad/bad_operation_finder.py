"""Check every step by the statistics of its modules; run a bad one again at operator level and say what was wrong.

`find_bad_operations` and the lifecycle hook `FirstBadOperation` call `BadOperationFinder` when steps begin and end. It
reads a `Watch` by `StepReader`, goes back by `KeptSteps`, and looks by `OperatorRun`. A guard puts the run back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import BadOperation, BadStep, describe_batch, find_ids
from hookline.debug.first_bad.kept_steps import FollowedBatch, KeptStep, KeptSteps, RunParts, SecondRun
from hookline.debug.first_bad.operator_run import OperatorRun
from hookline.debug.first_bad.step_reader import StepReader
from hookline.distributed.ranks import is_distributed
from hookline.guard.digest import digest
from hookline.guard.guard import Guard
from hookline.observe.watch.watch import watch
from hookline.phases import in_phase
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.debug.first_bad.step_reader import StepRows
    from hookline.guard.tensors import Where
    from hookline.hook_types import Target

__all__ = ["BadOperationFinder"]

logger = logging.getLogger("hookline.debug.first_bad")


_UNREPEATED: Final = "not repeated"
_OUTSIDE: Final = (
    "the steps since the last copy of the run were made again and ended elsewhere, so something outside was changed: "
    "data that the step fetches itself, a counter, an optimizer that was not given"
)
_ROUNDED: Final = "the steps before it were repeated up to rounding only: they are not deterministic"
_EAGER: Final = "the model is compiled; the second run was eager, operator by operator, so its rounding may differ"


class BadOperationFinder:
    """Find bad operations in the steps that it is told of.

    Args:
        model: The model.
        parts: Returns what a guard saves.
        target: Which modules are checked.
        exclude: Modules to leave out.
        every: How many steps one snapshot serves.
        where: Where the copies go, as for `Guard`.
        most: How many bad steps are run again; later ones are counted.
        batch_ids: Returns the ids of a batch.
        on_report: Called with every report.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Callable[[], RunParts],
        *,
        target: Target = "*",
        exclude: Target = None,
        every: int = 16,
        where: Where = "auto",
        most: int = 10,
        batch_ids: Callable[[Any], Any] | None = None,
        on_report: Callable[[BadStep], Any] | None = None,
    ) -> None:
        self._model = model
        self._parts = parts
        self._most = most
        self._batch_ids = batch_ids or find_ids
        self._on_report = on_report
        self.reports: list[BadStep] = []
        """What was found, the first first."""
        self.meant: list[BadStep] = []
        """Infinities that were given and reach neither loss nor gradient, as those of a mask do."""
        self.bad_steps = 0
        """How many steps had something that was not finite."""
        self.scaled_steps = 0
        """How many of them had it in gradients alone under a ``GradScaler``, which skips such steps by design."""
        self.steps = 0
        """How many steps have begun."""
        self._expected: set[str] = set()
        """Places whose infinities turned out to be meant."""
        self._last_bad = -2
        self._run: OperatorRun | None = None
        self._watch = watch(model, target, on=("forward", "backward"), stats=["nonfinite"], exclude=exclude)
        self._reader = StepReader(self._watch)
        self._kept = KeptSteps(parts, every=every, where=where)
        self._attributes: Callable[[], Callable[[], None]] | None = None

    # -- steps -------------------------------------------------------------------------------------------------

    def ids_of(self, batch: Any) -> Any:
        """Return what names a batch, if that is known."""
        return None if batch is None or isinstance(batch, FollowedBatch) else self._batch_ids(batch)

    @property
    def operators_run(self) -> int:
        """How many operators the second run that is under way has made."""
        return 0 if self._run is None else self._run.num_operators

    def begin_step(
        self, batch: Any, again: SecondRun, attributes: Any = None, ids: Any = None, number: int | None = None
    ) -> None:
        """Keep how a step begins; ``number`` is that of the run, if it does not count from 0 here."""
        if number is not None:
            self.steps = number
        self._attributes = attributes
        until = self._kept.needs_verdict_until
        if until >= 0:
            self._judge_all(self._reader.arrived_until(until), again)
        ids = self.ids_of(batch) if ids is None else ids
        self._kept.begin(self.steps, batch, ids, attributes)
        self.steps += 1

    def end_step(self, loss: Any, again: SecondRun) -> list[BadStep]:
        """End a step; return the reports about it, or about an earlier one whose numbers have arrived now."""
        self._reader.end_step(self.steps - 1, loss if isinstance(loss, Tensor | float) else None)
        return self._judge_all(self._reader.arrived(), again)

    def flush(self, again: SecondRun) -> list[BadStep]:
        """Wait for the numbers of all steps, and judge them."""
        return self._judge_all(self._reader.arrived(wait=True), again)

    def remove(self) -> None:
        """Take all hooks off, let go of what was kept."""
        self._watch.remove(quiet=True)
        self._kept.clear()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is counted."""
        return self._watch.paused()

    # -- judging -----------------------------------------------------------------------------------------------

    def _judge_all(self, steps: list[StepRows], again: SecondRun) -> list[BadStep]:
        found = [self._judge(step, again) for step in steps]
        return [report for report in found if report is not None]

    def _judge(self, rows: StepRows, again: SecondRun) -> BadStep | None:
        calls = rows.bad_places(self._reader.places, self._expected)
        bad = [place.label for place in calls.places]
        if rows.loss is not None and not math.isfinite(float(rows.loss)):
            bad.append("loss")
        if not bad:
            return None
        if _scales(self._parts()[3]) and all(map(_is_of("backward"), bad)):
            self.scaled_steps += 1
            return None
        self.bad_steps += 1
        goes_on, self._last_bad = rows.number == self._last_bad + 1, rows.number
        if goes_on or len(self.reports) >= self._most:
            return None  # what a NaN in the weights does to every step from then on
        report = replace(self._look(rows.number, tuple(bad), again), num_candidates=max(calls.num_candidates, 1))
        is_given_inf = report.verdict == "given" and report.operation is not None and report.operation.what == "Inf"
        if is_given_inf and all(map(_is_of("forward"), bad)):
            # A mask: what it hides reaches neither the loss nor a gradient, so it is no fault.
            self._expected.update(bad)
            self.bad_steps -= 1
            self._last_bad = -2
            self.meant.append(report)
            logger.info("%s; it reaches neither loss nor gradient, and is taken as meant", report.headline())
            return None
        if report.verdict == "did not repeat":
            self._last_bad = -2
        self.reports.append(report)
        logger.warning("%s", report)
        if self._on_report is not None:
            self._on_report(report)
        return report

    # -- running again -----------------------------------------------------------------------------------------

    def _look(self, number: int, places: tuple[str, ...], again: SecondRun) -> BadStep:
        kept = self._kept.get(number)
        batch = _describe(kept)
        why = self._why_not(kept, again)
        if why:
            return BadStep(number, places, "not run again", batch=batch, notes=(why,))
        notes = (again.note,) if again.note else ()
        if any(map(_torch.is_compiled, self._model.modules())):
            notes = (*notes, _EAGER)
        try:
            operation, at, is_same, note = self._protected(number, again)
        except _UnrepeatedError:
            return BadStep(number, places, _UNREPEATED, batch=batch, notes=(*notes, _OUTSIDE))
        except _SecondRunError as error:
            # Behind the first sentence torch lists its backends.
            told = str(error.cause).partition("\n")[0].partition(". ")[0][:200]
            note = f"the second run raised {type(error.cause).__name__}: {told}"
            return BadStep(number, places, "not run again", batch=batch, notes=(*notes, note))
        notes = (*notes, note) if note else notes
        if operation is not None:
            batch = _describe(self._kept.get(at), operation.number)
            notes = notes if at == number else (*notes, f"the operator ran in step {at}; the batch is that step's")
        if operation is None:
            return BadStep(number, places, "did not repeat", None, batch, is_same, notes)
        return BadStep(number, places, "given" if operation.given else "found", operation, batch, is_same, notes)

    @staticmethod
    def _why_not(kept: KeptStep | None, again: SecondRun) -> str:
        if is_distributed():
            return "there are other ranks, which would have to run the step again too; run this rank's batch alone"
        if again.run is None:
            return again.note or "nothing says how to run the step again: give step_fn="
        return "" if kept is not None else "the beginning of the step is not kept any more"

    def _protected(self, number: int, again: SecondRun) -> tuple[BadOperation | None, int, bool | None, str]:
        """Run a step again; return what was found, in which step, whether it ended as the first time, and a note.

        The run stays as it is.
        """
        guard = Guard(*self._parts()[:4], loader=self._parts()[4])
        guard.save(["trains"])
        put_back = None if self._attributes is None else self._attributes()
        is_latest = number == self.steps - 1
        end = self._end() if again.is_step and is_latest else None
        try:
            with in_phase("intervention"), self._watch.paused(), guard.protecting("first bad operation"):
                run, note = self._run_again(number, again)
                is_same = None if end is None else self._ends_as(end)
                found, at = run.first, number
                if run.begins_bad and self._kept.has(number - 1):
                    # The step before has made it, in a gradient or in the optimizer.
                    with suppress(_UnrepeatedError):
                        earlier = self._run_again(number - 1, again)[0].first
                        if earlier is not None and not earlier.given:
                            found, at = earlier, number - 1
        finally:
            if put_back is not None:
                put_back()
            guard.release()
        return found, at, is_same, note

    def _run_again(self, number: int, again: SecondRun) -> tuple[OperatorRun, str]:
        assert again.run is not None
        run_by = BadOperationFinder._run_again.__code__
        try:
            kept = self._kept.back_to(number, again.run)
            difference = "" if kept.marks is None else kept.marks.difference(self._model)
            if difference == "other":
                raise _UnrepeatedError
            with torch.compiler.set_stance("force_eager"), OperatorRun(self._model, run_by) as run:
                self._run = run
                run.note_end(again.run(kept))
            return run, _ROUNDED if difference else ""
        except _UnrepeatedError:
            raise
        except Exception as error:
            raise _SecondRunError(error) from error
        finally:
            self._run = None

    def _ends_as(self, end: bytes) -> bool | None:
        """Return whether the state has the digest ``end``; None if that tells nothing, since no parameter is finite."""
        if self._end() != end:
            return False
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return True if any(bool(each.detach().isfinite().any()) for each in trained) else None

    def _end(self) -> bytes:
        return digest([*self._model.parameters(), *self._model.buffers()])


class _UnrepeatedError(Exception):
    """The steps before did not lead to the state in which the step began."""


class _SecondRunError(Exception):
    """The step raised when it was run again."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _describe(kept: KeptStep | None, number: int | None = None) -> str:
    """Return the batch of a step in words; of several, the one in which the operator of that ``number`` ran."""
    if kept is None:
        return ""
    if isinstance(kept.batch, FollowedBatch):
        return kept.batch.describe(number)
    return describe_batch(kept.batch, kept.ids)


def _is_of(kind: str) -> Callable[[str], bool]:
    """Return a function that tells whether a label is of that kind of flow; that of the model is the kind alone."""
    return lambda label: label.rpartition("/")[2] == kind


def _scales(scaler: Any) -> bool:
    return scaler is not None and callable(getattr(scaler, "is_enabled", None)) and bool(scaler.is_enabled())
