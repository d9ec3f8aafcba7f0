"""Train by epochs: call an experiment's methods, and fire hooks in between.

Users and the command line call it; it moves a `Run` on, in the order that `HookPoint` shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.training.experiment_adapter import ExperimentAdapter, whole_number
from hookline.training.loop_result import LoopResult
from hookline.training.progress import shown_progress
from hookline.training.run import Run, start_run
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager
    from hookline.training.checkpoints import Checkpoints

__all__ = ["epoch_loop"]

_POINTS: Final = frozenset(HookPoint)


def epoch_loop(
    experiment: Any,
    *,
    epochs: int,
    manager: HookManager | None = None,
    snapshot_every: int | None = None,
    eval_every: int = 1,
    first_epoch: int = 0,
    run_context: Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    progress: bool = False,
) -> LoopResult:
    """Train for some epochs, with hooks.

    Recipe::

        manager = hookline.HookManager(hooks=[MyHook()], sinks=[hookline.sinks.MemorySink()])
        hookline.epoch_loop(hookline.Experiment(model, optimizer, loader), epochs=10, manager=manager)

    The run is the same with hooks and without, bit for bit. Whatever ends it, what hooks returned is written.

    Args:
        experiment: What is trained, how, on what: an `Experiment`, or anything like one.
        epochs: How many epochs the whole run has; they count from 0.
        manager: Its hooks fire, and its sinks are given what they return.
        snapshot_every: How many epochs from one SNAPSHOT to the next, the first being epoch 0; 0 for none. If left
            out: the ``snapshot_every`` of ``experiment.config``, or 1.
        eval_every: How many epochs from one evaluation to the next; 0 for none but at snapshots, which always have one.
        first_epoch: Where to go on. Hooks start anew unless this is over 0.
        run_context: What hooks and sinks are told of the run (``strategy=``, ``output_dir=``, …).
        checkpoints: Where the run is saved, and how often: ``Checkpoints(folder, every=1)``.
        resume: Go on from the newest of them; begin if there is none.
        progress: Show a bar on a terminal or in a notebook, with rate, loss and newest evaluation; where there is
            neither, a line every ten seconds. The run stays the same, bit for bit.
    """
    epochs = whole_number("epochs", epochs, 0)
    eval_every = whole_number("eval_every", eval_every, 0)
    first_epoch = whole_number("first_epoch", first_epoch, 0)
    adapter = ExperimentAdapter(experiment, "epoch")
    every = adapter.snapshot_interval(snapshot_every, 1)
    points = _POINTS if every else _POINTS - {HookPoint.SNAPSHOT}
    run = start_run(adapter, manager, points=points, first=first_epoch, resume=resume, run_context=run_context)
    settings = {"epochs": epochs, "snapshot_every": every, "eval_every": eval_every}
    with (
        run.saved_to(checkpoints, resume=resume, settings=settings),
        shown_progress(progress, run, epochs=epochs),
        run.written_at_the_end(),
    ):
        if run.begin():
            first_epoch = epochs if run.stopped_early else run.next_epoch
        run.show_progress_from(first_epoch)
        for epoch in range(first_epoch, epochs):
            snapshot = every > 0 and epoch % every == 0
            if not _train(run, epoch, snapshot=snapshot):
                break
            if snapshot or (eval_every > 0 and epoch % eval_every == 0):
                run.evaluate()
            _conclude(run, snapshot=snapshot)
            enough = run.ask_to_stop()
            if run.finish_epoch() or enough:
                break
        run.finish()
    return run.result()


def _train(run: Run, epoch: int, *, snapshot: bool) -> bool:
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
        raise OptionError(f"The loader gave no batch in epoch {epoch}: is it empty, or can it be iterated only once?")
    run.end_epoch()
    return True


def _conclude(run: Run, *, snapshot: bool) -> None:
    """Fire the points after an epoch, and report its evaluation."""
    run.fire(HookPoint.POST_EPOCH)
    run.report_evaluation(HookPoint.POST_EPOCH)
    if snapshot:
        run.fire(HookPoint.SNAPSHOT)
    run.adapter.end_epoch(run.epoch, run.newest_metrics)
