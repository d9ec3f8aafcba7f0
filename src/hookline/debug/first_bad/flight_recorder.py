"""Record the last steps of a run, and write them when something happens: NaN, a loss spike, an exception.

A lifecycle hook for the loops, run files, and any loop that `hookline.follow` follows. It listens to the steps of the
repeated blocks of the model, and writes by `write_flight`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import describe_batch
from hookline.distributed.ranks import this_rank
from hookline.errors import HooklineError, OptionError
from hookline.files import replace_file
from hookline.lifecycle.hook import TrainingHook
from hookline.observe.watch.monitor import StepListener, StepRows, listen
from hookline.observe.watch.row import BAD, COUNT, FIRES, SQUARES, SUM
from hookline.plain import to_plain
from hookline.report.anomalies import LossHistory
from hookline.report.report_runs import FLIGHT_FILE, FLIGHT_FORMAT, FLIGHT_VERSION
from hookline.sites.wrappers import clean_modules
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.hook_types import Target
    from hookline.lifecycle.context import RunDataContext
    from hookline.training.run import RunStep

logger = logging.getLogger("hookline.debug.flight_recorder")


class FlightRecorder(TrainingHook):
    """Record the last steps; write them to a file when something happens.

    Recipe: ``HookManager(hooks=[hookline.debug.FlightRecorder()])``; ``hookline run EXPERIMENT --hooks
    flight_recorder``; in any other loop::

        with hookline.follow(model, optimizer, [hookline.debug.FlightRecorder(to="flight.json")], loader=loader):
            for batch in loader:
                train_step(batch)
        print(hookline.debug.read_flight("flight.json"))

    A step leaves its loss, learning rate, batch, and mean, norm and NaN of what the blocks of the model
    return and of its gradients. Nothing waits for the device. The report of the run shows the file as "the minutes
    before".

    Args:
        to: The file; by default ``flight_recorder.json`` beside the log of the run, or in its folder. Rank 1 of several
            writes ``flight_recorder.rank_1.json`` beside it, and so on.
        keep: How many steps are kept.
        target: Which modules; by default the elements of the longest ``ModuleList`` of the model, else ``Sequential``.
    """

    name = "flight_recorder"
    description = "keep the last steps, and write them at NaN, a loss spike or an exception"
    hook_points = frozenset({HookPoint.POST_STEP})
    wraps_steps = True
    pure = True
    debug = True

    def __init__(self, *, to: str | Path | None = None, keep: int = 64, target: Target = None) -> None:
        if keep < 1:
            raise OptionError(f"keep= is a number of steps, 1 or more; got {keep!r}.")
        self._to = None if to is None else Path(to)
        self._folder: Path | None = None
        self._target = target
        self._steps: deque[_FlightStep] = deque(maxlen=keep)
        self._listener: StepListener | None = None
        self._wraps = False
        self._handled: BaseException | None = None
        """What was being handled when the run began: no error of the run."""
        self.reset()

    def reset(self) -> None:
        """Forget the last run."""
        self._steps.clear()
        self._losses = LossHistory()
        self._last_bad = -2
        self._has_failed = False
        self.written: list[str] = []
        """Why the file was written, each time."""

    # -- the run -----------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """Where the file is written, of rank 1 and so on beside that of rank 0; None if nothing says where."""
        log = None if self.manager is None else self.manager.fan_out.log
        folder = self._folder if log is None else log.parent
        path = self._to or (None if folder is None else folder / FLIGHT_FILE)
        rank = this_rank()
        return path if path is None or not rank else path.with_name(f"{path.stem}.rank_{rank}{path.suffix}")

    def set_run_context(self, **context: Any) -> None:
        """Learn where the run is kept."""
        if context.get("run_dir") is not None:
            self._folder = Path(context["run_dir"])

    def start(self, model: nn.Module) -> None:
        """Begin to record; a model that cannot be watched is no reason to end a run."""
        target = blocks_of(model) if self._target is None else self._target
        self._wraps, self._handled = False, sys.exception()
        try:
            self._listener = listen(model, target, on=("forward", "backward"), stats=("mean", "norm"))
        except HooklineError as error:
            logger.warning("no flight recorder: %s", error)

    def finish(self) -> None:
        """Judge the last steps, write them if an exception ends the run, and take everything off."""
        if self._listener is None:
            return
        self._take(self._listener.arrived(wait=True))
        error = sys.exception()
        if error is not self._handled and not isinstance(error, SystemExit):  # sys.exit() is no error
            self._write_error(error)
        self._listener.remove(quiet=True)
        self._listener = self._handled = None

    def around_step(self, step: RunStep, batch: Any) -> Any:
        """Make a step, and record it."""
        self._wraps = True
        run, told = step.run, describe_batch(batch, step.run.batch_idx, step.run.epoch)
        try:
            result = step(batch)
        except BaseException as error:
            self._add(run.step, run.epoch, told, run.lr, None)
            self._write_error(error)
            raise
        self._add(run.step, run.epoch, told, run.lr, result.loss)
        return result

    def compute(self, ctx: RunDataContext) -> None:
        """Record a step of a loop that is only followed."""
        if not self._wraps:
            batch = describe_batch(ctx.batch_data, ctx.batch_idx, ctx.epoch)
            self._add(ctx.step or 0, ctx.epoch, batch, ctx.lr, ctx.raw("loss"))

    def _add(self, number: int, epoch: int | None, batch: str, lr: Any, loss: Any) -> None:
        if self._listener is not None:
            self._steps.append(_FlightStep(number, epoch, batch, lr, loss))
            self._listener.end_step(number, loss if isinstance(loss, Tensor | float) else None)
            self._take(self._listener.arrived())

    def _take(self, arrived: list[StepRows]) -> None:
        """Give steps their numbers, and write if they are bad."""
        by_number = {step.number: step for step in self._steps}
        for rows in arrived:
            step = by_number.get(rows.number)
            if step is None:
                continue
            first = step.take(rows)
            if first:
                is_first, self._last_bad = step.number > self._last_bad + 1, step.number
                if is_first:
                    self.write(f"NaN or infinity at {first} in step {step.number}")
            if self._losses.add(step.loss_value):
                self.write(f"a loss spike, {step.loss_value:.4g} in step {step.number}")

    def _write_error(self, error: BaseException | None) -> None:
        reason = f"{type(error).__name__}: {error}"
        if error is not None and reason not in self.written[-1:]:
            self.write(reason)

    def write(self, reason: str) -> Path | None:
        """Write the last steps to the file now; return where it is. May be called in a signal handler."""
        path = self.path
        if path is None:
            return None
        by_number = {step.number: step for step in self._steps}
        for rows in [] if self._listener is None else self._listener.coming():  # which `_take` gets again
            if rows.number in by_number:
                by_number[rows.number].take(rows)
        try:
            write_flight(path, reason, [step.facts() for step in self._steps])
        except OSError as error:  # a full disk, a folder that is gone: no reason to end the run
            if not self._has_failed:
                logger.warning(
                    "the last steps cannot be written to %s, because of %s; the run continues, and this is reported "
                    "once. Next: make room there, or give FlightRecorder(to=...) another file",
                    path,
                    error,
                )
            self._has_failed = True
            return None
        self.written.append(reason)
        logger.warning("flight recorder: %s; steps until then, %d in all: %s", reason, len(self._steps), path)
        return path


class _FlightStep:
    """One step that is kept."""

    __slots__ = ("bad", "batch", "epoch", "loss", "lr", "number", "statistics", "time")

    def __init__(self, number: int, epoch: int | None, batch: str, lr: Any, loss: Any) -> None:
        self.number, self.epoch, self.batch, self.lr = number, epoch, batch, lr
        self.loss = loss.detach() if isinstance(loss, Tensor) else loss
        self.time = time.time()
        self.statistics: dict[str, dict[str, float]] = {}
        self.bad: list[str] = []
        """The places that were not finite, by their first bad calls."""

    @property
    def loss_value(self) -> float | None:
        """The loss as a number; waits for the device."""
        return None if self.loss is None else float(self.loss)

    def take(self, rows: StepRows) -> str:
        """Take the statistics that have arrived; return the first place that was not finite, ``"loss"`` or nothing."""
        for place, row in rows.of_places():
            count, fires = max(row[COUNT], 1.0), max(row[FIRES], 1.0)
            norm = math.sqrt(row[SQUARES] / fires) if row[SQUARES] >= 0 else math.nan
            self.statistics[place.label] = {"mean": float(row[SUM] / count), "norm": norm, "bad": float(row[BAD])}
        calls = rows.bad_places()
        self.bad = [place.label for place in calls.places]
        self.loss = self.loss if rows.loss is None else rows.loss
        is_bad = rows.loss is not None and not math.isfinite(float(rows.loss))
        return calls.first or ("loss" if is_bad else "")

    def facts(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "step": self.number,
            "epoch": self.epoch,
            "time": self.time,
            "loss": self.loss_value,
            "lr": None if self.lr is None else float(self.lr),
            "batch": self.batch,
            "bad": ", ".join(self.bad[:3]) + (f" and {len(self.bad) - 3} more" if len(self.bad) > 3 else ""),
            "statistics": self.statistics,
        }


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the elements of its longest ``ModuleList``, else ``Sequential``."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [list(each.children()) for _, each in clean_modules(model) if isinstance(each, kind)]
        if any(lists):
            return max(lists, key=len)
    return list(model.children()) or [model]


# -- the file --------------------------------------------------------------------------------------------------------


def write_flight(path: Path, reason: str, steps: list[dict[str, Any]]) -> None:
    """Write steps, and why they are written."""
    found = {"format": FLIGHT_FORMAT, "version": FLIGHT_VERSION, "reason": reason, "steps": steps}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(to_plain(found), allow_nan=False))
