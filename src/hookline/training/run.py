"""Run training on behalf of a loop: count steps, fire hooks, hand metrics on, save.

`epoch_loop` and `step_loop` call its methods in order; it calls `HookManager`, `Contexts`, `GradientRetention` and
`Saving`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.errors import HooklineWarning, OptionError
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.output import to_host
from hookline.lifecycle.ranks import OneProcess, join_ranks
from hookline.lifecycle.trackers import tell_scaler, tell_watches
from hookline.messages import caller_stacklevel, type_name
from hookline.phases import in_phase
from hookline.training.loop_contexts import Contexts
from hookline.training.loop_result import LoopResult
from hookline.training.rank_model import check_alike, warn_of_join
from hookline.training.retention import GradientRetention
from hookline.training.run_step import step_through_hooks
from hookline.training.saving import Saving
from hookline.training.step import Mean, StepResult
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.training.checkpoints import Checkpoints
    from hookline.training.experiment_adapter import ExperimentAdapter
    from hookline.training.progress import LoopProgress

__all__ = ["Run", "start_run"]

_TRAINING: Final = in_phase("train")

logger = logging.getLogger(__name__)


class Run:
    """One training run; a loop calls its methods in order."""

    def __init__(
        self, adapter: ExperimentAdapter, manager: HookManager | None, ranks: OneProcess | None = None
    ) -> None:
        self.adapter = adapter
        self.manager = manager
        self.ranks = ranks or OneProcess()
        """What keeps this rank together with the others."""
        self.in_epochs = adapter.loop == "epoch"
        """Whether it is counted in epochs; in steps if not."""
        self.retention = None if manager is None else GradientRetention(adapter, manager)
        self._contexts = None if manager is None or self.retention is None else Contexts(self, manager, self.retention)
        self.epoch = 0
        self.step = -1 if manager is None else manager.global_step
        """The step that is being made or was made last, counted from 0 over the whole run; -1 before the first."""
        self.num_epochs = self.num_steps = 0
        self.next_epoch = 0
        """In the epoch loop: the first that has not been concluded."""
        self.done = 0
        """How many steps of this epoch, or pass over the data, were made."""
        self.is_within = False
        """Whether the run goes on in the middle of an epoch, or pass, that was begun before it was resumed."""
        self.interrupted: str | None = None
        """The signal by which the run stops."""
        self._saving: Saving | None = None
        self.progress: LoopProgress | None = None
        """What shows how far it is."""
        self.stopped_early = False
        self.loss: Any = None
        """Of the step; when an epoch is over, of the epoch. On its device."""
        self.evaluation: dict[str, Any] = {}
        """The newest; `evaluated` tells whether it is of now."""
        self.evaluated = False
        self.accuracy: Any = None
        """On the training data, as the steps tell it; like the loss."""
        self.batch: Any = None
        self.batch_idx: int | None = None
        self._losses, self._accuracies = Mean(), Mean()
        wrapping = [] if manager is None else [hook for hook in manager.hooks.values() if hook.wraps_steps]
        self._make_step = step_through_hooks(self, wrapping) if wrapping else adapter.train_and_schedule

    @property
    def position(self) -> int:
        """The epoch, or the step: metrics are plotted over it."""
        return self.epoch if self.in_epochs else max(self.step, 0)

    # -- from step to step -----------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, points: tuple[HookPoint, ...]) -> None:
        """Begin an epoch; after its steps those points come."""
        self.epoch = epoch
        self.loss = self.accuracy = None
        self.evaluated = False
        self.take_loader()
        if self.num_epochs < 2 and not self.ranks.is_single:
            warn_of_join(self.adapter.model)
        if self.retention is not None:
            self.retention.begin_epoch(points, epoch)

    def take_loader(self) -> None:
        """Ask for the batches of this epoch, or pass over the data."""
        if self._saving is not None:
            self._saving.before_loader()
        self.adapter.take_loader(self.epoch)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of this epoch, or pass over the data; of one that was resumed, the rest."""
        resumed, self.is_within = self.is_within, False
        if not resumed:
            self.num_epochs += 1
            self.done = 0
        saving = self._saving
        batches = self.adapter.batches() if saving is None else saving.batches(resumed=resumed)
        for index, batch in enumerate(batches, self.done):
            self.batch_idx = index * self.adapter.accumulate
            self.done = index + 1
            yield batch

    def begin_step(self, batch: Any) -> None:
        """Begin a step on `batch`."""
        self.batch, self.loss, self.accuracy = batch, None, None
        self.num_steps += 1
        self.evaluated = False
        if self.manager is None or self.retention is None:
            self.step += 1
            self.ranks.check(self.step)
            return
        self.manager.advance_step(self.epoch if self.in_epochs else None)
        self.step = self.manager.global_step
        self.retention.begin_step(self.position)

    def train_step(self) -> None:
        """Train on the batch."""
        with _TRAINING:
            result = self._make_step(self.batch)
        if self.num_steps == 1 and not self.ranks.is_single:
            check_alike(self.adapter.model, self.ranks)
        self.take_result(result)

    def take_result(self, result: StepResult) -> None:
        """Take in the outcome of a step: its loss and metrics, its gradients if a hook needs them."""
        self.loss, self.accuracy = result.loss, result.metrics.get("train_acc")
        self._losses.add(result.loss)
        self._accuracies.add(self.accuracy)
        if self.retention is not None:
            self.retention.end_step(trained=result.trained)
        if self.manager is not None:
            for name, value in result.metrics.items():
                self.manager.take_record(f"train/{name}", value)  # goes out with the step metrics of hooks

    def end_epoch(self) -> None:
        """End the steps of an epoch: write step metrics, average the loss and accuracy, step the scheduler."""
        self.flush()
        self.batch = self.batch_idx = None
        self.loss, self.accuracy = self._losses.take(), self._accuracies.take()
        if not self.ranks.is_single:  # else the numbers stay on their device until they are read
            found = self.ranks.reduce(to_host({"loss": self.loss, "accuracy": self.accuracy}), "loss of the epoch")
            self.loss, self.accuracy = found["loss"], found["accuracy"]
        if self.retention is not None:
            self.retention.end()
        self.adapter.step_scheduler("epoch", self.loss)

    @property
    def newest_metrics(self) -> dict[str, Any]:
        """The loss, and the newest evaluation."""
        return {"loss": self.loss, **self.evaluation}

    def begin_stretch(self, last: int | None) -> None:
        """Begin steps of which `last` is the last before a snapshot; None if the run ends first. For the step loop."""
        if self.retention is not None:
            self.retention.begin(() if last is None else (HookPoint.SNAPSHOT,), last or 0)

    def end_stretch(self) -> None:
        """End them: write step metrics, finish mean gradients."""
        self.flush()
        if self.retention is not None:
            self.retention.end()

    def evaluate(self) -> None:
        """Evaluate the model, if the experiment can."""
        if self.adapter.evaluates:
            self.evaluation, self.evaluated = self.adapter.evaluate(), True
            if not self.ranks.is_single:
                self.evaluation = self.ranks.reduce(to_host(self.evaluation), "evaluation")

    def ask_to_stop(self) -> bool:
        """Ask the experiment whether that was the last epoch, or step, and remember the answer."""
        enough = self.adapter.should_stop(self.position, self.newest_metrics)
        if self.adapter.may_stop:
            enough = any(self.ranks.gather(enough, "asking whether to stop"))
        self.stopped_early = enough
        return enough

    # -- checkpoints -----------------------------------------------------------------------------------------

    @contextmanager
    def saved_to(self, checkpoints: Checkpoints | None, *, resume: bool, settings: Mapping[str, Any]) -> Iterator[None]:
        """Save the run there for as long as the block lasts; load it first, if asked to."""
        if checkpoints is None:
            if resume:
                raise OptionError("resume=True goes on from a checkpoint: say where they are, checkpoints=.")
            yield
            return
        self._saving = Saving(self, checkpoints, settings)
        with self._saving.active(resume=resume):
            yield

    def begin(self) -> bool:
        """Begin training; return whether it goes on from a checkpoint."""
        return self._saving is not None and self._saving.begin()

    def show_progress_from(self, first: int) -> None:
        """Begin to show how far the run is, if that was asked for; ``first`` is its first epoch, or step."""
        if self.progress is not None:
            self.progress.begin(first)

    def end_step(self) -> bool:
        """End a step with its hooks and snapshot; save if it is time to. Return whether the run stops here."""
        if self.progress is not None:
            self.progress.end_step()
        return self._saving is not None and self._saving.save_after_step()

    def finish_epoch(self) -> bool:
        """End an epoch with its hooks; save if it is time to. Return whether the run stops here."""
        if self.progress is not None:
            self.progress.end_epoch()
        self.next_epoch = self.epoch + 1
        return self._saving is not None and self._saving.save_after_epoch()

    def end_pass(self) -> None:
        """End a pass over the data; the step loop calls this."""
        self.epoch += 1
        self.done = 0
        if self._saving is not None:
            self._saving.save_after_pass()

    def finish(self) -> None:
        """Save the run at its end."""
        if self._saving is not None:
            self._saving.finish()

    def state_dict(self, *, within: bool) -> dict[str, Any]:
        """Return the position, ``within`` an epoch or pass or between two, and the sums so far."""
        return {
            "epoch": self.epoch if within or not self.in_epochs else self.next_epoch,
            "within": within,
            "done": self.done if within else 0,
            "step": self.step,
            "num_epochs": self.num_epochs,
            "num_steps": self.num_steps,
            "stopped_early": self.stopped_early,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "evaluation": self.evaluation,
            "losses": self._losses.state,
            "accuracies": self._accuracies.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.epoch = self.next_epoch = state["epoch"]
        self.is_within, self.done = state["within"], state["done"]
        for name in ("step", "num_epochs", "num_steps", "stopped_early", "loss", "accuracy"):
            setattr(self, name, state[name])
        self.evaluation = dict(state["evaluation"])
        self._losses.state, self._accuracies.state = state["losses"], state["accuracies"]

    # -- hooks and sinks -------------------------------------------------------------------------------------

    def fire(self, point: HookPoint) -> None:
        """Fire the hooks that are due here."""
        if self._contexts is not None:
            self._contexts.fire(point)

    def report_evaluation(self, point: HookPoint, group: str = "eval") -> None:
        """Hand the evaluation to the sinks, if it was made just now."""
        if self.manager is not None and self.evaluated:
            metrics = {f"{group}/{name}": value for name, value in self.evaluation.items()}
            self.manager.emit_metrics(metrics, self.position, point, reduced=True)

    def flush(self) -> None:
        """Hand the metrics of single steps to the sinks."""
        if self.manager is not None:
            self.manager.flush_step_metrics(self.position)

    # -- the end ---------------------------------------------------------------------------------------------

    def result(self) -> LoopResult:
        """Return the outcome."""
        loss = None if self.loss is None else float(self.loss)
        loss = self.ranks.reduce({"loss": loss}, "loss of the run")["loss"]
        metrics = {name: _plain(value) for name, value in self.evaluation.items()}
        return LoopResult(
            self.num_epochs, self.num_steps, self.stopped_early, loss, metrics, interrupted=self.interrupted
        )

    @contextmanager
    def written_at_the_end(self) -> Iterator[None]:
        """Start hooks, and at the end finish them and write everything that they returned, however the block ends."""
        try:
            if self.manager is not None:
                optimizer = self.adapter.optimizer
                tell_watches(self.manager.hooks.values(), [] if optimizer is None else [optimizer])
                tell_scaler(self.manager.hooks.values(), self.adapter.scaler)
                self.manager.start(self.adapter.bare_model)
            yield
        except BaseException as error:
            lost = self._leave_ranks(error)
            self._release()
            try:
                self._write()
            except Exception:
                # What ended the run is what the user has to see.
                logger.exception("Not all metrics could be written when the run ended by %s", type(error).__name__)
            if lost is not None:
                raise lost from error
            raise
        self._release()
        self._write()

    def _leave_ranks(self, error: BaseException) -> Exception | None:
        """Tell the other ranks that this one ends; return an error that says more, if another one ended first."""
        if self.manager is not None:
            return self.manager.leave_ranks(error)
        return self.ranks.leave(error)

    def _release(self) -> None:
        self.batch = None
        if self.manager is not None:
            self.manager.finish()
        if self.retention is not None and self._contexts is not None:
            self.retention.release()
            self._contexts.release()

    def _write(self) -> None:
        if self.manager is not None:
            self.flush()
            self.manager.flush_sinks()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# -- the beginning ------------------------------------------------------------------------------------------------


def start_run(
    adapter: ExperimentAdapter,
    manager: HookManager | None,
    *,
    points: frozenset[HookPoint],
    first: int,
    resume: bool,
    run_context: Mapping[str, Any] | None,
) -> Run:
    """Check the options and return a run at its beginning; one that goes on (`first` over 0) resets no hooks."""
    if manager is not None and not isinstance(manager, HookManager):
        raise OptionError(f"manager= is a HookManager(hooks=[...], sinks=[...]), got {type_name(manager)}.")
    if resume and first:
        raise OptionError(
            f"resume=True goes on where the run was saved, and first_{adapter.loop}={first} elsewhere: give one of "
            "them."
        )
    if not adapter.model.training:  # parts of a training model may be in evaluation mode on purpose
        adapter.model.train()
    if manager is not None:
        _prepare(manager, adapter.loop, anew=first == 0, run_context=run_context or {})
        for sentence in manager.plan().will_not_fire(points):
            warnings.warn(sentence, HooklineWarning, stacklevel=caller_stacklevel())
    run = Run(adapter, manager, join_ranks({}) if manager is None else manager.meet_ranks())
    run.next_epoch = first
    if adapter.loop == "step":
        _check_step(run, first)
    return run


def _prepare(manager: HookManager, loop: str, *, anew: bool, run_context: Mapping[str, Any]) -> None:
    manager.set_loop_type(loop)
    if anew:
        manager.reset_all()
    if run_context:
        manager.set_run_context(**run_context)


def _check_step(run: Run, first: int) -> None:
    """Refuse a first step that is not the manager's: schedules go by the manager's count of steps."""
    if run.manager is None:
        run.step = first - 1
    elif run.step != first - 1:
        raise OptionError(
            f"first_step={first} goes on from step {first - 1}, and the manager is at step {run.step}: have it load "
            "the state_dict() that it had then."
        )
