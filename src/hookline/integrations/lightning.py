"""`HooklineCallback`: hooks in Lightning's ``Trainer``, with automatic and with manual optimization.

Users hand it to ``Trainer(callbacks=[...])``; the Trainer calls its events, and it calls `HostRun`. Needs the package
``lightning``, which ``pip install 'hookline[lightning]'`` brings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.error_policy import warn_user
from hookline.integrations.host_run import HostCallback, needed_package
from hookline.phases import phase
from hookline.sites.functions.wrapped import wrapped
from hookline.tree import copied

with needed_package("lightning", __name__):
    from lightning.pytorch import Callback

if TYPE_CHECKING:
    from torch import nn


class HooklineCallback(HostCallback, Callback):  # type: ignore[misc]  # mypy does not look into lightning
    """Fire hooks in a Lightning ``Trainer``.

    Recipe::

        callback = HooklineCallback(["norms", MyHook()])
        trainer = lightning.Trainer(max_epochs=3, callbacks=[callback])
        trainer.fit(module, loader)

    The run stays the same, bit for bit. Hooks see the ``LightningModule`` as the model. A step is a batch in which an
    optimizer made a step, with the batches before it that were accumulated; with manual optimization, however many
    optimizers stepped. POST_EPOCH comes after the validation of the epoch. The state of the hooks is in Lightning's own
    checkpoints, also in one that is saved after ``fit()``. In hooks, ``ctx.config`` is ``module.hparams``.

    Interventions train by ``training_step``; what it logs then is dropped. With manual optimization it makes steps
    itself, so hooks that need a loss are left out.

    Args:
        hooks: Hooks as objects, classes or names (``"norms"``, ``"observers"``); trackers and watches as well.
        sinks: Where metrics go. If left out: lines of JSON in ``hookline/`` in the folder of the run.
        report_to: ``"trainer"`` hands metrics to the Trainer's loggers as well, and so to its W&B or TensorBoard run,
            which stays one run. ``"sinks"`` does not.
        options: As for `HostRun`: ``run_file``, ``manager``, ``hook_config``, ``loop``, ``snapshot_every``,
            ``flush_every``, ``on_error``, …
    """

    def __init__(self, hooks: Iterable[Any] | str | None = None, **options: Any) -> None:
        super().__init__(hooks, **options)
        self._losses: list[Tensor] = []
        """What ``training_step`` has returned."""
        self._backward_losses: list[Tensor] = []
        """What ``manual_backward`` was given."""
        self._steps_seen = 0
        self._global_step = 0
        self._steps_before: int | None = None
        """How many steps were made, by our count, when the checkpoint was written that is being loaded."""
        self._logged: Mapping[str, Any] = {}
        self._kept: dict[str, Any] | Exception = {}
        """The state at the end of the run, for a checkpoint that is saved after it; or why there is none."""

    # -- the run -----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run, or go on with one from a checkpoint."""
        self._end()  # of a run that failed
        self._attach_to(trainer, trainer.callbacks)
        self._kept = {}
        if trainer.global_step and getattr(trainer, "ckpt_path", None) and self._steps_before is None:
            warn_user(f"There is no state of hooks in {trainer.ckpt_path}, so hooks begin anew.")
        schedulers = trainer.lr_scheduler_configs
        is_automatic = bool(pl_module.automatic_optimization)
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "hookline"
        self._host.begin_run(
            pl_module,
            trainer.optimizers[0] if trainer.optimizers else None,
            step=self._steps_before if self._steps_before is not None else trainer.global_step,
            scheduler=schedulers[0].scheduler if schedulers else None,
            scheduler_per=schedulers[0].interval if schedulers else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            loader=trainer.train_dataloader,
            loss_fn=self._compute_loss if is_automatic else None,
            accumulate=int(trainer.accumulate_grad_batches),
            clip_norm=(trainer.gradient_clip_val or None) if by_norm and is_automatic else None,
            config=getattr(pl_module, "hparams", None),
            run_context={"run_dir": str(folder), "strategy": "trainer"},
        )
        for optimizer in trainer.optimizers:
            self._attached.callback(optimizer.register_step_post_hook(self._note_step).remove)
        if not is_automatic:
            self._attached.callback(wrapped(pl_module, "manual_backward", self._manual_backward))
        self._steps_before = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run, and keep the state of the hooks: callbacks that save, and users, may do so after it."""
        if self._is_running:
            self._host.flush()
            try:
                self._kept = copied(self._host.state_dict(all_ranks=True))
            except Exception as error:  # matters only to one who saves
                self._kept = error
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run as the Trainer does; what was recorded until then is written."""
        self._end(exception)

    def _end(self, error: BaseException | None = None) -> None:
        self._losses, self._backward_losses = [], []
        super()._end(error)

    # -- epochs and steps ----------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch."""
        self._host.begin_epoch(trainer.current_epoch, loader=trainer.train_dataloader)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End an epoch, which has been validated by now."""
        if self._is_running:
            self._host.end_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, or add a batch to the one that is being accumulated."""
        if not self._host.in_epoch:  # one that goes on in the middle, from a checkpoint, is not announced
            self.on_train_epoch_start(trainer, pl_module)
        self._steps_seen, self._global_step = 0, trainer.global_step
        if self._host.in_step:
            self._host.add_batch(batch)
        else:
            self._host.begin_step(batch=batch, batch_idx=batch_idx)

    def _note_step(self, *_: Any) -> None:
        if phase() != "intervention":
            self._steps_seen += 1

    def _manual_backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn a loss from the method that a module with manual optimization calls."""
        if phase() != "intervention" and isinstance(loss, Tensor) and loss.numel() == 1:
            self._backward_losses.append(loss.detach())
        return original(loss, *args, **kwargs)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step, if the optimizer made one in this batch, or if a scaler has skipped it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())  # with automatic optimization, divided by the number of batches
        if not self._steps_seen and trainer.global_step == self._global_step:
            return  # gradients are accumulated
        losses = self._losses or self._backward_losses  # of manual optimization that returns none
        self._losses, self._backward_losses = [], []
        self._host.hold_gradients()
        self._host.end_step(loss=sum(losses[1:], start=losses[0]) if losses else None, trained=self._steps_seen > 0)

    # -- validation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an evaluation; at the end of an epoch, after its steps."""
        if not self._is_running:
            return  # the check before training, or validation without it
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not self._host.in_step:
            self._host.finish_steps()
        self._logged = dict(trainer.callback_metrics)
        self._host.begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the metrics that the validation has logged."""
        if self._is_running:
            before, self._logged = self._logged, {}
            new = {name: value for name, value in trainer.callback_metrics.items() if before.get(name) is not value}
            self._host.end_evaluation(new)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks on all ranks, for Lightning's checkpoint; after training, that of its end."""
        if self._is_running:
            return self._host.state_dict(all_ranks=True)
        if isinstance(self._kept, Exception):
            raise self._kept
        return self._kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have hooks go on where they were, once training begins."""
        if state_dict:
            self._steps_before = state_dict["run"]["step"] + 1
            self._host.load_state_dict(state_dict)

    # -- for interventions and loggers -----------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of ``training_step``, by the wrapped model: its collectives match those of other ranks."""
        trainer = self._trainer
        module = trainer.lightning_module
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        given = (batch, 0) if _takes_two(module.training_step) else (batch,)
        with ExitStack() as dropped:  # what it logs: an intervention is no step of the run
            for name in ("log", "log_dict"):
                dropped.callback(wrapped(module, name, lambda *_, **__: None))
            output = trainer.strategy.training_step(*given)
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=step)


def _takes_two(step: Callable[..., Any]) -> bool:
    """Return whether a ``training_step`` takes the index of the batch too, as Lightning decides: by count, not name."""
    taken = inspect.signature(step).parameters
    return len(taken) > 1 or any(one.kind is one.VAR_POSITIONAL for one in taken.values())
