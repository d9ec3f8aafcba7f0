"""Drive a `HookManager` from the events of a host: of a trainer that owns the loop.

The adapters of ``hookline.integrations`` call `HostRun` at each event. It moves a `Run` on, as the loops do, so that
hooks see the same contexts everywhere; it never trains, and leaves the host's run as it is, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from hookline.errors import HooklineWarning, LifecycleError, OptionError
from hookline.integrations.host_facts import HostNotes
from hookline.integrations.host_manager import HostLogSink, check_options, make_manager
from hookline.integrations.host_state import check_state, load_state, save_state
from hookline.integrations.snapshot_steps import OFTEN_AT_FIRST, SnapshotSteps, StepReports, can_count_steps
from hookline.messages import caller_stacklevel, type_name
from hookline.phases import in_phase
from hookline.sites.optimizers import unwrap_optimizer
from hookline.training.experiment import Experiment, MicroBatches, StepResult, whole_number
from hookline.training.ranks import warn_of_join
from hookline.training.run import Run, Schedule
from hookline.training.state import Passes
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager


__all__ = ["HeldGradients", "HostExperiment", "HostRun"]

_POINTS: Final = {"epoch": frozenset(HookPoint), "step": frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT})}
_TRAINING: Final = in_phase("train")


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
        manager: A manager that is there already, in place of all of the above.
        loop: ``"epoch"`` or ``"step"``; if left out, epochs are counted only where a hook needs them.
        snapshot_every: How many steps (or epochs) from one SNAPSHOT to the next; 0 for none.
            If left out: 10 steps at first and ever more later (144 reports in 1,000,000 steps), or 1 epoch.
        capabilities: What the run can do besides, for hooks with ``requires``.
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
        snapshot_every: int | SnapshotSteps | None = None,
        capabilities: Iterable[str] = (),
        report_to: HostLogSink | None = None,
        **options: Any,
    ) -> None:
        check_options({} if manager is not None else options, HostRun)
        self.manager, self.specs = make_manager(hooks, sinks, run_file, manager, loop, options)
        by_steps = "step" if can_count_steps(self.manager.hooks.values()) else "epoch"
        self._loop = loop = loop or self.manager.plan.loop_type or by_steps
        every = (SnapshotSteps(1) if loop == "epoch" else OFTEN_AT_FIRST) if snapshot_every is None else snapshot_every
        if not isinstance(every, SnapshotSteps):
            every = SnapshotSteps(whole_number("snapshot_every", every, 0))
        self._snapshots = every
        if loop == "step" and every.every:
            for hook in self.manager.hooks.values():
                hook.look_at_reports(every)
        self._notes = HostNotes(self.manager, is_own=manager is None)
        self._reports = StepReports(every if loop == "step" else SnapshotSteps(0))
        self._capabilities = {capabilities} if isinstance(capabilities, str) else set(capabilities)
        if report_to is not None:
            self.manager.fan_out.add(report_to)
        self.held = HeldGradients()
        """Gradients that the host has cleared, and that hooks are to see."""
        self.run: Run | None = None  # what is under way
        self._open = ExitStack()
        self._phase: in_phase | None = None
        self.tells_phase = True
        """Whether all between the beginning and the end of a step is training: a followed loop may evaluate there."""
        self._pending: Mapping[str, Any] | None = None
        self._in_epoch = self._in_step = self._has_ended_steps = self._is_reported = False
        self._needs_previous = self._needs_mean = self._has_later_hooks = False
        self._is_looked_at = False
        """Whether a hook looks at the end of the step that is being made; decided when it begins."""
        self._accumulate = 1

    # -- the run -----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a run has begun and is not over."""
        return self.run is not None

    def begin_run(
        self, model: Any, optimizer: Any, *, step: int = 0, run_context: Mapping[str, Any] | None = None, **parts: Any
    ) -> None:
        """Begin a run, or go on with one, of which ``step`` steps are made; hooks are started, specs attached.

        Args:
            model: The model, as hooks are to see it.
            optimizer: The optimizer; wrappers around it are looked through.
            step: How many steps were made before. If hook state was loaded, hooks go on with it; else they begin anew.
            run_context: What hooks and sinks are told (``run_dir=``, ``experiment_name=``, …).
            parts: What else the host has: ``scheduler``, ``scheduler_per``, ``scaler``, ``loader``, ``loss_fn``,
                ``accumulate``, ``clip_norm``, ``config``, … as for `Experiment`.
        """
        if self.run is not None:
            self.end_run()  # a host that failed said nothing
        experiment, manager = HostExperiment(model, optimizer, **parts), self.manager
        manager.plan.use_loop(self._loop)
        manager.set_capabilities(experiment.capabilities | self._capabilities)
        manager.reset_all()
        manager.global_step = step - 1
        self._notes.open(run_context or {})
        if run_context:
            manager.set_run_context(**run_context)
        for sentence in manager.plan.will_not_fire(_POINTS[self._loop]):
            warnings.warn(sentence, HooklineWarning, stacklevel=caller_stacklevel())
        passes, schedule = HostPasses(experiment), HostSchedule(experiment, self._loop)
        run = Run(experiment, self._loop, manager, passes=passes, schedule=schedule)
        run.has_loss = "loss_fn" in experiment.capabilities
        with ExitStack() as opened:
            opened.callback(manager.fan_out.release_log)  # another Trainer may go on with the folder
            opened.enter_context(run.written_at_the_end())
            if self.specs:
                from hookline.specs.apply_specs import register_hooks

                opened.callback(register_hooks(model, self.specs).remove)
            self.run, self._open = run, opened.pop_all()
        self._needs_previous = manager.needs_prev_step_grads()
        self._needs_mean = manager.needs_grad_accumulation()
        self._accumulate = experiment.accumulate
        self._has_later_hooks = self._needs_previous or manager.has_hooks_at(HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)
        self._reports.begin_run()
        self._notes.begin(run.model, experiment.optimizer)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._load(pending, step)

    def end_run(self, error: BaseException | None = None, *, report: bool = True) -> None:
        """End the run, however it ended: finish hooks, take specs off, write everything. May be called again.

        With ``report``, and where steps are counted, SNAPSHOT is fired for the steps since the last one.
        """
        run = self.run
        if run is None:
            return
        opened, self._open, self.run = self._open, ExitStack(), None
        is_in_step, self._in_epoch, self._in_step = self._in_step, False, False
        self._leave_phase()
        opened.callback(self.held.release)
        opened.callback(self._notes.end, run, error)
        if error is not None:
            self._reports.end_failed_run(run, error, is_in_step=is_in_step)
            opened.__exit__(type(error), error, error.__traceback__)
            return
        with opened:
            if report:
                self._reports.end_run(run, is_in_step=is_in_step)

    def note(self, **facts: Any) -> None:
        """Write more about the run into ``run.json``, if it has one."""
        self._notes.add(**facts)

    def close(self) -> None:
        """End the run, if one is under way, and close the sinks. May be called again."""
        try:
            self.end_run()
        finally:
            self.manager.close()

    # -- epochs ------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, *, loader: Any = None) -> None:
        """Begin an epoch; one that was left in the middle and is resumed has begun before, and fires nothing."""
        run = self._running("begin_epoch")
        if self._in_epoch:
            self.end_epoch()
        if loader is not None and isinstance(run.passes, HostPasses):
            run.passes.set_loader(loader)
        if run.is_within and run.epoch != epoch:  # saved after the last step of an epoch, before the end of that
            self._in_epoch, run.is_within = True, False
            self.end_epoch()
        resumed, run.is_within = run.is_within, False
        self._in_epoch, self._has_ended_steps = True, False
        if resumed:
            run.passes.take_loader(run.epoch)
            return
        run.num_epochs += 1
        run.done = 0
        if self._loop == "step":
            run.epoch = epoch
            run.passes.take_loader(run.epoch)
            return
        snapshot = (HookPoint.SNAPSHOT,) if self._snapshots.is_due(epoch) else ()
        run.begin_epoch(epoch, (HookPoint.POST_EPOCH, *snapshot))
        if run.num_epochs < 2 and not self.manager.output.ranks.is_single:
            warn_of_join(run.experiment.model)
        run.fire(HookPoint.PRE_EPOCH)

    def end_epoch(self) -> None:
        """End the steps of an epoch and fire POST_EPOCH, and SNAPSHOT if it is time; evaluate before."""
        run = self._running("end_epoch")
        if not self._in_epoch:
            return
        self.finish_steps()
        self._in_epoch = False
        run.next_epoch = run.epoch + 1
        if self._loop == "step":
            return
        run.fire(HookPoint.POST_EPOCH)
        if not self._is_reported:
            run.report_evaluation(HookPoint.POST_EPOCH)
        if self._snapshots.is_due(run.epoch):
            run.fire(HookPoint.SNAPSHOT)

    def finish_steps(self) -> None:
        """End the steps of an epoch, whose evaluation follows; `end_epoch` does the rest, and this too if left out."""
        run = self._running("finish_steps")
        if not self._has_ended_steps and self._loop == "epoch":
            run.end_epoch()
        self._has_ended_steps = True

    # -- steps -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int | None = None, *, batch: Any = None, batch_idx: int | None = None) -> None:
        """Begin a step of the optimizer, and fire PRE_STEP.

        Args:
            step: Its number, counted from 0 over the whole run, as the host counts; if left out, the next.
            batch: Its batch, or the first of several.
            batch_idx: Which batch of the epoch that is.
        """
        run = self.run
        if run is None or self._in_step:
            run = self._running("begin_step")
            self._leave_step()
        manager = self.manager
        if step is not None and step != manager.global_step + 1:
            manager.global_step = step - 1
        if self._loop == "step":
            self._reports.begin_step(run, manager.global_step + 1)
        if self._needs_previous:
            with self.held.shown(in_place_of_others=True):
                run.begin_step(batch)
            self.held.release()
        else:
            run.begin_step(batch)
        run.batch_idx = run.done * self._accumulate if batch_idx is None else batch_idx
        run.done += 1
        self._in_step = True
        self._is_looked_at = manager.plan.may_fire(manager.global_step, HookPoint.POST_STEP)
        if self._loop == "epoch" and manager.plan.may_fire(manager.global_step, HookPoint.PRE_STEP):
            run.fire(HookPoint.PRE_STEP)
        if self.tells_phase:
            self._phase = _TRAINING
            _TRAINING.__enter__()

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
        run = self.run
        if run is None or not self._in_step:
            return
        if self._needs_previous or self._needs_mean or self._is_looked_at:
            self.held.take(run.experiment.model)

    def end_step(
        self, *, loss: Tensor | float | None = None, trained: bool = True, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """End a step, after the optimizer and the scheduler: fire POST_STEP, and SNAPSHOT if steps are counted.

        Args:
            loss: Of the whole step, still on its device; None if the host does not tell.
            trained: Whether the weights were updated; False where a scaler passed over the step.
            metrics: What else the step told of itself: ``{"train_acc": ...}``.
        """
        run = self.run
        if run is None or not self._in_step:
            raise LifecycleError("end_step() ends a step that has not begun. Next: call begin_step() before it.")
        self._leave_step()
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss = loss.detach()
        run.loss = loss
        if self._has_later_hooks or metrics or self.held:
            self._take_result(run, StepResult(loss, trained, metrics or {}))
        elif self._is_looked_at:
            run.fire(HookPoint.POST_STEP)
        if self._loop == "step":
            self._reports.end_step(run)

    def _take_result(self, run: Run, result: StepResult) -> None:
        """Take in what later points need: 4 µs a step, which a run without such hooks does not pay."""
        with self.held.shown():
            run.take_result(result)
            run.fire(HookPoint.POST_STEP)
        if not self._needs_previous:
            self.held.release()

    def _leave_step(self) -> None:
        self._in_step = False
        self._leave_phase()

    # -- evaluation and snapshots --------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Begin an evaluation: until it ends, watches and trackers count nothing, unless they were told to."""
        self._leave_phase()
        self._phase = in_phase("eval")
        self._phase.__enter__()

    def end_evaluation(self, metrics: Mapping[str, Any] | None = None) -> None:
        """End an evaluation; hooks see its ``metrics`` at the next point, and sinks get them as ``eval/…``.

        At the end of an epoch call `finish_steps` before it, and `end_epoch` after it.
        """
        self._leave_phase()
        run = self.run
        if run is None or metrics is None:
            return
        together = run.evaluation if run.evaluated else {}  # one for each of several datasets
        run.evaluation, run.evaluated = {**together, **metrics}, True
        self._is_reported = self._loop == "step" or not (self._in_epoch and self._has_ended_steps)
        if self._is_reported:  # else `end_epoch` does, after POST_EPOCH
            own = {f"eval/{name}": value for name, value in metrics.items()}
            point = HookPoint.SNAPSHOT if self._loop == "step" else HookPoint.POST_EPOCH
            self.manager.emit_metrics(own, run.position, point)

    def report_rest(self) -> None:
        """Report the steps since the last report now: the last one was made, and the host closes its loggers next."""
        self._reports.end_run(self._running("report_rest"), is_in_step=self._in_step)

    def flush(self) -> None:
        """Hand the metrics of single steps to the sinks now."""
        self._running("flush").flush()

    def _leave_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    # -- the host's checkpoint -----------------------------------------------------------------------------------

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return the state of hooks, schedules, sinks and sums; of ``all_ranks`` if every rank calls it with that."""
        run = self._running("state_dict")
        held = partial(self.held.state_dict, run.experiment.model) if self._needs_previous else dict
        return save_state(run, held, within=self._in_epoch, all_ranks=all_ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; before the run has begun, as soon as it begins."""
        check_state(state, self._loop)
        if self.run is None:
            self._pending = state
        else:
            self._load(state, None)

    def _load(self, state: Mapping[str, Any], step: int | None) -> None:
        run = self._running("load_state_dict")
        self.held.load_state_dict(run.experiment.model, load_state(run, state, step))
        self._reports.go_on()

    def _running(self, what: str) -> Run:
        if self.run is None:
            raise LifecycleError(f"{what}() belongs to a run, and none has begun. Next: call begin_run() first.")
        return self.run


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

    def set_loader(self, loader: Any) -> None:
        """Show another loader from now on."""
        self.experiment.loader = self.loader = loader


class HostSchedule(Schedule):
    """Step the scheduler for an intervention that trains; for the run itself the host does it."""

    def step(self, per: str, loss: Any) -> None:
        """Step the scheduler for a step; leave the ends of epochs to the host."""
        if per == "step":
            super().step(per, loss)


class HeldGradients:
    """Keep the gradient tensors of a step, and show them in ``.grad`` after the host has cleared them.

    Nothing is copied, unless the next step needs these gradients and the host may clear them in place.
    """

    def __init__(self) -> None:
        self._held: list[tuple[nn.Parameter, Tensor | None]] = []

    def take(self, model: nn.Module) -> None:
        """Hold the gradients that there are now."""
        self._held = [(parameter, grad) for parameter in model.parameters() if (grad := parameter.grad) is not None]

    def copy(self, model: nn.Module, *, none: bool = False) -> None:
        """Hold copies of them, and remember which parameters have none; or that no parameter has any (``none``)."""
        self._held = [
            (parameter, None if none or parameter.grad is None else parameter.grad.detach().clone())
            for parameter in model.parameters()
        ]

    def state_dict(self, model: nn.Module) -> dict[int, Tensor]:
        """Return the gradients that are held, by the place of their parameter in the model."""
        held = {id(parameter): grad for parameter, grad in self._held if grad is not None}
        return {place: held[id(p)] for place, p in enumerate(model.parameters()) if id(p) in held}

    def load_state_dict(self, model: nn.Module, state: Mapping[int, Tensor]) -> None:
        """Hold what ``state_dict`` returned."""
        parameters = list(model.parameters())
        self._held = [(parameters[place], grad.to(parameters[place].device)) for place, grad in state.items()]

    def release(self) -> None:
        """Let go of them: their memory is the host's again."""
        self._held = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @contextmanager
    def shown(self, *, in_place_of_others: bool = False) -> Iterator[None]:
        """Put them into ``.grad`` for as long as the block lasts, where there is no gradient now.

        ``in_place_of_others``: also where there is one, of the step that is being made; or zeros in the same tensor.
        """
        others = [
            (parameter, parameter.grad, grad)
            for parameter, grad in self._held
            if parameter.grad is None or in_place_of_others
        ]
        for parameter, _, grad in others:
            parameter.grad = grad
        try:
            yield
        finally:
            for parameter, own, _ in others:
                parameter.grad = own
