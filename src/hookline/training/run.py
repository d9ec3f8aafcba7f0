"""Run training on behalf of a loop: count steps, make contexts, fire hooks, hand metrics on, save.

`epoch_loop`, `step_loop` and the adapters of trainers call the methods of a `Run` in order; it calls `HookManager` and,
where the run is saved, `Saving`. A `GradientRetention` keeps what a hook that will be due needs: mean gradients, those
of the step before, the state before the epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from hookline.error_policy import warn_user
from hookline.errors import OptionError
from hookline.guard.guard import Guard, rollback
from hookline.guard.loaders import copy_loader, private_generator
from hookline.guard.model_context import ModelDataContext
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, roots_of
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.manager import to_host
from hookline.lifecycle.ranks import OneProcess
from hookline.messages import type_name
from hookline.phases import in_eval_mode, in_phase
from hookline.sites.wrappers import clean_modules
from hookline.training.experiment import MicroBatches, StepResult, as_result, bare_model
from hookline.training.ranks import RankModel, check_alike
from hookline.training.state import GuardedState, Passes
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.manager import HookManager
    from hookline.screen import RunProgress
    from hookline.training.experiment import Experiment

_TRAINING: Final = in_phase("train")
_MOST_METRICS: Final = 5
"""Beside a bar."""

logger = logging.getLogger(__name__)


class Run:
    """One training run; a loop calls its methods in order."""

    def __init__(
        self,
        experiment: Experiment,
        loop: str,
        manager: HookManager,
        ranks: OneProcess | None = None,
        *,
        passes: Passes | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.experiment = experiment
        self.loop = loop
        """Which counts: "epoch" or "step"."""
        self.manager = manager
        self.ranks = OneProcess() if ranks is None else ranks
        """What keeps this rank together with the others; None in one process."""
        self.passes = passes or Passes(experiment)
        self.schedule = schedule or Schedule(experiment, loop)
        self.guarded = GuardedState(experiment)
        self.retention = GradientRetention(experiment, manager, self.guarded)
        self.has_loss = experiment.has_own("loss_fn") or not experiment.has_own("train_step")
        """Whether a loss can be had without a step."""
        self.saving = NotSaved(self)
        self.progress = NotShown()
        self._guard: tuple[tuple[Any, ...], Guard] | None = None
        """What is guarded, and its guard."""
        self._put_back: Callable[[], None] | None = None
        """Puts the experiment's attributes back, once an intervention could have changed them."""
        self._may_stop, self._has_target = experiment.has_own("should_stop"), experiment.has_own("target_gradient")
        self._make_step = step_through_hooks(self, [hook for hook in manager.hooks.values() if hook.wraps_steps])
        self.epoch = 0
        self.step = manager.global_step
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
        self.stopped_early = False
        self.loss: Any = None
        """Of the step; when an epoch is over, of the epoch. On its device."""
        self.accuracy: Any = None
        """On the training data, as the steps tell it; like the loss."""
        self.evaluation: dict[str, Any] = {}
        """The newest; `evaluated` tells whether it is of now."""
        self.evaluated = False
        self.batch: Any = None
        self.batch_idx: int | None = None
        self._losses, self._accuracies = Mean(), Mean()

    @property
    def position(self) -> int:
        """The epoch, or the step: metrics are plotted over it."""
        return self.epoch if self.loop == "epoch" else max(self.step, 0)

    @property
    def model(self) -> nn.Module:
        """The model as hooks see it, and may differentiate it: without what averages gradients over ranks."""
        return bare_model(self.experiment.model)

    @property
    def lr(self) -> Any:
        """The learning rate of the optimizer's first group; a tensor if it is one there."""
        groups = getattr(self.experiment.optimizer, "param_groups", ())
        return groups[0]["lr"] if groups else None

    # -- from step to step -----------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, points: tuple[HookPoint, ...]) -> None:
        """Begin an epoch; after its steps those points come."""
        self.epoch = epoch
        self.loss = self.accuracy = None
        self.evaluated = False
        self.passes.take_loader(epoch)
        self.retention.begin_epoch(points, epoch)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of this epoch, or pass over the data; of one that was resumed, the rest."""
        resumed, self.is_within = self.is_within, False
        if not resumed:
            self.num_epochs += 1
            self.done = 0
        for index, batch in enumerate(self.saving.batches(resumed=resumed), self.done):
            self.batch_idx = index * self.experiment.accumulate
            self.done = index + 1
            yield batch

    def begin_step(self, batch: Any) -> None:
        """Begin a step on `batch`."""
        self.batch, self.loss, self.accuracy = batch, None, None
        self.num_steps += 1
        self.evaluated = False
        self.step = self.manager.advance_step(self.epoch if self.loop == "epoch" else None)
        self.retention.begin_step(self.position)

    def train_step(self) -> None:
        """Train on the batch."""
        with _TRAINING:
            result = self._make_step(self.batch)
        if self.num_steps == 1 and not self.ranks.is_single:
            check_alike(self.experiment.model, self.ranks)
        self.take_result(result)

    def train_and_schedule(self, batch: Any) -> StepResult:
        """Make a step of the experiment, then of a scheduler that counts steps; interventions train by it too."""
        result = as_result(self.experiment.train_step(batch))
        if result.trained:
            self.schedule.step("step", result.loss)
        return result

    def take_result(self, result: StepResult) -> None:
        """Take in the outcome of a step: its loss and metrics, its gradients if a hook needs them."""
        self.loss, self.accuracy = result.loss, result.metrics.get("train_acc")
        self._losses.add(result.loss)
        self._accuracies.add(self.accuracy)
        self.retention.end_step(trained=result.trained)
        for name, value in result.metrics.items():
            self.manager.output.record(f"train/{name}", value)  # goes out with the step metrics of hooks

    def end_epoch(self) -> None:
        """End the steps of an epoch: write step metrics, average the loss and accuracy, step the scheduler."""
        self.flush()
        self.batch = self.batch_idx = None
        own = {"loss": self._losses.take(), "accuracy": self._accuracies.take()}
        means = self._of_all_ranks(own, "loss of the epoch")
        self.loss, self.accuracy = means["loss"], means["accuracy"]
        self.retention.end()
        self.schedule.step("epoch", self.loss)

    def begin_stretch(self, last: int | None) -> None:
        """Begin steps of which `last` is the last before a snapshot; None if the run ends first. For the step loop."""
        self.retention.begin(() if last is None else (HookPoint.SNAPSHOT,), last or 0)

    def end_stretch(self) -> None:
        """End them: write step metrics, finish mean gradients."""
        self.flush()
        self.retention.end()

    def evaluate(self) -> None:
        """Evaluate the model, if the experiment can."""
        if self.experiment.has_own("evaluate"):
            self.evaluation, self.evaluated = self._of_all_ranks(self._evaluation(), "evaluation"), True

    def _evaluation(self) -> dict[str, Any]:
        """Return the experiment's metrics; modes, random streams and trackers are as before afterwards."""
        model = self.experiment.model
        random = RandomStates()
        try:
            with in_phase("eval"), torch.no_grad(), in_eval_mode(model):
                # What we have wrapped, the experiment does not know as wrapped; and an evaluation needs no collectives.
                found = self.experiment.evaluate(self.model if isinstance(model, RankModel) else model)
        finally:
            random.restore()
        if found is not None and not isinstance(found, Mapping):
            raise OptionError(f"evaluate() returns a dictionary of metrics, or None; got {type_name(found)}.")
        return dict(found or {})

    def _of_all_ranks(self, numbers: dict[str, Any], what: str) -> dict[str, Any]:
        """Return the numbers of all ranks; of one process alone, its own, which stay on their device."""
        return numbers if self.ranks.is_single else self.ranks.reduce(to_host(numbers), what)

    @property
    def newest_metrics(self) -> dict[str, Any]:
        """The loss, and the newest evaluation."""
        return {"loss": self.loss, **self.evaluation}

    def ask_to_stop(self) -> bool:
        """Ask the experiment whether that was the last epoch, or step, and remember the answer."""
        if self._may_stop:
            enough = bool(self.experiment.should_stop(self.position, self.newest_metrics))
            self.stopped_early = any(self.ranks.gather(enough, "asking whether to stop"))
        return self.stopped_early

    # -- its place, to save it ---------------------------------------------------------------------------------

    def end_step(self) -> bool:
        """End a step with its hooks and snapshot; save if it is time to. Return whether the run stops here."""
        self.progress.end_step()
        return self.saving.save_after_step()

    def finish_epoch(self) -> bool:
        """End an epoch with its hooks; save if it is time to. Return whether the run stops here."""
        self.progress.end_epoch()
        self.next_epoch = self.epoch + 1
        return self.saving.save_after_epoch()

    def end_pass(self) -> None:
        """End a pass over the data; the step loop calls this."""
        self.epoch += 1
        self.done = 0
        self.saving.save_after_pass()

    def state_dict(self, *, within: bool) -> dict[str, Any]:
        """Return the position, ``within`` an epoch or pass or between two, and the sums so far."""
        return {
            "epoch": self.epoch if within or self.loop == "step" else self.next_epoch,
            "within": within,
            "done": self.done if within else 0,
            **{name: getattr(self, name) for name in _SAVED},
            "losses": self._losses.state,
            "accuracies": self._accuracies.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.epoch = self.next_epoch = state["epoch"]
        self.is_within, self.done = state["within"], state["done"]
        for name in _SAVED:
            setattr(self, name, state[name])
        self._losses.state, self._accuracies.state = state["losses"], state["accuracies"]

    # -- hooks and sinks -------------------------------------------------------------------------------------

    def fire(self, point: HookPoint) -> None:
        """Fire the hooks that are due here."""
        if point not in self.manager.plan.points:
            return
        try:
            self.manager.fire(point, partial(self._run_context, point), self._model_context, epoch=self.epoch)
        finally:
            put_back, self._put_back = self._put_back, None
            if put_back is not None:  # what an intervention has set on the experiment
                put_back()

    def _run_context(self, point: HookPoint) -> RunDataContext:
        experiment, kept, lr = self.experiment, self.retention, self.lr
        of_now = self.evaluation if self.evaluated else {}
        return RunDataContext(
            point, self.epoch, self.step if self.step >= 0 else None, self.model, experiment.config, self.passes.loader,
            self.batch_idx, self.batch, self.loss, of_now.get("train_acc", self.accuracy), of_now.get("val_acc"),
            lr.detach().clone() if isinstance(lr, Tensor) else lr,  # a capturable optimizer has it on the device
            accumulated_grads=kept.mean, prev_step_grads=kept.previous,
            target_grad=partial(self._target_gradient, max(self.step, 0)) if self._has_target else None,
            profiler=self.manager.profiler, eval_metrics=of_now or None,
        )  # fmt: skip

    def _target_gradient(self, step: int) -> Mapping[str, Tensor] | None:
        """Return the target gradient at a step; leave everything else as it was."""
        put_back = self.guarded.save_attributes()
        *saved, loader = self.guarded.parts(self.passes.loader)
        try:
            with in_phase("intervention"), rollback(*saved, loader=loader, scope="grads"):
                return self.experiment.target_gradient(self.model, step)
        finally:
            put_back()

    def _model_context(self) -> ModelDataContext:
        self._put_back = self.guarded.save_attributes()
        return _LoopModelContext(
            self,
            scheduler=self.guarded.all_but_optimizer,
            scaler=self.experiment.scaler,
            loader=self.passes.loader,
            loss_fn=partial(_mean_loss, self.experiment.loss_fn) if self.has_loss else None,
            batch=self.batch,
            train_step=self.train_and_schedule,
            shuffled_loader=self.experiment.shuffled_loader,
            pre_epoch=self.retention.pre_epoch,
            guard=self._make_guard(),
        )

    def _make_guard(self) -> Guard:
        """Return the guard of the last firing, since it keeps its buffers; a new one if what it guards has changed."""
        guarded = self.guarded.parts(self.passes.loader)
        if self._guard is None or any(a is not b for a, b in zip(guarded, self._guard[0], strict=True)):
            self._guard = guarded, Guard(*guarded[:-1], loader=guarded[-1])
        return self._guard[1]

    def report_evaluation(self, point: HookPoint, group: str = "eval") -> None:
        """Hand the evaluation to the sinks, if it was made just now."""
        if self.evaluated:
            metrics = {f"{group}/{name}": value for name, value in self.evaluation.items()}
            self.manager.emit_metrics(metrics, self.position, point, reduced=True)

    def flush(self) -> None:
        """Hand the metrics of single steps to the sinks."""
        self.manager.flush_step_metrics(self.position)

    @contextmanager
    def written_at_the_end(self) -> Iterator[None]:
        """Start hooks, and at the end finish them and write everything that they returned, however the block ends."""
        hooks, output = self.manager.hooks.values(), self.manager.output
        try:
            for hook in hooks:
                hook.take_scaler(self.experiment.scaler)
            self.manager.hooks.start(self.model, output.ranks)
            yield
        except BaseException as error:
            lost = output.met.leave(error)  # says more, if another rank ended first
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

    def _release(self) -> None:
        self.batch = None
        self.manager.hooks.finish()
        self.retention.release()
        self._guard = None

    def _write(self) -> None:
        self.flush()
        self.manager.flush_sinks()


_SAVED: Final = ("step", "num_epochs", "num_steps", "stopped_early", "loss", "accuracy", "evaluation")


class Mean:
    """Average a number over the steps of an epoch, on its device."""

    state: tuple[Any, int] = (None, 0)
    """The sum so far, and the number of steps in it."""

    def add(self, number: Any) -> None:
        """Add the number of a step; None does not count."""
        if number is None:
            return
        if isinstance(number, Tensor):
            number = number.detach() if number.requires_grad else number
            if number.dtype is not torch.float32:  # half precision would stop growing after a few hundred steps
                number = number.to(torch.promote_types(number.dtype, torch.float32))
        total, count = self.state
        self.state = (number if total is None else total + number, count + 1)

    def take(self) -> Any:
        """Return the mean since the last time, a tensor if one was among the numbers; None of nothing."""
        (total, count), self.state = self.state, (None, 0)
        return total / count if count else None


class Schedule:
    """Step the scheduler of an experiment."""

    def __init__(self, experiment: Experiment, loop: str) -> None:
        self._experiment = experiment
        self._loop = loop

    def step(self, per: str, loss: Any) -> None:
        """Step the scheduler, if it counts `per`: "epoch" or "step"."""
        scheduler = self._experiment.scheduler
        usual = "step" if isinstance(scheduler, OneCycleLR | CyclicLR) else self._loop
        if scheduler is None or per != (self._experiment.scheduler_per or usual):
            return
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        elif loss is None:
            raise OptionError("ReduceLROnPlateau goes by the training loss, and train_step() returned none.")
        else:
            scheduler.step(float(loss))


# -- gradients, for hooks ----------------------------------------------------------------------------------------


class GradientRetention:
    """Keep gradients and earlier state for hooks, from one point to the next, only if one is going to need them."""

    def __init__(self, experiment: Experiment, manager: HookManager, guarded: GuardedState) -> None:
        self._experiment = experiment
        self._manager = manager
        self._guarded = guarded
        self._gradients = Gradients(experiment.model)
        self._averages = False
        self._may_need_previous = manager.needs_prev_step_grads()  # asked once, as asking takes 3 µs a step
        self._has_trained = self._warned = False
        self.mean: dict[str, Tensor] | None = None
        """Mean gradients since `begin`, from `end` on."""
        self.previous: dict[str, Tensor] | None = None
        """Gradients of the step before the one that is being made."""
        self.pre_epoch: Snapshot | None = None
        """Everything as it was when the epoch began."""
        self._memory: Snapshot | None = None
        """Of an earlier epoch: the memory is used again, also if epochs in between did without."""

    def begin(self, points: tuple[HookPoint, ...], position: int) -> None:
        """Begin steps after which those points come, in that epoch (in the step loop: at that step)."""
        self.mean = None
        self._gradients = Gradients(self._experiment.model)  # parameters may have been replaced since
        self._averages = bool(points) and self._manager.needs_grad_accumulation_at(*points, epoch=position)

    def begin_epoch(self, points: tuple[HookPoint, ...], epoch: int) -> None:
        """Begin the steps of an epoch; keep the state before it if a hook may go back there."""
        self.begin(points, epoch)
        self.pre_epoch = None
        within = (HookPoint.PRE_EPOCH, HookPoint.PRE_STEP, HookPoint.POST_STEP, *points)
        if self._manager.needs_pre_epoch_state_at(*within, epoch=epoch):
            experiment, others = self._experiment, self._guarded.all_but_optimizer
            roots = roots_of(experiment.model, experiment.optimizer, others, experiment.scaler)
            self.pre_epoch = self._memory = Snapshot.of(roots, self._memory, gradients=False)

    def begin_step(self, position: int) -> None:
        """Keep the gradients of the step before, which are still in ``.grad``, if a hook needs them."""
        self.previous = None
        if self._may_need_previous and self._manager.needs_prev_step_grads_this_step(position):
            self.previous = self._gradients.copy()
            if not self.previous and self._has_trained:
                self._warn_of_none("those of the step before")

    def end_step(self, *, trained: bool) -> None:
        """Add the gradients of a step to their mean, if a hook needs it."""
        if not trained:
            return
        self._has_trained = True
        if self._averages and not self._gradients.add():
            self._warn_of_none("their mean")

    def end(self) -> None:
        """Finish the mean of the steps since `begin`."""
        self.previous = None
        if self._averages:  # of no step that trained, none at all; but not None, as a hook has asked for them
            self.mean = self._gradients.take_mean()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, between two steps, without copying."""
        return {"averages": self._averages, "sums": dict(self._gradients.sums), "steps": self._gradients.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._averages = state["averages"]
        self._gradients = Gradients(self._experiment.model, state["sums"], state["steps"])

    def release(self) -> None:
        """Drop everything: the run is over."""
        self.mean = self.previous = self.pre_epoch = self._memory = None
        self._gradients = Gradients(self._experiment.model)

    def _warn_of_none(self, which: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn_user(
            f"Hooks need gradients ({which}), and after train_step() no parameter has any: zero them before the "
            "backward, not after the step."
        )


class Gradients:
    """Copy and add up the gradients of a model's parameters, by names without wrappers; of tied ones once.

    One for each epoch: parameters are looked up once. It may go on from ``sums`` of so many steps.
    """

    def __init__(self, model: nn.Module, sums: Mapping[str, Tensor] | None = None, num_steps: int = 0) -> None:
        self._model = model
        self.sums = self.placed(sums or {})
        self.num_steps = num_steps
        """How many steps were added."""

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        named, seen = {}, set()
        for prefix, module in clean_modules(self._model):
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"{prefix}.{key}" if prefix else key] = parameter
        return named

    def placed(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by name, each on the device of its parameter."""
        known = self._parameters if gradients else {}
        return {name: each.to(known[name].device) for name, each in gradients.items() if name in known}

    def copy(self) -> dict[str, Tensor]:
        """Return copies of the gradients that there are now."""
        return {name: p.grad.detach().clone() for name, p in self._parameters.items() if p.grad is not None}

    def add(self) -> bool:
        """Add the gradients of the last step to a sum; one that is missing counts as zero. Return whether any is there.

        In float32 where they are narrower: 512 bfloat16 gradients of 1 would add up to 256.
        """
        self.num_steps += 1
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        with torch.no_grad():
            for name, gradient in found.items():
                if name in self.sums:
                    self.sums[name].add_(gradient)
                else:
                    self.sums[name] = _copy_to_add_to(gradient)
        return bool(found)

    def take_mean(self) -> dict[str, Tensor]:
        """Return the mean of what was added since the last time."""
        sums, num_steps = self.sums, self.num_steps
        self.sums, self.num_steps = {}, 0
        for total in sums.values():
            total.div_(num_steps)
        return sums


def _copy_to_add_to(grad: Tensor) -> Tensor:
    dense = grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()
    wide = torch.float32 if dense.dtype in (torch.bfloat16, torch.float16) else dense.dtype
    return dense.to(wide, copy=True)


# -- a run that is not saved; one that is shown, or not -------------------------------------------------------------


class NotSaved:
    """Answer a run that is not saved; `Saving` derives from it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin(self) -> bool:
        """Begin training; return whether it goes on from a checkpoint."""
        return False

    def batches(self, *, resumed: bool) -> Iterator[Any]:
        """Return the batches of the pass, or those that are left of it."""
        return self._run.passes.batches()

    def save_after_step(self) -> bool:
        """Save if it is time to; return whether the run stops here."""
        return False

    def save_after_epoch(self) -> bool:
        """Save if it is time to; return whether the run stops here."""
        return False

    def save_after_pass(self) -> None:
        """Save if it is time to; the step loop calls this."""

    def finish(self) -> None:
        """Save the run at its end."""


class NotShown:
    """Show no progress of a run."""

    def begin(self, first: int) -> None:
        """Begin with that epoch, or step: those before it are over."""

    def end_step(self) -> None:
        """Note that a step is over."""

    def end_epoch(self) -> None:
        """Note that an epoch is over."""


class LoopProgress(NotShown):
    """Move a bar on as a run goes on: by steps, or by epochs where the loader does not say how many steps one has."""

    def __init__(self, run: Run, bar: RunProgress, total: int) -> None:
        self._run, self._bar, self._total = run, bar, total
        self._by_epoch = False

    def begin(self, first: int) -> None:
        """Show the bar."""
        run = self._run
        per_epoch = 1 if run.loop == "step" else _steps_per_epoch(run.experiment)
        self._by_epoch = per_epoch is None
        if per_epoch is None:
            self._bar.start(self._total, "epochs", done=first)
        else:
            within = run.done if run.is_within and run.loop == "epoch" else 0
            self._bar.start(self._total * per_epoch, "steps", done=first * per_epoch + within)

    def end_step(self) -> None:
        """Move on by a step, if steps are counted."""
        if not self._by_epoch:
            self._bar.advance(1, self.metrics)

    def end_epoch(self) -> None:
        """Move on by an epoch, if epochs are counted."""
        self._bar.advance(int(self._by_epoch), self.metrics)

    def metrics(self) -> dict[str, float]:
        """Return the loss and the newest evaluation; waits for the device."""
        values = self._run.newest_metrics.items()
        numbers = [name for name, value in values if isinstance(value, int | float) or is_scalar(value)]
        return {name: float(self._run.newest_metrics[name]) for name in numbers[:_MOST_METRICS]}


def is_scalar(value: Any) -> bool:
    """Return whether that is a tensor of one number."""
    return isinstance(value, Tensor) and value.numel() == 1


def _steps_per_epoch(experiment: Experiment) -> int | None:
    """Return how many steps an epoch has; None if only its end will tell."""
    loader: Any = experiment.loader
    try:
        return math.ceil(len(loader) / experiment.accumulate) or None
    except Exception:  # no loader, one without a length, or one whose length cannot be told
        return None


# -- hooks around a step -----------------------------------------------------------------------------------------


class RunStep:
    """One step of a run, as a hook with ``wraps_steps`` may make it; call it with the batch."""

    def __init__(self, run: Run, make: Callable[[Any], StepResult]) -> None:
        self.run = run
        """The run: its ``step``, ``epoch``, ``batch_idx`` and ``lr`` are those of this step."""
        self._make = make

    def __call__(self, batch: Any) -> StepResult:
        """Make the step."""
        return self._make(batch)

    def repeat(self, batch: Any) -> StepResult:
        """Make the step once more, without the hooks around it; the caller puts the run back."""
        return self.run.train_and_schedule(batch)

    @property
    def parts(self) -> tuple[Any, Any, Any, Any, Any]:
        """What a guard has to save: model, optimizer, scheduler, scaler, loader, with all that belongs to them."""
        return self.run.guarded.parts(self.run.passes.loader)


def step_through_hooks(run: Run, hooks: list[TrainingHook]) -> Callable[[Any], StepResult]:
    """Return what makes a step of ``run``: the experiment's own step, inside of the hooks that wrap steps."""
    make: Callable[[Any], StepResult] = run.train_and_schedule
    for hook in reversed(hooks):
        make = partial(hook.around_step, RunStep(run, make))
    return make


# -- what hooks are shown, made when one is due -------------------------------------------------------------------


class _LoopModelContext(ModelDataContext):
    """Train as the loop does: as many batches to a step."""

    def __init__(self, run: Run, **given: Any) -> None:
        super().__init__(run.model, run.experiment.optimizer, **given)
        self._passes = run.passes

    def run_training_epoch(self, loader: Iterable[Any] | None = None, step: bool = True) -> dict[str, Tensor]:
        """Go through a loader once; with ``accumulate=k``, k of its batches make a step."""
        passes = self._passes
        if step and passes.experiment.accumulate > 1:
            if loader is None or loader is passes.loader:
                loader = copy_loader(passes.loader, private_generator(passes.experiment.model), shuffle=False)
            loader = passes.grouped(loader)
        return super().run_training_epoch(loader, step)


def _mean_loss(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch; of batches that make one step together, their mean."""
    if not isinstance(batch, MicroBatches):
        return loss_fn(model, batch)
    return torch.stack([loss_fn(model, part) for part in batch]).mean()
