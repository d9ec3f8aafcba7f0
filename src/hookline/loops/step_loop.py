"""The loop that counts steps, for runs whose data have no epochs, or whose epochs do not matter.

Takes an `Experiment` and a `HookManager`; fires POST_STEP and SNAPSHOT, with schedules and flushing as in the epoch
loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.lifecycle.point import HookPoint
from hookline.loops.blocks import Blocks, whole_number
from hookline.loops.run import LoopResult, Run, start

if TYPE_CHECKING:
    from hookline.dispatch.manager import HookManager

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
) -> LoopResult:
    """Train for some steps, with hooks.

    Recipe::

        manager = hookline.HookManager(hooks=[MyHook()], sinks=[hookline.MemorySink()])
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
    """
    steps = whole_number("steps", steps, 0)
    first_step = whole_number("first_step", first_step, 0)
    blocks = Blocks(experiment, "step")
    every = blocks.snapshot_interval(snapshot_every, _STEPS_BETWEEN_SNAPSHOTS)
    points = frozenset({HookPoint.POST_STEP, HookPoint.SNAPSHOT} if every else {HookPoint.POST_STEP})
    run = start(blocks, manager, points=points, first=first_step, run_context=run_context)
    with run.written_at_the_end():
        if first_step == 0 < steps:
            run.evaluate()
            run.report_evaluation(HookPoint.SNAPSHOT, "initial")
        batches = _batches(run)
        for step in range(first_step, steps):
            if every and (step == first_step or (step - 1) % every == 0):
                next_snapshot = -(-step // every) * every
                run.begin_stretch(next_snapshot if next_snapshot < steps else None)
            _train(run, batches)
            if every and step % every == 0:
                _take_snapshot(run)
            if run.should_stop():
                break
    return run.result()


def _train(run: Run, batches: Iterator[Any]) -> None:
    """One step."""
    run.begin_step(next(batches))
    run.train_step()
    run.fire(HookPoint.POST_STEP)


def _take_snapshot(run: Run) -> None:
    """Everything that there is to tell by now."""
    run.end_stretch()
    run.evaluate()
    run.fire(HookPoint.SNAPSHOT)
    run.report_evaluation(HookPoint.SNAPSHOT)


def _batches(run: Run) -> Iterator[Any]:
    """One pass over the data after the other, without end."""
    if run.blocks.has_no_data:
        while True:
            yield None
    while True:
        run.blocks.take_loader(run.epoch)
        steps_before = run.num_steps
        yield from run.batches()
        if run.num_steps == steps_before:
            raise OptionError(
                f"The loader gave no batch in pass {run.epoch} over the data (steps so far: {run.num_steps}): is it "
                "empty, or can it be iterated only once?"
            )
        run.epoch += 1
