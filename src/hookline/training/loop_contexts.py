"""Make what hooks are shown of a run and what interventions work with, when one is due.

`Run.fire` calls `Contexts`, which reads the `Run` and `GradientRetention`, and calls `HookManager.fire`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.errors import LifecycleError
from hookline.guard.guard import Guard, rollback
from hookline.guard.loaders import copy_loader, private_generator
from hookline.guard.model_context import ModelDataContext
from hookline.guard.snapshot import PreEpochState
from hookline.lifecycle.context import RunDataContext
from hookline.phases import in_phase
from hookline.training.extra_state import AttributeSnapshot, ExtraState
from hookline.training.step import Grouped

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager
    from hookline.training.experiment_adapter import ExperimentAdapter
    from hookline.training.retention import GradientRetention
    from hookline.training.run import Run
    from hookline.when import HookPoint

__all__ = ["Contexts", "LoopContext"]


class _FoundWhenRead:
    """Hold a function until the field is read, and from then on its result."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__.get(self.name)
        if callable(value):
            value = instance.__dict__[self.name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        """Raise: the context is frozen. A descriptor with ``__set__`` is asked before the instance dictionary."""
        raise AttributeError(f"{self.name} is for reading")  # pragma: no cover


class LoopContext(RunDataContext):
    """The context that the loops make."""

    lr: float | None = _FoundWhenRead()  # type: ignore[assignment]  # of capturable optimizers it is on the device
    target_grad: Mapping[str, Tensor] | None = _FoundWhenRead()  # type: ignore[assignment]


class _NoEpochs(PreEpochState):
    """Explain that the step loop has no epoch to go back to."""

    def __init__(self) -> None:
        """Save nothing."""

    def restore(self) -> None:
        """Raise: there is no epoch."""
        raise LifecycleError(
            "restore_pre_epoch() goes back to before the epoch, and the step loop has none. Next: take epoch_loop(), "
            "or go back to a checkpoint of your own, model_ctx.save_checkpoint()."
        )


class _LoopModelContext(ModelDataContext):
    """Train as the loop does: as many batches to a step."""

    def __init__(self, adapter: ExperimentAdapter, **given: Any) -> None:
        super().__init__(adapter.bare_model, adapter.optimizer, **given)
        self._adapter = adapter

    def run_training_epoch(self, loader: Iterable[Any] | None = None, step: bool = True) -> dict[str, Tensor]:
        """Go through a loader once; with ``accumulate=k``, k of its batches make a step."""
        adapter = self._adapter
        if step and adapter.accumulate > 1:
            if loader is None or loader is adapter.current_loader:
                loader = copy_loader(adapter.current_loader, private_generator(adapter.model), shuffle=False)
            loader = Grouped(loader, adapter.accumulate)
        return super().run_training_epoch(loader, step)


class Contexts:
    """Make contexts, one firing after the other."""

    def __init__(self, run: Run, manager: HookManager, retention: GradientRetention) -> None:
        self._run = run
        self._adapter = run.adapter
        self._manager = manager
        self._retention = retention
        self._extra_state = retention.extra_state
        self._kept_guard: tuple[tuple[Any, ...], Guard] | None = None
        self._attributes: AttributeSnapshot | None = None

    def fire(self, point: HookPoint) -> None:
        """Fire the hooks that are due there; restore the experiment's attributes afterwards."""
        try:
            self._manager.fire(point, partial(self._run_context, point), self._model_context, epoch=self._run.epoch)
        finally:
            attributes, self._attributes = self._attributes, None
            if attributes is not None:
                attributes.put_back()

    def _run_context(self, point: HookPoint) -> LoopContext:
        run, adapter, retention = self._run, self._adapter, self._retention
        of_now = run.evaluation if run.evaluated else {}
        return LoopContext(
            hook_point=point,
            epoch=run.epoch,
            step=run.step if run.step >= 0 else None,
            model=adapter.bare_model,
            config=adapter.config,
            loader=adapter.current_loader,
            batch_idx=run.batch_idx,
            batch_data=run.batch,
            loss=run.loss,
            train_acc=of_now.get("train_acc", run.accuracy),
            val_acc=of_now.get("val_acc"),
            lr=_rate(adapter.lr),
            accumulated_grads=retention.mean,
            prev_step_grads=retention.previous,
            target_grad=_target_finder(self._extra_state, run),  # type: ignore[arg-type]
            profiler=self._manager.profiler,
            eval_metrics=of_now or None,
        )

    def _model_context(self) -> ModelDataContext:
        adapter = self._adapter
        self._attributes = AttributeSnapshot(adapter)
        return _LoopModelContext(
            adapter,
            scheduler=self._extra_state.all_but_optimizer,
            scaler=adapter.scaler,
            loader=adapter.current_loader,
            loss_fn=adapter.loss_fn if adapter.has_loss else None,
            batch=self._run.batch,
            train_step=adapter.train_and_schedule,
            shuffled_loader=adapter.make_shuffled,
            pre_epoch=self._retention.pre_epoch if self._run.in_epochs else _NoEpochs(),
            guard=self._guard(),
        )

    def _guard(self) -> Guard:
        """Return the guard of the last firing, since it keeps its buffers; a new one if what it guards has changed."""
        adapter, extra_state = self._adapter, self._extra_state
        guarded = (adapter.model, extra_state.optimizer, extra_state.scheduler, adapter.scaler, adapter.current_loader)
        if self._kept_guard is None or any(a is not b for a, b in zip(guarded, self._kept_guard[0], strict=True)):
            self._kept_guard = guarded, Guard(*guarded[:-1], loader=guarded[-1], strict=self._manager.strict)
        return self._kept_guard[1]

    def release(self) -> None:
        """Drop the guard: the run is over."""
        self._kept_guard = None


def _rate(lr: Any) -> Any:
    return partial(float, lr.detach().clone()) if isinstance(lr, Tensor) else lr


def _target_finder(extra_state: ExtraState, run: Run) -> Callable[[], Mapping[str, Tensor] | None] | None:
    """Return a function that finds the target gradient at a step, and leaves everything else as it was."""
    adapter, step = run.adapter, max(run.step, 0)
    find = adapter.target_gradient
    if find is None:
        return None

    def found() -> Mapping[str, Tensor] | None:
        attributes, loader = AttributeSnapshot(adapter), adapter.current_loader
        saved = (adapter.model, extra_state.optimizer, extra_state.scheduler, adapter.scaler)
        try:
            with in_phase("intervention"), rollback(*saved, loader=loader, scope="grads"):
                gradient: Mapping[str, Tensor] | None = find(adapter.bare_model, step)
                return gradient
        finally:
            attributes.put_back()

    return found
