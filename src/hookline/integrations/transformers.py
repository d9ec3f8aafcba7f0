"""`HooklineCallback`: hooks in the Hugging Face ``Trainer``, and so in the trainers of TRL and others built on it.

Users hand it to ``Trainer(callbacks=[...])``; the Trainer calls its events, and it calls `HostRun`. Needs the package
``transformers``, which ``pip install 'hookline[transformers]'`` brings.
"""

from __future__ import annotations

import atexit
import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.error_policy import warn_user
from hookline.errors import LifecycleError
from hookline.integrations.host_run import HostCallback, needed_package
from hookline.lifecycle import checkpoint_file
from hookline.sites.functions.wrapped import wrapped

with needed_package("transformers", __name__):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor, nn


STATE_FILE: Final = "hookline.pt"
"""The file in a checkpoint of the Trainer that has the state of the hooks."""


class HooklineCallback(HostCallback, TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
    """Fire hooks in a ``Trainer``.

    Recipe::

        callback = HooklineCallback(["norms", MyHook()])
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()

    The run stays the same, bit for bit. A step is a step of the optimizer, with all batches that are accumulated; its
    number is the Trainer's ``global_step`` before it. Hooks go on where they were when the Trainer resumes from a
    checkpoint: their state is a file in it. In hooks, ``ctx.config`` is the Trainer's ``args``.

    Args:
        hooks: Hooks as objects, classes or names (``"norms"``, ``"observers"``); trackers and watches as well.
        sinks: Where metrics go. If left out: lines of JSON in ``hookline/`` in the Trainer's output folder.
        report_to: ``"trainer"`` hands metrics to ``Trainer.log`` as well, and so to its W&B or TensorBoard run, which
            stays one run; those of steps as their mean since the last time. ``"sinks"`` does not.
        options: As for `HostRun`: ``run_file``, ``manager``, ``hook_config``, ``loop``, ``snapshot_every``,
            ``flush_every``, ``on_error``, …
    """

    _logs_per_step = False
    _loss: Tensor | None = None
    """Of the batches of the step so far."""
    _epoch = 0
    _awaited = 0
    """How many evaluations follow before the epoch is over."""
    _is_logging = False

    # -- the run -----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin a run, or go on with one from a checkpoint."""
        self._end()  # of a run that failed
        trainer, folder = _find_trainer(self)
        self._attach_to(trainer, trainer.callback_handler.callbacks)
        step, optimizer = int(state.global_step), given.get("optimizer")
        if step:
            self._load_state(folder or Path(args.output_dir) / f"checkpoint-{step}")
        context = {"run_dir": str(Path(args.output_dir) / "hookline"), "strategy": "trainer"}
        self._host.begin_run(
            given.get("model"),
            optimizer,
            step=step,
            scheduler=given.get("lr_scheduler"),
            scheduler_per="step",
            scaler=getattr(optimizer, "scaler", None),
            loader=given.get("train_dataloader"),
            loss_fn=self._compute_loss,
            accumulate=int(args.gradient_accumulation_steps),
            clip_norm=args.max_grad_norm or None,
            config=args,
            run_context=context,
        )
        self._attached.callback(wrapped(trainer, "training_step", self._training_step))
        self._attached.callback(wrapped(trainer, "evaluation_loop", self._evaluation_loop))
        atexit.register(self._end)  # a Trainer that fails outside of a step tells nobody; metrics are written then
        self._epoch = int(state.epoch or 0)
        self._awaited = 0

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the run."""
        if self._is_running and self._awaited:
            self._host.end_epoch()
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        atexit.unregister(self._end)
        self._loss = None
        super()._end(error)

    @contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        """End the run as the Trainer does when an event raises: it tells callbacks nothing."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    # -- epochs and steps ----------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin an epoch."""
        with self._ends_if_it_fails():
            self._awaited = 0
            self._host.begin_epoch(self._epoch)
            self._epoch += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End an epoch; if the Trainer is going to evaluate, after that."""
        with self._ends_if_it_fails():
            self._host.finish_steps()
            data = getattr(self._trainer, "eval_dataset", None)
            self._awaited = (len(data) if isinstance(data, dict) else 1) if control.should_evaluate else 0
            if not self._awaited:
                self._host.end_epoch()

    def _training_step(self, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn the batch and the loss of a step from the Trainer's method."""
        with self._ends_if_it_fails():
            if self._host.in_step:
                self._host.add_batch(inputs)
            else:
                self._host.begin_step(int(self._trainer.state.global_step), batch=inputs)
            loss = original(model, inputs, *args, **kwargs)
            self._loss = loss if self._loss is None else self._loss + loss
            return loss

    def _evaluation_loop(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._ends_if_it_fails():
            self._host.begin_evaluation()
            found = original(*args, **kwargs)
            self._host.end_evaluation()
            return found

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Hold the gradients: the Trainer clears them before the step ends."""
        self._host.hold_gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a step."""
        skipped = getattr(given.get("optimizer"), "step_was_skipped", False)
        loss, self._loss = self._loss, None
        with self._ends_if_it_fails():
            self._host.end_step(loss=loss, trained=not skipped)
            if state.global_step >= state.max_steps:
                self._host.report_rest()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        """Take the metrics of an evaluation: ``eval_loss`` is ``eval/loss`` here."""
        if not self._is_running:
            return  # an evaluation after or without training
        with self._ends_if_it_fails():
            found = {name.removeprefix("eval_"): value for name, value in (metrics or {}).items()}
            found.pop("epoch", None)  # the Trainer's position, among its metrics
            self._host.end_evaluation(found)
            if self._awaited:
                self._awaited -= 1
                if not self._awaited:
                    self._host.end_epoch()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Hand step metrics to the Trainer's logger when it logs itself."""
        if self._reports and not self._is_logging and self._is_running:
            self._host.flush()

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self._is_logging = True
        try:
            self._trainer.log(metrics)
        finally:
            self._is_logging = False

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the state of the hooks into the checkpoint that the Trainer has just written."""
        if not self._is_running:
            return
        with self._ends_if_it_fails():
            tree = self._host.state_dict(all_ranks=True)  # the Trainer saves on every rank
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero and folder.is_dir():
                checkpoint_file.write(folder / STATE_FILE, tree)

    def _load_state(self, folder: Path) -> None:
        file = folder / STATE_FILE
        if file.is_file():
            self._host.load_state_dict(checkpoint_file.read(file))
        else:
            warn_user(f"There is no {file.name} in {folder}, so hooks begin anew.")

    # -- the trainer ---------------------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the Trainer's loss of a batch, for interventions; the sums that trainers of TRL keep stay as they are.

        By the wrapped model, which the Trainer trains: its collectives match those of other processes.
        """
        trainer = self._trainer
        sums = _sums_of(trainer)
        inputs = trainer._prepare_inputs(dict(batch) if isinstance(batch, Mapping) else batch)
        try:
            with trainer.compute_loss_context_manager():
                loss: Tensor = trainer.compute_loss(trainer.model_wrapped, inputs)
        finally:
            vars(trainer).update(sums)
        return loss.mean() if loss.ndim else loss


def _find_trainer(callback: HooklineCallback) -> tuple[Any, Path | None]:
    """Return the Trainer that calls an event of ``callback``, and the checkpoint that it resumes from.

    The Trainer gives callbacks everything but itself, so it is found among the callers of the event, once a run.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if any(one is callback for one in getattr(getattr(caller, "callback_handler", None), "callbacks", ())):
            folder = frame.f_locals.get("resume_from_checkpoint")
            return caller, Path(folder) if isinstance(folder, str | Path) else None
        frame = frame.f_back
    raise LifecycleError("HooklineCallback is called by no transformers.Trainer. Next: HostRun, for your own trainer.")


def _sums_of(trainer: Any) -> dict[str, Any]:
    """Return copies of what a Trainer may count while it computes a loss: its numbers, and the metrics of TRL's."""
    numbers = {name: value for name, value in vars(trainer).items() if type(value) in (int, float)}
    metrics = vars(trainer).get("_metrics")
    return numbers if metrics is None else {**numbers, "_metrics": copy.deepcopy(metrics)}
