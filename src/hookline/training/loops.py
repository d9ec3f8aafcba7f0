"""Train by epochs or by steps: call an experiment's methods, and fire hooks in between.

Users and the command line call `epoch_loop` or `step_loop`. Each moves a `Run` on, in the order that `HookPoint` shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from hookline.error_policy import warn_user
from hookline.errors import OptionError
from hookline.lifecycle.manager import HookManager
from hookline.messages import type_name
from hookline.screen import RunProgress
from hookline.training.checkpoints import Checkpoints, Saving
from hookline.training.experiment import Experiment, check_experiment, whole_number
from hookline.training.run import LoopProgress, Run, is_scalar
from hookline.when import HookPoint

_NO_BATCH: Final = "The loader gave no batch in {} {}: is it empty, or can it be iterated only once?"
_SNAPSHOT_EVERY: Final = {"epoch": 1, "step": 100}
POINTS: Final = {"epoch": frozenset(HookPoint), "step": frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT})}
"""The points that each loop fires."""


@dataclass(frozen=True)
class LoopResult:
    """The outcome of a loop.

    Recipe: ``result = hookline.epoch_loop(experiment, epochs=10)``; then ``result.loss``, ``result.metrics``.
    """

    epochs: int
    """How many epochs (in the step loop: passes over the data) were begun, those before a resumption included."""
    steps: int
    """How many steps were made, likewise."""
    stopped_early: bool
    """Whether the experiment had enough before the end."""
    loss: float | None
    """The training loss: the mean of the last epoch, or that of the last step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The newest evaluation."""
    interrupted: str | None = None
    """The signal, ``"SIGINT"`` or ``"SIGTERM"``, that asked a run with checkpoints to stop; it was saved then."""


def epoch_loop(
    experiment: Experiment,
    *,
    epochs: int,
    manager: HookManager | None = None,
    snapshot_every: int | None = None,
    eval_every: int = 1,
    first_epoch: int = 0,
    run_context: Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    progress: bool | RunProgress = False,
) -> LoopResult:
    """Train for some epochs, with hooks.

    Recipe::

        manager = hookline.HookManager(hooks=[MyHook()], sinks=[hookline.sinks.MemorySink()])
        hookline.epoch_loop(hookline.Experiment(model, optimizer, loader), epochs=10, manager=manager)

    The run is the same with hooks and without, bit for bit. Whatever ends it, what hooks returned is written.

    Args:
        experiment: What is trained, how, on what: an `Experiment`.
        epochs: How many epochs the whole run has; they count from 0.
        manager: Its hooks fire, and its sinks are given what they return.
        snapshot_every: How many epochs from one SNAPSHOT to the next, the first being epoch 0; 0 for none. If left
            out: the ``snapshot_every`` of ``experiment.config``, or 1.
        eval_every: How many epochs from one evaluation to the next; 0 for none but at snapshots, which always have one.
        first_epoch: Where to go on. Hooks start anew unless this is over 0.
        run_context: What hooks and sinks are told of the run (``strategy=``, ``output_dir=``, …).
        checkpoints: Where the run is saved, and how often: ``Checkpoints(folder, every=1)``.
        resume: Go on from the newest of them; begin if there is none.
        progress: Show a bar on a terminal, with rate, loss and newest evaluation; elsewhere a line every ten seconds.
            A `ConsoleSink` shows it together with its metrics. The run stays the same, bit for bit.
    """
    epochs = whole_number("epochs", epochs, 0)
    eval_every = whole_number("eval_every", eval_every, 0)
    first = whole_number("first_epoch", first_epoch, 0)
    check_experiment(experiment)
    every = distance_of_snapshots(experiment, snapshot_every, "epoch")
    run = _start_run(experiment, "epoch", manager, every=every, first=first, resume=resume, run_context=run_context)
    settings = {"epochs": epochs, "snapshot_every": every, "eval_every": eval_every}
    with _saved(run, checkpoints, resume, settings), _shown(run, progress, epochs), run.written_at_the_end():
        if run.saving.begin():
            first = epochs if run.stopped_early else run.next_epoch
        run.progress.begin(first)
        for epoch in range(first, epochs):
            snapshot = every > 0 and epoch % every == 0
            if not _train_epoch(run, epoch, snapshot=snapshot):
                break
            if snapshot or (eval_every > 0 and epoch % eval_every == 0):
                run.evaluate()
            _conclude_epoch(run, snapshot=snapshot)
            enough = run.ask_to_stop()
            if run.finish_epoch() or enough:
                break
        run.saving.finish()
    return _result(run)


def _train_epoch(run: Run, epoch: int, *, snapshot: bool) -> bool:
    """Make the steps of one epoch; return False if the run stops in the middle."""
    if not run.is_within:  # of one that goes on where it was saved, the beginning has been
        run.begin_epoch(epoch, (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT) if snapshot else (HookPoint.POST_EPOCH,))
        run.fire(HookPoint.PRE_EPOCH)
    for batch in run.batches():
        run.begin_step(batch)
        run.fire(HookPoint.PRE_STEP)
        run.train_step()
        run.fire(HookPoint.POST_STEP)
        if run.end_step():
            break
    if run.interrupted is not None:
        return False
    if run.done == 0:
        raise OptionError(_NO_BATCH.format("epoch", epoch))
    run.end_epoch()
    return True


def _conclude_epoch(run: Run, *, snapshot: bool) -> None:
    """Fire the points after an epoch, and report its evaluation."""
    run.fire(HookPoint.POST_EPOCH)
    run.report_evaluation(HookPoint.POST_EPOCH)
    if snapshot:
        run.fire(HookPoint.SNAPSHOT)
    run.experiment.on_epoch_end(run.epoch, run.newest_metrics)


def step_loop(
    experiment: Experiment,
    *,
    steps: int,
    manager: HookManager | None = None,
    snapshot_every: int | None = None,
    first_step: int = 0,
    run_context: Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    progress: bool | RunProgress = False,
) -> LoopResult:
    """Train for some steps, with hooks: for data that have no epochs, or whose epochs do not matter.

    Recipe::

        manager = hookline.HookManager(hooks=[MyHook()], sinks=[hookline.sinks.MemorySink()])
        hookline.step_loop(hookline.Experiment(model, optimizer, loader), steps=5000, manager=manager)

    The loader is gone through again and again; an experiment without one is asked to ``train_step(None)``. The run is
    the same with hooks and without, bit for bit. Whatever ends it, what hooks returned is written.

    Args:
        experiment: What is trained, how, on what: an `Experiment`.
        steps: How many steps the whole run has; they count from 0.
        manager: Its hooks fire, and its sinks are given what they return: of single steps at each snapshot.
        snapshot_every: How many steps from one SNAPSHOT, and evaluation, to the next, the first being step 0; 0 for
            none. If left out: the ``snapshot_every`` of ``experiment.config``, or 100.
        first_step: Where to go on. Hooks start anew unless this is over 0.
        run_context: What hooks and sinks are told of the run (``strategy=``, ``output_dir=``, …).
        checkpoints: Where the run is saved, and how often: ``Checkpoints(folder, every=1000)``.
        resume: Go on from the newest of them; begin if there is none.
        progress: Show a bar on a terminal, with rate, loss and newest evaluation; elsewhere a line every ten seconds.
            A `ConsoleSink` shows it together with its metrics. The run stays the same, bit for bit.
    """
    steps = whole_number("steps", steps, 0)
    first = whole_number("first_step", first_step, 0)
    check_experiment(experiment)
    if experiment.scheduler_per == "epoch":
        raise OptionError("step_loop() has no epochs to count: let scheduler_per= be 'step', or take epoch_loop().")
    every = distance_of_snapshots(experiment, snapshot_every, "step")
    run = _start_run(experiment, "step", manager, every=every, first=first, resume=resume, run_context=run_context)
    settings = {"steps": steps, "snapshot_every": every}
    with _saved(run, checkpoints, resume, settings), _shown(run, progress, steps), run.written_at_the_end():
        goes_on = run.saving.begin()
        if goes_on:
            first = steps if run.stopped_early else run.step + 1
        if first == 0 < steps:
            run.evaluate()
            run.report_evaluation(HookPoint.SNAPSHOT, "initial")
        batches = _batches(run)
        run.progress.begin(first)
        for step in range(first, steps):
            if every and (step == 0 or (step - 1) % every == 0 or (step == first and not goes_on)):
                next_snapshot = -(-step // every) * every
                run.begin_stretch(next_snapshot if next_snapshot < steps else None)
            if not _train_step(run, batches):
                break
            if every and step % every == 0:
                _take_snapshot(run)
            enough = run.ask_to_stop()
            if run.end_step() or enough:
                break
        run.saving.finish()
    return _result(run)


def _train_step(run: Run, batches: Iterator[Any]) -> bool:
    """Make one step; return False if the run stops while it waits for data."""
    for batch in batches:
        run.begin_step(batch)
        run.train_step()
        run.fire(HookPoint.POST_STEP)
        return True
    return False


def _take_snapshot(run: Run) -> None:
    """Evaluate, and fire SNAPSHOT."""
    run.end_stretch()
    run.evaluate()
    run.fire(HookPoint.SNAPSHOT)
    run.report_evaluation(HookPoint.SNAPSHOT)


def _batches(run: Run) -> Iterator[Any]:
    """Yield batches, one pass over the data after the other, without end."""
    if run.passes.has_no_data:
        while True:
            yield None
    while True:
        if not run.is_within:  # in the middle of a pass, the loader is brought there
            run.passes.take_loader(run.epoch)
        yield from run.batches()
        if run.interrupted is not None:
            return
        if run.done == 0:
            raise OptionError(_NO_BATCH.format("pass", run.epoch))
        run.end_pass()


# -- the beginning and the end of both ---------------------------------------------------------------------------


def distance_of_snapshots(experiment: Any, given: int | None, loop: str) -> int:
    """Return the distance of snapshots: as the loop was told, else as the experiment's configuration says."""
    name, config = "snapshot_every", getattr(experiment, "config", None)
    if given is None:
        given = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return whole_number(name, _SNAPSHOT_EVERY[loop] if given is None else given, 0)


