"""What hooks are shown of a run, and what interventions get hold of; made when one is due, and not before.

Takes where the run is from `Run`, gradients from `Demand`; hands contexts to the `HookManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.errors import GuardError
from hookline.guard.guard import Guard, rollback
from hookline.guard.loaders import copy_loader, private_generator
from hookline.guard.model_context import ModelDataContext
from hookline.guard.snapshot import PreEpochState
from hookline.lifecycle.run_context import RunDataContext
from hookline.lifecycle.run_phase import in_phase
from hookline.training.loops.extra_state import Attributes, Belongings
from hookline.training.loops.training_step import Grouped

if TYPE_CHECKING:
    from hookline.lifecycle.points import HookPoint
    from hookline.training.loops.experiment_adapter import Blocks
    from hookline.training.loops.gradient_retention import Demand
    from hookline.training.loops.loop_run import Run
    from hookline.training.manager import HookManager

__all__ = ["Contexts", "LoopContext"]


class _FoundWhenRead:
    """A field that holds a function until it is read, and from then on what the function gave."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.name]
        if callable(value):
            value = instance.__dict__[self.name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        """Never called: the context is frozen. That it is there makes reading go through ``__get__``."""
        raise AttributeError(f"{self.name} is for reading")  # pragma: no cover


class LoopContext(RunDataContext):
    """The context that the loops make."""

    lr: float | None = _FoundWhenRead()  # type: ignore[assignment]  # of capturable optimizers it is on the device
    target_grad: Mapping[str, Tensor] | None = _FoundWhenRead()  # type: ignore[assignment]


class _NoEpochs(PreEpochState):
    """What the step loop has instead: an explanation."""

    def __init__(self) -> None:
        """Nothing is saved."""

    def restore(self) -> None:
        """There is nowhere to go."""
        raise GuardError(
            "restore_pre_epoch() goes back to before the epoch, and the step loop has none. Next: take epoch_loop(), "
            "or go back to a checkpoint of your own, model_ctx.save_checkpoint()."
        )


class _LoopModelContext(ModelDataContext):
    """One that trains as the loop does: as many batches to a step."""

    def __init__(self, blocks: Blocks, **given: Any) -> None:
        super().__init__(blocks.model, blocks.optimizer, **given)
        self._blocks = blocks

    def run_training_epoch(self, loader: Iterable[Any] | None = None, step: bool = True) -> dict[str, Tensor]:
        """Go through a loader once; with ``accumulate=k``, k of its batches make a step."""
        blocks = self._blocks
        if step and blocks.accumulate > 1:
            if loader is None or loader is blocks.current_loader:
                loader = copy_loader(blocks.current_loader, private_generator(blocks.model), shuffle=False)
            loader = Grouped(loader, blocks.accumulate)
        return super().run_training_epoch(loader, step)


class Contexts:
    """Makes them, one firing after the other."""

    def __init__(self, run: Run, manager: HookManager, demand: Demand) -> None:
        self._run = run
        self._blocks = run.blocks
        self._manager = manager
        self._demand = demand
        self._belongings = demand.belongings
        self._kept_guard: tuple[tuple[Any, ...], Guard] | None = None
        self._attributes: Attributes | None = None

    def fire(self, point: HookPoint) -> None:
        """Have hooks fire that are due there; the experiment's attributes are as before when they are done."""
        try:
            self._manager.fire(point, partial(self._run_context, point), self._model_context, epoch=self._run.epoch)
        finally:
            attributes, self._attributes = self._attributes, None
            if attributes is not None:
                attributes.put_back()

    def _run_context(self, point: HookPoint) -> LoopContext:
        run, blocks, demand = self._run, self._blocks, self._demand
        of_now = run.evaluation if run.evaluated else {}
        return LoopContext(
            hook_point=point,
            epoch=run.epoch,
            step=run.step if run.step >= 0 else None,
            model=blocks.model,
            config=blocks.config,
            loader=blocks.current_loader,
            batch_idx=run.batch_idx,
            batch_data=run.batch,
            loss=run.loss,
            train_acc=of_now.get("train_acc", run.accuracy),
            val_acc=of_now.get("val_acc"),
            lr=_rate(blocks.lr),
            accumulated_grads=demand.mean,
            prev_step_grads=demand.previous,
            target_grad=_target_finder(self._belongings, run),  # type: ignore[arg-type]
            profiler=self._manager.profiler,
            eval_metrics=of_now or None,
        )

    def _model_context(self) -> ModelDataContext:
        blocks = self._blocks
        self._attributes = Attributes(blocks)
        return _LoopModelContext(
            blocks,
            scheduler=self._belongings.all_but_optimizer,
            scaler=blocks.scaler,
            loader=blocks.current_loader,
            loss_fn=blocks.loss_fn if blocks.has_loss else None,
            batch=self._run.batch,
            train_step=blocks.train_and_schedule,
            shuffled_loader=blocks.make_shuffled,
            pre_epoch=self._demand.pre_epoch if self._run.in_epochs else _NoEpochs(),
            guard=self._guard(),
        )

    def _guard(self) -> Guard:
        """The same from one firing to the next, since it keeps its buffers; another if what it guards is another."""
        blocks, belongings = self._blocks, self._belongings
        guarded = (blocks.model, belongings.optimizer, belongings.scheduler, blocks.scaler, blocks.current_loader)
        if self._kept_guard is None or any(a is not b for a, b in zip(guarded, self._kept_guard[0], strict=True)):
            self._kept_guard = guarded, Guard(*guarded[:-1], loader=guarded[-1], strict=self._manager.strict)
        return self._kept_guard[1]

    def let_go(self) -> None:
        """The run is over."""
        self._kept_guard = None


def _rate(lr: Any) -> Any:
    return partial(float, lr.detach().clone()) if isinstance(lr, Tensor) else lr


def _target_finder(belongings: Belongings, run: Run) -> Callable[[], Mapping[str, Tensor] | None] | None:
    """What finds the target gradient at a step, and leaves gradients, buffers, attributes and random streams alone."""
    blocks, step = run.blocks, max(run.step, 0)
    find = blocks.target_gradient
    if find is None:
        return None

    def found() -> Mapping[str, Tensor] | None:
        attributes, loader = Attributes(blocks), blocks.current_loader
        saved = (blocks.model, belongings.optimizer, belongings.scheduler, blocks.scaler)
        try:
            with in_phase("intervention"), rollback(*saved, loader=loader, scope="grads"):
                gradient: Mapping[str, Tensor] | None = find(blocks.model, step)
                return gradient
        finally:
            attributes.put_back()

    return found
