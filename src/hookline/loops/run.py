"""A run on its way, from its start to its result: where it is, and what becomes of what hooks return.

Takes building blocks and a `HookManager` from a loop, which moves it on; `Contexts` shows hooks where it is.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.dispatch.manager import HookManager
from hookline.errors import HooklineWarning, OptionError
from hookline.lifecycle.point import HookPoint
from hookline.loops.contexts import Contexts
from hookline.loops.demand import Demand
from hookline.sites.receipt import outside
from hookline.sites.signature import a_or_an

if TYPE_CHECKING:
    from hookline.loops.blocks import Blocks

__all__ = ["LoopResult", "Run", "start"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopResult:
    """What a loop came to.

    Recipe: ``result = hookline.epoch_loop(experiment, epochs=10)``; then ``result.loss``, ``result.metrics``.
    """

    epochs: int
    """How many epochs (in the step loop: passes over the data) were begun."""
    steps: int
    """How many steps were made."""
    stopped_early: bool
    """Whether the experiment had enough before the end."""
    loss: float | None
    """The training loss: the mean of the last epoch, or that of the last step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The newest evaluation."""


class Run:
    """One training run, moved on by a loop."""

    def __init__(self, blocks: Blocks, manager: HookManager | None) -> None:
        self.blocks = blocks
        self.manager = manager
        self.in_epochs = blocks.loop == "epoch"
        """Whether it is counted in epochs; in steps if not."""
        self.demand = None if manager is None else Demand(blocks, manager)
        self._contexts = None if manager is None or self.demand is None else Contexts(self, manager, self.demand)
        self.epoch = 0
        self.step = -1 if manager is None else manager.global_step
        """The step that is being made or was made last, counted from 0 over the whole run; -1 before the first."""
        self.num_epochs = self.num_steps = 0
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
        self._losses, self._accuracies = _Mean(), _Mean()

    @property
    def position(self) -> int:
        """What metrics are plotted over: the epoch, or the step."""
        return self.epoch if self.in_epochs else max(self.step, 0)

    # -- from step to step -----------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, points: tuple[HookPoint, ...]) -> None:
        """An epoch begins; after its steps those points are to come."""
        self.epoch = epoch
        self.loss = self.accuracy = None
        self.evaluated = False
        self.blocks.take_loader(epoch)
        if self.demand is not None:
            self.demand.begin_epoch(points, epoch)

    def batches(self) -> Iterator[Any]:
        """What the steps of this epoch, or pass over the data, are trained on."""
        self.num_epochs += 1
        for index, batch in enumerate(self.blocks.batches()):
            self.batch_idx = index * self.blocks.accumulate
            yield batch

    def begin_step(self, batch: Any) -> None:
        """A step is about to be made."""
        self.batch, self.loss, self.accuracy = batch, None, None
        self.num_steps += 1
        self.evaluated = False
        if self.manager is None or self.demand is None:
            self.step += 1
            return
        self.manager.advance_step()
        self.step = self.manager.global_step
        self.demand.begin_step(self.position)

    def train_step(self) -> None:
        """Make it."""
        result = self.blocks.train_and_schedule(self.batch)
        self.loss, self.accuracy = result.loss, result.metrics.get("train_acc")
        self._losses.add(result.loss)
        self._accuracies.add(self.accuracy)
        if self.demand is not None:
            self.demand.end_step(trained=result.trained)
        if self.manager is not None:
            for name, value in result.metrics.items():
                self.manager.take_record(f"train/{name}", value)  # goes out with the step metrics of hooks

    def end_epoch(self) -> None:
        """Its steps are over: what hooks returned goes out, figures become means, the scheduler has its turn."""
        self.flush()
        self.batch = self.batch_idx = None
        self.loss, self.accuracy = self._losses.take(), self._accuracies.take()
        if self.demand is not None:
            self.demand.end()
        self.blocks.step_scheduler("epoch", self.loss)

    @property
    def figures(self) -> dict[str, Any]:
        """The loss, and the newest evaluation."""
        return {"loss": self.loss, **self.evaluation}

    def begin_stretch(self, last: int | None) -> None:
        """In the step loop: steps begin of which that one is the last before a snapshot; None if the run ends first."""
        if self.demand is not None:
            self.demand.begin(() if last is None else (HookPoint.SNAPSHOT,), last or 0)

    def end_stretch(self) -> None:
        """They are over: what hooks returned goes out."""
        self.flush()
        if self.demand is not None:
            self.demand.end()

    def evaluate(self) -> None:
        """Ask the experiment how the model does."""
        if self.blocks.evaluates:
            self.evaluation, self.evaluated = self.blocks.evaluate(), True

    def should_stop(self) -> bool:
        """Ask the experiment whether that was the last epoch, or step."""
        self.stopped_early = self.blocks.should_stop(self.position, self.figures)
        return self.stopped_early

    # -- hooks and sinks -------------------------------------------------------------------------------------

    def fire(self, point: HookPoint) -> None:
        """Have hooks fire that are due here."""
        if self._contexts is not None:
            self._contexts.fire(point)

    def report_evaluation(self, point: HookPoint, group: str = "eval") -> None:
        """The evaluation goes to the sinks, if it is of now."""
        if self.manager is not None and self.evaluated:
            metrics = {f"{group}/{name}": value for name, value in self.evaluation.items()}
            self.manager.emit_metrics(metrics, self.position, point)

    def flush(self) -> None:
        """The metrics that hooks returned at single steps go to the sinks."""
        if self.manager is not None:
            self.manager.flush_step_metrics(self.position)

    # -- the end ---------------------------------------------------------------------------------------------

    def result(self) -> LoopResult:
        """What it came to."""
        loss = None if self.loss is None else float(self.loss)
        metrics = {name: _plain(value) for name, value in self.evaluation.items()}
        return LoopResult(self.num_epochs, self.num_steps, self.stopped_early, loss, metrics)

    @contextmanager
    def written_at_the_end(self) -> Iterator[None]:
        """Whatever ends the block: what was kept for hooks goes, and everything that they returned is written."""
        try:
            if self.manager is not None:
                self.manager.start(self.blocks.model)
            yield
        except BaseException as error:
            self._let_go()
            try:
                self._write()
            except Exception:
                # What ended the run is what the user has to see.
                logger.exception("Not all metrics could be written when the run ended by %s", type(error).__name__)
            raise
        self._let_go()
        self._write()

    def _let_go(self) -> None:
        self.batch = None
        if self.manager is not None:
            self.manager.finish()
        if self.demand is not None and self._contexts is not None:
            self.demand.let_go()
            self._contexts.let_go()

    def _write(self) -> None:
        if self.manager is not None:
            self.flush()
            self.manager.flush_sinks()


class _Mean:
    """Adds the figures of steps up where they are; nothing waits for a device."""

    def __init__(self) -> None:
        self._total: Any = None
        self._count = 0

    def add(self, figure: Any) -> None:
        """One more; None does not count."""
        if figure is None:
            return
        if isinstance(figure, Tensor):
            # Half precision would stop growing after a few hundred steps.
            figure = figure.detach().to(torch.promote_types(figure.dtype, torch.float32))
        self._total = figure if self._total is None else self._total + figure
        self._count += 1

    def take(self) -> Any:
        """The mean since the last time, as a tensor if there was one among them; None of nothing."""
        mean = self._total / self._count if self._count else None
        self._total, self._count = None, 0
        return mean


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# -- the start -----------------------------------------------------------------------------------------------


def start(
    blocks: Blocks,
    manager: HookManager | None,
    *,
    points: frozenset[HookPoint],
    first: int,
    run_context: Mapping[str, Any] | None,
) -> Run:
    """A run at its beginning; one that goes on from another (``first`` over 0) leaves hooks as they are."""
    if manager is not None and not isinstance(manager, HookManager):
        raise OptionError(f"manager= is a HookManager(hooks=[...], sinks=[...]), got {a_or_an(manager)}.")
    if not blocks.model.training:  # parts of a training model may be in evaluation mode on purpose
        blocks.model.train()
    if manager is not None:
        _prepare(manager, blocks.loop, anew=first == 0, run_context=run_context or {})
        for sentence in manager.will_fire(points):
            warnings.warn(sentence, HooklineWarning, stacklevel=outside())
    run = Run(blocks, manager)
    if blocks.loop == "step":
        _check_step(run, first)
    return run


def _prepare(manager: HookManager, loop: str, *, anew: bool, run_context: Mapping[str, Any]) -> None:
    manager.set_loop_type(loop)
    if anew:
        manager.reset_all()
    if run_context:
        manager.set_run_context(**run_context)


def _check_step(run: Run, first: int) -> None:
    """Schedules go by the manager's count of steps, the loop by its own."""
    if run.manager is None:
        run.step = first - 1
    elif run.step != first - 1:
        raise OptionError(
            f"first_step={first} goes on from step {first - 1}, and the manager is at step {run.step}: have it load "
            "the state_dict() that it had then."
        )