def _start_run(
    experiment: Experiment,
    loop: str,
    manager: HookManager | None,
    *,
    every: int,
    first: int,
    resume: bool,
    run_context: Mapping[str, Any] | None,
) -> Run:
    """Check the options and return a run at its beginning; one that goes on (`first` over 0) resets no hooks."""
    if manager is not None and not isinstance(manager, HookManager):
        raise OptionError(f"manager= is a HookManager(hooks=[...], sinks=[...]), got {type_name(manager)}.")
    if resume and first:
        raise OptionError(f"Give either resume=True or first_{loop}={first}: both say where to continue.")
    if not experiment.model.training:  # parts of a training model may be in evaluation mode on purpose
        experiment.model.train()
    if manager is None:
        manager = HookManager()
        manager.global_step = first - 1 if loop == "step" else -1
    manager.plan.use_loop(loop)
    if first == 0:
        manager.reset_all()
    if run_context:
        manager.set_run_context(**run_context)
    for sentence in manager.plan.will_not_fire(POINTS[loop] if every else POINTS[loop] - {HookPoint.SNAPSHOT}):
        warn_user(sentence)
    run = Run(experiment, loop, manager, manager.output.ranks)
    run.next_epoch = first
    if loop == "step" and run.step != first - 1:
        raise OptionError(f"first_step={first}, and the manager is at step {run.step}: load its state_dict() of then.")
    return run


