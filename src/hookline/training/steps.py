"""Train by steps, for runs whose data have no epochs, or whose epochs do not matter.

Users and the command line call it; it moves a `Run` on, which fires POST_STEP and SNAPSHOT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

__all__ = ["step_loop"]

_STEPS_BETWEEN_SNAPSHOTS: Final = 100


def step_loop(
    experiment: Any,
    *,
    steps: int,
    manager: HookManager | None = None,
    snapshot_every: int | None = None,
    first_step: int = 0,
    run_context: Mapping[str, Any] | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    progress: bool = False,
) -> LoopResult:
    """Train for some steps, with hooks.

    Recipe::

        manager = hookline.HookManager(hooks=[MyHook()], sinks=[hookline.sinks.MemorySink()])
        hookline.step_loop(hookline.Experiment(model, optimizer, loader), steps=5000, manager=manager)

    The loader is gone through again and again; an experiment without one is asked to ``train_step(None)``. The run is
    the same with hooks and without, bit for bit. Whatever ends it, what hooks returned is written.

    Args:
        experiment: What is trained, how, on what: an `Experiment`, or anything like one.
        steps: How many steps the whole run has; they count from 0.
        manager: Its hooks fire, and its sinks are given what they return: of single steps at each snapshot.
        snapshot_every: How many steps from one SNAPSHOT, and evaluation, to the next, the first being step 0; 0 for
            none. If left out: the ``snapshot_every`` of ``experiment.config``, or 100.
        first_step: Where to go on. Hooks start anew unless this is over 0.
        run_context: What hooks and sinks are told of the run (``strategy=``, ``output_dir=``, …).
        checkpoints: Where the run is saved, and how often: ``Checkpoints(folder, every=1000)``.
        resume: Go on from the newest of them; begin if there is none.
        progress: Show a bar on a terminal or in a notebook, with rate, loss and newest evaluation; where there is
            neither, a line every ten seconds. The run stays the same, bit for bit.
    """
    steps = whole_number("steps", steps, 0)
    first_step = whole_number("first_step", first_step, 0)
    adapter = ExperimentAdapter(experiment, "step")
    every = adapter.snapshot_interval(snapshot_every, _STEPS_BETWEEN_SNAPSHOTS)
    points = frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT} if every else {HookPoint.POST_STEP})
    run = start_run(adapter, manager, points=points, first=first_step, resume=resume, run_context=run_context)
    settings = {"steps": steps, "snapshot_every": every}
    with (
        run.saved_to(checkpoints, resume=resume, settings=settings),
        shown_progress(progress, run, steps=steps),
        run.written_at_the_end(),
    ):
        goes_on = run.begin()
        if goes_on:
            first_step = steps if run.stopped_early else run.step + 1
        if first_step == 0 < steps:
            run.evaluate()
            run.report_evaluation(HookPoint.SNAPSHOT, "initial")
        batches = _batches(run)
        run.show_progress_from(first_step)
        for step in range(first_step, steps):
            if every and (step == 0 or (step - 1) % every == 0 or (step == first_step and not goes_on)):
                next_snapshot = -(-step // every) * every
                run.begin_stretch(next_snapshot if next_snapshot < steps else None)
            if not _train(run, batches):
                break
            if every and step % every == 0:
                _fire_snapshot(run)
            enough = run.ask_to_stop()
            if run.end_step() or enough:
                break
        run.finish()
    return run.result()


def _train(run: Run, batches: Iterator[Any]) -> bool:
    """Make one step; return False if the run stops while it waits for data."""
    for batch in batches:
        run.begin_step(batch)
        run.train_step()
        run.fire(HookPoint.POST_STEP)
        return True
    return False


def _fire_snapshot(run: Run) -> None:
    """Evaluate, and fire SNAPSHOT."""
    run.end_stretch()
    run.evaluate()
    run.fire(HookPoint.SNAPSHOT)
    run.report_evaluation(HookPoint.SNAPSHOT)


def _batches(run: Run) -> Iterator[Any]:
    """Yield batches, one pass over the data after the other, without end."""
    if run.adapter.has_no_data:
        while True:
            yield None
    while True:
        if not run.is_within:  # in the middle of a pass, the loader is brought there
            run.take_loader()
        yield from run.batches()
        if run.interrupted is not None:
            return
        if run.done == 0:
            raise OptionError(
                f"The loader gave no batch in pass {run.epoch} over the data (steps so far: {run.num_steps}): is it "
                "empty, or can it be iterated only once?"
            )
        run.end_pass()
