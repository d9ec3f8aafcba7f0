"""Drive a `HookManager` from the events of a host: of a trainer that owns the loop.

The adapters of ``hookline.integrations`` call `HostRun` at each event; callbacks of trainers derive from
`HostCallback`, which holds one. It moves a `Run` on, as the loops do, so that hooks see the same contexts everywhere;
it never trains, and leaves the host's run as it is, bit for bit.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.distributed.ranks import rank_count
from hookline.error_policy import warn_user
from hookline.errors import LifecycleError, MissingPackageError, OptionError
from hookline.integrations.resources import ResourcesHook
from hookline.lifecycle.manager import HookManager
from hookline.messages import type_name, unknown_name_text
from hookline.phases import in_phase
from hookline.records.sink import MetricSink, Record
from hookline.records.values import mean, number, numbers, values_in
from hookline.runs.build import ALWAYS, Built, build
from hookline.runs.folder import LOG, STRATEGY, RunNotes, model_facts
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sites.optimizers import unwrap_optimizer
from hookline.training.checkpoints import local_parts, map_dicts, place_parts
from hookline.training.experiment import Experiment, MicroBatches, StepResult, whole_number
from hookline.training.loops import POINTS, LoopResult
from hookline.training.run import GradientRetention, Run, Schedule
from hookline.training.state import GuardedState, Passes
from hookline.tree import map_tensors
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.ranks import OneProcess
    from hookline.specs.hook_spec import HookSpec

_RECORDER: Final = "flight_recorder"
_STEPS_TO_FLUSH: Final = 100
_NO_PHASE: Final = nullcontext()
_TRAINING: Final = in_phase("train")

logger = logging.getLogger(__name__)


class _Epoch(Enum):
    """How far the host is in an epoch."""

    NONE = 0
    STEPS = 1
    """It makes steps."""
    EVALUATION = 2
    """Its steps are over, and it is not: it may be evaluated."""


class _Stretch(Enum):
    """How far the steps are up to the next SNAPSHOT, where steps are counted."""

    NONE = 0
    BEGUN = 1
    STEPPED = 2
    """A step was made, which no SNAPSHOT has reported."""


class HostRun:
    """Fire hooks at the events of a loop that someone else owns.

    Recipe::

        run = HostRun(hooks=["norms", MyHook()], sinks=[hookline.sinks.MemorySink()])
        run.begin_run(model, optimizer, loader=loader)
        for epoch in range(epochs):
            run.begin_epoch(epoch)
            for batch in loader:
                run.begin_step(batch=batch)
                ...  # the host's own step
                run.end_step(loss=loss)
            run.end_epoch()
        run.end_run()

    The order of the points is that of `HookPoint`. With ``loop="epoch"`` all five are fired; with ``loop="step"``
    POST_STEP and SNAPSHOT, and metrics are plotted over the step. The loss is recorded, whatever the hooks are.

    Args:
        hooks: Hooks as objects, classes or names (``"norms"``, ``"observers"``); trackers and watches as well.
        sinks: Where metrics go.
        run_file: A run file whose hooks, specs and sinks are taken, beside those given here.
        manager: A manager that is there already, in place of all of the above; it is not closed here.
        loop: ``"epoch"`` or ``"step"``; if left out, epochs are counted only where a hook needs them.
        snapshot_every: How many steps (or epochs) from one SNAPSHOT to the next; 0 for none.
            If left out: 10 steps at first and ever more later (144 reports in 1,000,000 steps), or 1 epoch.
        report_to: The logger of the host, which gets every number too.
        options: Those of `HookManager`: ``hook_config``, arguments of hooks that are given by name; ``on_error``, what
            happens when a hook raises, ``"raise"``, ``"warn"`` or ``"disable"``; ``flush_every``, how many steps from
            one flush of step metrics to the next, 100 by default; …
    """

    def __init__(
        self,
        hooks: Iterable[Any] | str | None = None,
        *,
        sinks: Iterable[Any] | None = None,
        run_file: str | Path | None = None,
        manager: HookManager | None = None,
        loop: str | None = None,
        snapshot_every: int | None = None,
        report_to: HostLogSink | None = None,
        **options: Any,
    ) -> None:
        check_options({} if manager is not None else options, HostRun)
        self._is_own = manager is None
        self.manager, self.specs = make_manager(hooks, sinks, run_file, manager, loop, options)
        by_steps = "step" if can_count_steps(self.manager.hooks.values()) else "epoch"
        self._loop = loop or self.manager.plan.loop_type or by_steps
        usual = SnapshotSteps(1) if self._loop == "epoch" else SnapshotSteps(10, grows=True)
        given = None if snapshot_every is None else SnapshotSteps(whole_number("snapshot_every", snapshot_every, 0))
        self._snapshots = given or usual
        if self._loop == "step" and self._snapshots.every:
            for hook in self.manager.hooks.values():
                hook.look_at_reports(self._snapshots)
        if report_to is not None:
            self.manager.fan_out.add(report_to)
        self.run: Run | None = None  # what is under way
        self._notes = open_notes(self.manager, {}, is_own=False)
        self._open = ExitStack()
        self._pending: Mapping[str, Any] | None = None
        self._is_mixed = False
        """Whether the log has records of another run: no state was loaded that goes on with them."""
        self._began = 0.0
        self._epoch, self._stretch = _Epoch.NONE, _Stretch.NONE
        self.in_step = False
        """Whether a step has begun that is not over."""
        self._loss: Any = None
        """Of the step that was made last."""
        self._phase: AbstractContextManager[None] = _NO_PHASE
        self._phase_of_steps: AbstractContextManager[None] = _TRAINING
        self._wants_gradients = False
        """Whether the gradients of each step are needed later: their mean, or those of the step before."""
        self._is_looked_at = False
        """Whether a hook looks at the end of the step that is being made; decided when it begins."""
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        """The gradients of the step, which the host clears before it ends the step."""

    # -- the run -----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a run has begun and is not over."""
        return self.run is not None

    def begin_run(
        self,
        model: Any,
        optimizer: Any,
        *,
        step: int = 0,
        run_context: Mapping[str, Any] | None = None,
        tells_phase: bool = True,
        **parts: Any,
    ) -> None:
        """Begin a run, or go on with one, of which ``step`` steps are made; hooks are started, specs attached.

        Args:
            model: The model, as hooks are to see it.
            optimizer: The optimizer; wrappers around it are looked through.
            step: How many steps were made before. If hook state was loaded, hooks go on with it; else they begin anew.
            run_context: What hooks and sinks are told (``run_dir=``, ``experiment_name=``, …).
            tells_phase: Whether all between the beginning and the end of a step is training, as it is unless the host
                may evaluate there.
            parts: What else the host has: ``scheduler``, ``scheduler_per``, ``scaler``, ``loader``, ``loss_fn``,
                ``accumulate``, ``clip_norm``, ``config``, … as for `Experiment`.
        """
        self.end_run()  # a host that failed said nothing
        experiment, manager = HostExperiment(model, optimizer, **parts), self.manager
        manager.plan.use_loop(self._loop)
        manager.set_capabilities(experiment.capabilities)
        manager.reset_all()
        manager.global_step = step - 1
        context = run_context or {}
        self._notes = open_notes(manager, context, is_own=self._is_own)
        if context:
            manager.set_run_context(**context)
        for sentence in manager.plan.will_not_fire(POINTS[self._loop]):
            warn_user(sentence)
        passes, schedule = HostPasses(experiment), HostSchedule(experiment, self._loop)
        run = Run(experiment, self._loop, manager, passes=passes, schedule=schedule)
        self._retention = run.retention = HostRetention(experiment, manager, run.guarded)
        run.has_loss = "loss_fn" in experiment.capabilities
        with ExitStack() as opened:
            opened.callback(manager.fan_out.release_log)  # another Trainer may go on with the folder
            opened.enter_context(run.written_at_the_end())
            if self.specs:
                from hookline.specs.apply_specs import register_hooks

                opened.callback(register_hooks(model, self.specs).remove)
            self.run, self._open = run, opened.pop_all()
        self._phase_of_steps = _TRAINING if tells_phase else _NO_PHASE
        self._stretch, self._loss = _Stretch.NONE, None
        self._wants_gradients = manager.needs_prev_step_grads() or manager.needs_grad_accumulation()
        self._notes.begin(host_facts(run.model, experiment.optimizer, context))
        self._began = time.perf_counter()
        self._is_mixed = self._is_own and manager.fan_out.state_dict()["first"] > 0
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._load(pending, step)

    def end_run(self, error: BaseException | None = None, *, report: bool = True) -> None:
        """End the run, however it ended: finish hooks, take specs off, write everything. May be called again.

        With ``report``, and where steps are counted, SNAPSHOT is fired for the steps since the last one; not if
        ``error`` ends one of several ranks: others may still train.
        """
        run = self.run
        if run is None:
            return
        opened, self._open = self._open, ExitStack()
        self._change_phase(_NO_PHASE)
        opened.callback(self._conclude, run, error)
        if error is None:
            with opened:
                if report:
                    self._report_rest(run)
            return
        try:
            if self.manager.output.ranks.is_single:
                self._report_rest(run)
        except BaseException:  # also a second Ctrl-C: what ended the run is what the user has to see, and it is written
            logger.exception("The last steps could not be reported when the run ended by %s", type(error).__name__)
        opened.__exit__(type(error), error, error.__traceback__)

    def _conclude(self, run: Run, error: BaseException | None) -> None:
        self.run, self._epoch, self.in_step = None, _Epoch.NONE, False
        self._held = []
        close_notes(self._notes, run, time.perf_counter() - self._began, error)

    def note(self, **facts: Any) -> None:
        """Write more about the run that is under way into ``run.json``, if it has one."""
        self._running("note")
        self._notes.add(**facts)

    def close(self) -> None:
        """End the run, if one is under way, and close the sinks. May be called again."""
        try:
            self.end_run()
        finally:
            if self._is_own:
                self.manager.close()

    # -- epochs ------------------------------------------------------------------------------------------------

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch has begun that is not over."""
        return self._epoch is not _Epoch.NONE

    def begin_epoch(self, epoch: int, *, loader: Any = None) -> None:
        """Begin an epoch; one that was left in the middle and is resumed has begun before, and fires nothing."""
        run = self._running("begin_epoch")
        self.end_epoch()
        if loader is not None:
            run.experiment.loader = loader
        run.passes.take_loader(epoch)
        resumed, run.is_within, self._epoch = run.is_within, False, _Epoch.STEPS
        if resumed and run.epoch == epoch:
            return
        if resumed:  # it was saved after the last step of an epoch, before the end of that
            self.end_epoch()
            self._epoch = _Epoch.STEPS
        run.num_epochs += 1
        run.done = 0
        if self._loop == "step":
            run.epoch = epoch
            return
        snapshot = (HookPoint.SNAPSHOT,) if self._snapshots.is_due(epoch) else ()
        run.begin_epoch(epoch, (HookPoint.POST_EPOCH, *snapshot))
        run.fire(HookPoint.PRE_EPOCH)

    def end_epoch(self) -> None:
        """End the steps of an epoch and fire POST_EPOCH, and SNAPSHOT if it is time; evaluate before."""
        run = self._running("end_epoch")
        if self._epoch is _Epoch.NONE:
            return
        self.finish_steps()
        self._epoch = _Epoch.NONE
        run.next_epoch = run.epoch + 1
        if self._loop == "step":
            return
        run.fire(HookPoint.POST_EPOCH)
        if self._snapshots.is_due(run.epoch):
            run.fire(HookPoint.SNAPSHOT)

    def finish_steps(self) -> None:
        """End the steps of an epoch, whose evaluation follows; `end_epoch` does the rest, and this too if left out."""
        run = self._running("finish_steps")
        if self._epoch is _Epoch.STEPS and self._loop == "epoch":
            run.end_epoch()
        self._epoch = _Epoch.EVALUATION

    # -- steps -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int | None = None, *, batch: Any = None, batch_idx: int | None = None) -> None:
        """Begin a step of the optimizer, and fire PRE_STEP.

        Args:
            step: Its number, counted from 0 over the whole run, as the host counts; if left out, the next.
            batch: Its batch, or the first of several.
            batch_idx: Which batch of the epoch that is.
        """
        run, manager = self._running("begin_step"), self.manager
        self._change_phase(_NO_PHASE)
        if step is not None:
            manager.global_step = step - 1
        if self._loop == "step" and self._snapshots.every and self._stretch is _Stretch.NONE:
            self._stretch = _Stretch.BEGUN
            run.begin_stretch(self._snapshots.next(manager.global_step + 1))
        run.begin_step(batch)
        run.batch_idx = run.done * run.experiment.accumulate if batch_idx is None else batch_idx
        run.done += 1
        self.in_step = True
        due = manager.plan.may_fire(manager.global_step, HookPoint.POST_STEP)
        self._is_looked_at = due or self._wants_gradients
        if self._loop == "epoch":
            run.fire(HookPoint.PRE_STEP)
        self._change_phase(self._phase_of_steps)

    def add_batch(self, batch: Any) -> None:
        """Add another batch to the step: several make one step where gradients are accumulated."""
        run = self._running("add_batch")
        run.batch = MicroBatches((*run.batch, batch) if isinstance(run.batch, MicroBatches) else (run.batch, batch))

    def replace_batch(self, batch: Any, batch_idx: int) -> None:
        """Let the step have another batch, if the host had only looked at the one before."""
        run = self._running("replace_batch")
        run.batch, run.batch_idx = batch, batch_idx

    def hold_gradients(self) -> None:
        """Hold the gradients of the step if a hook is going to look: the host clears them before it ends the step."""
        if self.run is not None and self.in_step and self._is_looked_at:
            self._held = [(one, one.grad) for one in self.run.experiment.model.parameters() if one.grad is not None]

    def end_step(self, *, loss: Tensor | float | None = None, trained: bool = True) -> None:
        """End a step, after the optimizer and the scheduler: fire POST_STEP, and SNAPSHOT if steps are counted.

        Args:
            loss: Of the whole step, still on its device; None if the host does not tell.
            trained: Whether the weights were updated; False where a scaler passed over the step.
        """
        run = self.run
        if run is None or not self.in_step:
            raise LifecycleError("end_step() ends a step that has not begun. Next: call begin_step() before it.")
        self.in_step = False
        if self._is_mixed:
            self._is_mixed = False
            warn_user(
                f"{self.manager.fan_out.log} holds an earlier run, and this one is added to it: a page shows both as "
                "one. Give another log=, or load the state of the earlier one (load_state_dict) to continue it."
            )
        self._change_phase(_NO_PHASE)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss = loss.detach()
        held, self._held = [(one, grad) for one, grad in self._held if one.grad is None], []
        for parameter, grad in held:
            parameter.grad = grad
        try:
            run.take_result(StepResult(loss, trained))
            run.fire(HookPoint.POST_STEP)
            self._retention.keep_for(run.step + 1)
        finally:
            for parameter, _ in held:
                parameter.grad = None
        self._loss = loss
        if self._stretch is not _Stretch.NONE:
            self._stretch = _Stretch.STEPPED
            if self._snapshots.is_due(run.step):
                self._report(run)

    # -- evaluation and snapshots --------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Begin an evaluation: until it ends, watches and trackers count nothing, unless they were told to."""
        self._change_phase(in_phase("eval"))

    def end_evaluation(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End an evaluation; hooks see its ``metrics`` at the next point, and sinks get them as ``eval/…``.

        At the end of an epoch call `finish_steps` before it, and `end_epoch` after it.
        """
        self._change_phase(_NO_PHASE)
        run = self.run
        if run is None or metrics is None:
            return
        together = run.evaluation if run.evaluated else {}  # one for each of several datasets
        run.evaluation, run.evaluated = {**together, **metrics}, True
        own = {f"eval/{name}": value for name, value in metrics.items()}
        point = HookPoint.SNAPSHOT if self._loop == "step" else HookPoint.POST_EPOCH
        self.manager.emit_metrics(own, run.position, point)

    def report_rest(self) -> None:
        """Report the steps since the last report now: the last one was made, and the host closes its loggers next."""
        self._report_rest(self._running("report_rest"))

    def _report_rest(self, run: Run) -> None:
        if self.in_step and self._stretch is not _Stretch.NONE:  # a loop may take a batch and stop, or fail
            run.step -= 1
            run.manager.global_step, run.loss = run.step, self._loss
        if self._stretch is _Stretch.STEPPED:
            self._report(run)

    def _report(self, run: Run) -> None:
        self._stretch = _Stretch.NONE
        run.end_stretch()
        run.fire(HookPoint.SNAPSHOT)

    def flush(self) -> None:
        """Hand the metrics of single steps to the sinks now."""
        self._running("flush").flush()

    def _change_phase(self, phase: AbstractContextManager[None]) -> None:
        before, self._phase = self._phase, phase
        if before is not phase:
            before.__exit__(None, None, None)
            phase.__enter__()

    # -- the host's checkpoint -----------------------------------------------------------------------------------

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return the state of hooks, schedules, sinks and sums; of ``all_ranks`` if every rank calls it with that."""
        return _save_state(self._running("state_dict"), within=self.in_epoch, all_ranks=all_ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; before the run has begun, as soon as it begins."""
        _check_state(state, self._loop)
        if self.run is None:
            self._pending = state
        else:
            self._load(state, None)

    def _load(self, state: Mapping[str, Any], step: int | None) -> None:
        run = self._running("load_state_dict")
        self._is_mixed = False
        _load_state(run, state, step)
        self._epoch, self.in_step = _Epoch.NONE, False
        if self._loop == "step" and self._snapshots.every:
            is_between = run.step < 0 or self._snapshots.is_due(run.step)
            self._stretch = _Stretch.NONE if is_between else _Stretch.BEGUN

    def _running(self, what: str) -> Run:
        if self.run is None:
            raise LifecycleError(f"{what}() belongs to a run, and none has begun. Next: call begin_run() first.")
        return self.run


# -- when SNAPSHOT is fired ---------------------------------------------------------------------------------

_AT_FIRST: Final = 20
"""Reports before the interval doubles for the first time; ten reports after that, it doubles again."""


@dataclass(frozen=True)
class SnapshotSteps:
    """Every ``every`` steps, from step 0 on; 0 for none."""

    every: int
    grows: bool = False
    """Whether the interval doubles whenever the run has become twice as long: 10 steps at first, 160 after 1,600. A run
    of 1,000,000 steps has 144 reports: the length of a script is not known when it begins."""

    def is_due(self, step: int) -> bool:
        """Return whether there is a report at the end of ``step``, counted from 0."""
        return self.every > 0 and step % self._interval(step) == 0

    def next(self, step: int) -> int:
        """Return the first step from ``step`` on that has a report."""
        interval = self._interval(step)
        return -(-step // interval) * interval

    def _interval(self, step: int) -> int:
        # It doubles at step every * _AT_FIRST, at twice that, at four times that, …: as often as the quotient has bits.
        return self.every << (step // (self.every * _AT_FIRST)).bit_length() if self.grows else self.every


def can_count_steps(hooks: Iterable[TrainingHook]) -> bool:
    """Return whether all that these hooks do can be done where steps are counted, and not epochs."""
    return all(
        POINTS["step"].issuperset(hook.hook_points or ())
        if hook.loop_points is None
        else bool(hook.loop_points.get("step"))
        for hook in hooks
    )


# -- what hooks are shown of a host -------------------------------------------------------------------------


_PARTS: Final = ("optimizer", "scheduler", "scaler", "loader", "loss_fn")
"""What a host may have, by the names that ``requires`` of a hook uses."""


class HostExperiment(Experiment):
    """Hold a host's objects."""

    def __init__(self, model: Any, optimizer: Any, **parts: Any) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"A run begins with the nn.Module that is trained; got {type_name(model)}.")
        if optimizer is None:
            raise OptionError(
                "The run begins without an optimizer, and steps are steps of one. Next: hand it over, also where it "
                "is wrapped."
            )
        # Wrappers of optimizers skip steps and scale gradients by rules of the host; interventions train without them.
        super().__init__(model, unwrap_optimizer(optimizer), **parts)
        whole_number("accumulate", self.accumulate, 1)
        self.capabilities = {name for name in _PARTS if parts.get(name, optimizer) is not None}
        """What the host has."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Nothing: the host looks after what it has besides."""
        return {}


class HostPasses(Passes):
    """Give out the loader of the host, which tells samplers itself which epoch it is."""

    def take_loader(self, epoch: int) -> None:
        """Keep the loader that the host gave."""
        self.loader = self.experiment.loader


class HostSchedule(Schedule):
    """Step the scheduler for an intervention that trains; for the run itself the host does it."""

    def step(self, per: str, loss: Any) -> None:
        """Step the scheduler for a step; leave the ends of epochs to the host."""
        if per == "step":
            super().step(per, loss)


class HostRetention(GradientRetention):
    """Copy the gradients of a step when it ends: the host clears them before the next begins."""

    def __init__(self, experiment: Experiment, manager: HookManager, guarded: GuardedState) -> None:
        super().__init__(experiment, manager, guarded)
        self._kept: dict[str, Tensor] | None = {} if self._may_need_previous else None
        """Those of the step before; of the first step, none."""

    def keep_for(self, step: int) -> None:
        """Copy the gradients that there are now, if a hook needs them in the next step, which is ``step``."""
        if self._may_need_previous and self._manager.plan.needs("needs_prev_step_grads", step=step):
            self._kept = self._gradients.copy()
            if not self._kept and self._has_trained:
                self._warn_of_none("those of the step before")

    def begin_step(self, position: int) -> None:
        """Show the gradients of the step before in this one."""
        self.previous, self._kept = self._kept, {} if self._may_need_previous else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, between two steps, without copying."""
        return {**super().state_dict(), "previous": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        super().load_state_dict(state)
        if self._may_need_previous:
            self._kept = self._gradients.placed(state["previous"] or {})


# -- the state of a run, for the host's checkpoint -----------------------------------------------------------------

# Everything in it is plain or a tensor, so that any checkpoint can hold it. Hosts write the dictionary of rank 0 alone,
# and every rank loads that: it may have the states of all.
_STATE_PARTS: Final = ("loop", "run", "manager", "gradients", "ranks")
_AWAY: Final = "\x1faway"
"""The key of a tensor that was not on the CPU: each rank puts it on its own device."""


def _save_state(run: Run, *, within: bool, all_ranks: bool) -> dict[str, Any]:
    """Return the state of ``run``.

    Args:
        run: The run.
        within: Whether an epoch has begun and is not over.
        all_ranks: Whether every rank calls this, and gets the states of all; else it is the state of this rank.
    """
    ranks = run.manager.output.ranks

    def make() -> dict[str, Any]:
        state = {
            "loop": run.loop,
            "run": run.state_dict(within=within),
            "manager": run.manager.state_dict(),
            "gradients": run.retention.state_dict(),
        }
        # Tensors that any rank can read: parts of sharded ones, on the CPU.
        found: dict[str, Any] = map_tensors(local_parts(state), lambda _, tensor: _to_cpu(tensor))
        return found

    own: dict[str, Any] = {}
    if all_ranks and not ranks.is_single:  # what fails on one, fails on all
        ranks.together("saving the state of hooks", lambda: own.update(make()))
        if not ranks.is_lost:
            by_rank = ranks.gather(own, "states of hooks of each rank")
            return {**by_rank[0], "ranks": {"count": ranks.size, "by_rank": by_rank}}
    return {**(own or make()), "ranks": {"count": ranks.size, "rank": ranks.rank}}


def _check_state(state: Mapping[str, Any], loop: str) -> None:
    """Raise if ``state`` cannot be loaded into a run that counts ``loop``."""
    missing = [name for name in _STATE_PARTS if name not in state]
    if missing:
        raise LifecycleError(f"load_state_dict() takes what state_dict() gave; this has no {', '.join(missing)}.")
    if state["loop"] != loop:
        raise LifecycleError(
            f"The state is of loop={state['loop']!r}, and this run has loop={loop!r}. Next: make it with the same."
        )


def _load_state(run: Run, state: Mapping[str, Any], step: int | None) -> None:
    """Load this rank's part of ``state``.

    If the host says that it goes on after another ``step``, schedules follow the host.
    """
    manager = run.manager
    state = _at_home(_own_state(state, manager.output.ranks), run.experiment.model)
    manager.load_state_dict(state["manager"])
    run.retention.load_state_dict(state["gradients"])
    run.load_state_dict(state["run"])
    if step is not None and manager.global_step != step - 1:
        warn_user(
            f"The state of the hooks is of {manager.global_step + 1} steps, and the run continues after {step}; "
            "schedules follow the run."
        )
        manager.global_step = step - 1


def _own_state(state: Mapping[str, Any], ranks: OneProcess) -> dict[str, Any]:
    """Return the state that is this rank's; tell the user where it goes on with that of another."""
    about = state["ranks"]
    is_same = about["count"] == ranks.size
    if is_same and "by_rank" in about:
        own: dict[str, Any] = about["by_rank"][ranks.rank]
        return own
    if not is_same or about["rank"] != ranks.rank:
        warn_user(
            f"The state of the hooks is of rank {about.get('rank', 0)} of {about['count']}, and rank {ranks.rank} of "
            f"{ranks.size} continues with it. Next: save on every rank, by state_dict(all_ranks=True)."
        )
    return {name: part for name, part in state.items() if name != "ranks"}


def _to_cpu(tensor: Tensor) -> Any:
    return tensor.detach() if tensor.device.type == "cpu" else {_AWAY: tensor.detach().cpu()}


def _at_home(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the state with tensors where this rank needs them."""
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    found = map_dicts(state, lambda one: one[_AWAY].to(device) if _AWAY in one else None)
    placed: dict[str, Any] = place_parts(found, parameters)
    return placed


# -- the manager of a run ------------------------------------------------------------------------------------

# What a run file says of training itself (experiment, seed, device) is the host's to decide, and is passed over.


def make_manager(
    hooks: Iterable[Any] | str | None,
    sinks: Iterable[Any] | None,
    run_file: str | Path | None,
    manager: HookManager | None,
    loop: str | None,
    options: dict[str, Any],
) -> tuple[HookManager, list[HookSpec]]:
    """Return the manager that was given, or one that is made of everything else; and hooks for modules of the model."""
    if loop not in (None, "epoch", "step"):
        raise OptionError(f"loop= is 'epoch' or 'step': what the run counts; got {loop!r}.")
    options = {name: value for name, value in options.items() if value is not None}
    if manager is not None:
        others = {"hooks": hooks, "sinks": sinks, "run_file": run_file, **options}
        if beside := [f"{name}=" for name, value in others.items() if value is not None]:
            raise OptionError(
                f"manager= has its hooks and sinks already, and {', '.join(beside)} was given beside it. Next: give "
                "them to the manager."
            )
        return manager, []
    built = Built()
    if run_file is not None:
        from hookline.runs.read import read_file  # takes 0.4 s to import

        built = build(read_file(run_file))
    given = list(hooks) if isinstance(hooks, list | tuple | set | frozenset) else [] if hooks is None else [hooks]
    listed = [*built.hooks, *given]
    if not _has(ALWAYS, listed):
        listed = [ALWAYS, *listed]
    if options.get("log") is not None:
        listed = with_recorder(listed)
    made = built.make_manager(
        [*(hook for hook in listed if not isinstance(hook, str)), ResourcesHook()],
        hook_names=[hook for hook in listed if isinstance(hook, str)],
        sinks=[*built.make_sinks(), *(sinks or ())],
        loop_type=loop,
        **{"flush_every": _STEPS_TO_FLUSH, **options},
    )
    return made, built.specs


def with_recorder(hooks: Iterable[Any]) -> list[Any]:
    """Return the hooks of a run with a log: it has one too that writes the last steps when something happens."""
    listed = list(hooks)
    return listed if _has(_RECORDER, listed) else [*listed, _RECORDER]


def _has(name: str, hooks: Iterable[Any]) -> bool:
    return any(name == (hook if isinstance(hook, str) else getattr(hook, "name", "")) for hook in hooks)


def check_options(options: Mapping[str, Any], *adapters: Callable[..., Any]) -> None:
    """Raise if one is not an option of a manager.

    Args:
        options: What an adapter was given beyond its own parameters.
        adapters: The adapter, and those that it hands options on to; their parameters are named in the error too.
    """
    taken = dict.fromkeys(name for one in (*adapters, HookManager) for name in inspect.signature(one).parameters)
    known = [name for name in taken if name not in ("hook_names", "loop_type", "options")]
    for name in options:
        if name in ("every", "on", "stats"):
            raise OptionError(f"{name}= belongs to the watch: hooks=[hookline.watch(model, {name}=...)].")
        if name not in known:
            raise OptionError(f"There is no option {name}= here.{unknown_name_text(name, known)}")


# -- the logger of a host -----------------------------------------------------------------------------------


def check_report_to(report_to: str | None, host: str) -> None:
    """Raise if ``report_to`` is neither ``"sinks"`` nor what this host calls its own logger."""
    if report_to not in ("sinks", host):
        raise OptionError(f"report_to= is 'sinks' or {host!r}; got {report_to!r}. W&B's own sink goes into sinks=.")


class HostLogSink(MetricSink):
    """Give every number to the logger of a host; a list becomes its mean, and text is left out.

    Args:
        log: Takes the numbers of one step, and the step.
        per_step: Call it once for each step. False: once for each record, with the mean over its steps, for hosts that
            log at their current step only.
    """

    def __init__(self, log: Callable[[dict[str, float], int], None], *, per_step: bool = True) -> None:
        self._log = log
        self._per_step = per_step

    def write(self, record: Record) -> None:
        """Log the numbers of ``record``."""
        rows: dict[int, dict[str, list[float]]] = {}
        last = record.step or 0
        for name, value, step in values_in(record):
            single = number(value)
            if single is None:
                several = numbers(value)
                name, single = f"{name}_mean", mean(several) if several else None
            if single is not None:
                rows.setdefault(step if self._per_step else last, {}).setdefault(name, []).append(single)
        for step in sorted(rows):
            self._log({name: mean(values) for name, values in rows[step].items()}, step)


# -- run.json -------------------------------------------------------------------------------------------------


def open_notes(manager: HookManager, context: Mapping[str, Any], *, is_own: bool) -> RunNotes:
    """Return what writes ``run.json`` beside the log of a run, as ``hookline run`` does; nothing where there is no log.

    Args:
        manager: Has the log. It is opened in the folder of the run, where a sink writes there too and no other log was
            asked for.
        context: What hooks and sinks are told of the run.
        is_own: Whether the manager was made for this run; one that was given is its maker's to describe.
    """
    fan_out = manager.fan_out
    if is_own and "run_dir" in context and not all(isinstance(each, HostLogSink) for each in fan_out.sinks):
        try:
            fan_out.open_log(Path(context["run_dir"]) / LOG)
        except OptionError as error:  # a Trainer that was interrupted in the same notebook has it open
            warn_user(f"This run has no log, and no page: {error}")
    log = fan_out.log
    if not is_own or log is None or log.name != LOG:
        return RunNotes(Path(), manager, [], is_written=False)
    return RunNotes(log.parent, manager, fan_out.sinks)


def host_facts(model: nn.Module, optimizer: Any, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``run.json`` says of a run when it begins."""
    return {
        "experiment": context.get("experiment_name") or Path(sys.argv[0]).stem or "run",
        "path": sys.argv[0],
        "strategy": STRATEGY,
        "command": [sys.executable, *sys.argv],
        "config": arguments_by_name(sys.argv[1:]),
        "optimizer": type(optimizer).__name__,
        "ranks": rank_count(),
        "threads": torch.get_num_threads(),
        **model_facts(model),
    }


def close_notes(notes: RunNotes, run: Run, seconds: float, error: BaseException | None) -> None:
    """Write how a run ended, and which hooks have not fired."""
    notes.add(silent=_why_silent(run.manager))
    status = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    loss = None if run.loss is None else float(run.loss)
    notes.end(
        status, seconds, result=LoopResult(run.num_epochs, run.step + 1, stopped_early=False, loss=loss), error=error
    )


def _why_silent(manager: HookManager) -> dict[str, str]:
    """Return the hooks that have not fired, and when they are due; not those that raised or were left out."""
    plan = manager.plan
    told = {*manager.hooks.errors, *plan.left_out}
    found = {}
    for name in (name for name in manager.hooks if not manager.hooks.fired[name] and name not in told):
        due = [f"{row.point}, {row.when}" if row.when else row.point for row in plan.rows if row.hook == name]
        found[name] = f"it is due at {' and '.join(due)}"
    return found


def command_name(command: Sequence[str]) -> str:
    """Return the name of the script in a command: of the first Python file, of the module, or of the program."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and place + 1 < len(command) and not command[place + 1].startswith("torch."):
            return command[place + 1].rpartition(".")[2]
    return Path(command[0]).name


def arguments_by_name(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a script by name, so that those of two runs can be compared.

    Recipe: ``arguments_by_name(["--lr", "1e-3", "--amp"])`` is ``{"lr": "1e-3", "amp": True}``.

    Nobody knows which words a flag takes: all up to the next flag are its value. Words before the first flag are
    together the ``arguments``.
    """
    found: dict[str, Any] = {}
    name = "arguments"
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
        else:
            found[name] = word if found.get(name, True) is True else f"{found[name]} {word}"
    return found


# -- callbacks of trainers -------------------------------------------------------------------------------------


class HostCallback:
    """Hold the `HostRun` of a trainer; a derived class translates the events of the trainer into calls on it."""

    _logs_per_step = True
    """Whether the trainer can log numbers of earlier steps."""

    def __init__(
        self,
        hooks: Iterable[Any] | str | None = None,
        *,
        sinks: Iterable[Any] | None = None,
        report_to: str = "sinks",
        **options: Any,
    ) -> None:
        super().__init__()
        check_report_to(report_to, "trainer")
        has_own = options.get("run_file") is not None or options.get("manager") is not None
        if hooks is None and not has_own:
            raise OptionError(
                "HooklineCallback() has no hooks. Next: callbacks=[HooklineCallback(['norms'])], an object and not the "
                "class; or run_file=, or manager=."
            )
        if options.get("manager") is None:
            check_options(options, HostRun)
        self._reports = report_to == "trainer"
        log = HostLogSink(self._log, per_step=self._logs_per_step) if self._reports else None
        if sinks is None and not (self._reports or has_own):
            sinks = [JSONLSink()]  # metrics would go nowhere else
        self._make_host = partial(HostRun, hooks, sinks=sinks, report_to=log, **options)
        self._trainer: Any = None
        self._attached = ExitStack()

    @cached_property
    def _host(self) -> HostRun:
        """The run, made when it is first asked for: then ranks are known, and only rank 0 opens sinks."""
        return self._make_host()

    @property
    def _is_running(self) -> bool:
        """Whether a run is under way; to ask makes none, as one is not for an evaluation alone."""
        return "_host" in vars(self) and self._host.is_running

    @property
    def manager(self) -> HookManager:
        """The manager of the hooks: their metrics, errors and costs."""
        return self._host.manager

    def close(self) -> None:
        """End the run if the trainer failed without saying so, and close the sinks. May be called again."""
        self._end()
        if "_host" in vars(self):
            self._host.close()

    def _attach_to(self, trainer: Any, callbacks: Iterable[Any]) -> None:
        """Remember who calls; its checkpoint has one file for the state of hooks, so it takes one callback."""
        count = sum(isinstance(each, HostCallback) for each in callbacks)
        if count > 1:
            raise OptionError(
                f"The Trainer has {count} HooklineCallbacks, or one twice, and takes one. Next: put all hooks into "
                "one: HooklineCallback([first, second])."
            )
        self._trainer = trainer

    def _end(self, error: BaseException | None = None) -> None:
        self._attached.close()
        if self._is_running:
            self._host.end_run(error)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers of the trainer."""
        raise NotImplementedError


# -- packages of trainers -----------------------------------------------------------------------------------


@contextmanager
def needed_package(package: str, by: str) -> Iterator[None]:
    """Import a package in this block; if it is not installed, say how to install it.

    Args:
        package: Its name, which is that of the extra of hookline too.
        by: The module that needs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed, but something that it imports is not
        raise MissingPackageError(f"{by} needs the package {package}: pip install 'hookline[{package}]'.") from error