def _saved(
    run: Run, checkpoints: Checkpoints | None, resume: bool, settings: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Return a context in which the run is saved there; it is loaded first, if asked to."""
    if checkpoints is not None:
        run.saving = saving = Saving(run, checkpoints, settings)
        return saving.active(resume=resume)
    if resume:
        raise OptionError("resume=True continues from a checkpoint: say where they are, checkpoints=.")
    return nullcontext()


def _result(run: Run) -> LoopResult:
    loss = None if run.loss is None else float(run.loss)
    loss = run.ranks.reduce({"loss": loss}, "loss of the run")["loss"]
    metrics = {name: value.item() if is_scalar(value) else value for name, value in run.evaluation.items()}
    return LoopResult(run.num_epochs, run.num_steps, run.stopped_early, loss, metrics, interrupted=run.interrupted)


# -- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _shown(run: Run, asked: bool | RunProgress, total: int) -> Iterator[None]:
    """Show how far ``run`` is while the block lasts, if that is ``asked`` for; it has so many epochs, or steps."""
    if asked is False:
        yield
        return
    bar = RunProgress() if asked is True else asked
    run.progress = progress = LoopProgress(run, bar, total)
    try:
        yield
        bar.stop(progress.metrics())
    finally:
        bar.stop()  # after an error of the device, reading the loss would raise another
