"""Follow a loop that someone else wrote: one line before it, no edit inside it.

Users call `follow`; ``hookline run -- python train.py`` calls it in the script's process. Steps are told by the
optimizer, batches and epochs by the loader, the loss by ``backward()``: a `Follow` is attached to these, and
calls a `HostRun`, which fires the hooks.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.integrations.host_run import HostRun, check_options
from hookline.integrations.loop_events import BackwardLosses, LoaderPass, follow_passes
from hookline.messages import type_name
from hookline.phases import ENTERED
from hookline.sites import _torch
from hookline.sites.optimizers import checked_optimizer, unwrap_optimizer
from hookline.when import HookPoint

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.lifecycle.manager import HookManager

_BEFORE_OTHERS: Final = 1
"""Of what is done at the end of a process, a higher number comes first; what has none may find queues closed."""


def follow(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    hooks: Iterable[Any] | str | None = None,
    *,
    sinks: Iterable[Any] | None = None,
    loader: Any = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    scheduler: Any = None,
    scheduler_per: str | None = None,
    accumulate: int = 1,
    scaler: Any = None,
    manager: HookManager | None = None,
    run_context: Mapping[str, Any] | None = None,
    **options: Any,
) -> Follow:
    """Fire hooks in a loop that you do not want to edit; return what follows it.

    Recipe::

        run = hookline.follow(model, optimizer, ["norms"], sinks=[hookline.sinks.CSVSink("run.csv")], loader=loader)
        for epoch in range(epochs):  # your loop, as it is
            for x, y in loader:
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        run.close()  # or: with hookline.follow(...) as run; or the end of the process

    A step is a step of the optimizer; one that a ``GradScaler`` skips is none. POST_STEP comes at its end, before
    gradients are cleared. With ``loader=``, a pass over it is an epoch: PRE_EPOCH and PRE_STEP come when the loop takes
    a batch in training mode, POST_EPOCH when there is no batch left. Without it everything is epoch 0, PRE_STEP comes
    just before the optimizer's step, and POST_EPOCH when this is closed. The loss of a step is the sum of what
    ``backward()`` was called on since the step before, unless ``run.loss(value)`` says another.

    The run is the same with it and without, bit for bit.

    Args:
        model: The model, wrapped or not.
        optimizer: What trains it. Of several, a step of the last one ends a step.
        hooks: Hooks as objects, classes or names (``"norms"``, ``"observers"``); trackers and watches as well.
        sinks: Where metrics go.
        loader: The training data that the loop iterates, a ``DataLoader`` or an object of a class of your own. Hooks
            that train or shuffle need it.
        loss_fn: ``loss_fn(model, batch)`` returns the loss. Hooks that compute gradients of their own need it.
        scheduler: Of the learning rate; interventions put it back, and step it as the loop does where they train.
        scheduler_per: What the loop steps it for, ``"step"`` or ``"epoch"``, for interventions that train. If left
            out: ``loop``.
        accumulate: How many batches make a step, for interventions that train; their loss is the mean of these.
        scaler: The ``GradScaler`` of the loop; losses are shown without its scale.
        manager: A `HookManager` that is there already, in place of hooks and sinks.
        run_context: What hooks and sinks are told of the run (``run_dir=``, ``experiment_name=``, …).
        options: Those of `HostRun`: ``run_file``, ``hook_config``, ``loop``, ``snapshot_every``, ``flush_every``,
            ``on_error``, …, and of `HookManager`: ``log``, ``profile_hooks``, …

    Raises:
        UnhookableError: if torch can call no hooks on the optimizer, or the loader cannot be followed.
    """
    if manager is None:
        check_options(options, follow, HostRun)
    host = HostRun(hooks, sinks=sinks, manager=manager, **options)
    parts = {"scheduler": scheduler, "scaler": scaler, "loader": loader, "loss_fn": loss_fn}
    parts |= {"scheduler_per": scheduler_per, "accumulate": accumulate}
    try:
        return Follow(host, model, optimizer, parts, run_context)
    except BaseException:
        host.close()  # nobody else can
        raise


class Follow:
    """Turn what a loop does into the events of a `HostRun`; `follow` returns it.

    Recipe: ``with hookline.follow(model, optimizer, ["norms"]) as run: train()``; then ``run.metrics``.
    """

    def __init__(
        self,
        host: HostRun,
        model: nn.Module,
        optimizer: Any,
        parts: Mapping[str, Any],
        run_context: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"follow(model, optimizer) takes an nn.Module first; got {type_name(model)}.")
        self._optimizers = _unwrapped(optimizer)
        self._host, self._model, self._scaler = host, model, parts["scaler"]
        self._between_steps: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context in which an intervention may train with the scaler that is making a step."""
        if self._scaler is not None:
            self._between_steps = partial(_torch.between_scaler_steps, self._scaler)
        self._process = os.getpid()  # a child that is forked later has this too, and is not followed
        self.epoch = 0
        """The epoch, counted from 0."""
        self._steps_in_pass = 0
        """How many steps of it were made."""
        self._pass: LoaderPass | None = None
        """The one whose batches the steps are made of."""
        self._latest_pass: LoaderPass | None = None
        """The one that gave a batch last, perhaps in evaluation mode."""
        self._batches_trained = 0
        """How many batches of the pass were given when ``backward()`` was called last."""
        self._told_loss: Any = None
        """What the user says that the loss of the step is."""
        self._ends_with_step = False
        """Whether the pass was over before the step of its last batch was made."""
        self._may_nest = any(map(_has_several_steps, self._optimizers))
        self._error: BaseException | None = None
        self._has_loader = False
        host.begin_run(model, self._optimizers[0], run_context=run_context, tells_phase=False, **parts)
        self._attached = ExitStack()
        self._attach(parts["loader"])
        atexit.register(self._close_at_end)  # before what was registered earlier: a sink may end its writer there
        # A child that multiprocessing has forked ends by os._exit(), which atexit does not hear of.
        self._at_end = Finalize(None, self._close_at_end, exitpriority=_BEFORE_OTHERS)

    def _attach(self, loader: Any) -> None:
        """Attach this to the optimizers and ``backward()``, and to the loader if there is one."""
        parameters = [each for one in self._optimizers for group in one.param_groups for each in group["params"]]
        with ExitStack() as attached:
            self._losses = BackwardLosses(
                self._scaler, parameters=parameters, on_backward=self._note_backward, on_forget=self._forget_batches
            )
            attached.callback(self._losses.remove)
            for each in self._optimizers:
                attached.callback(each.register_step_pre_hook(self._before_step).remove)
                attached.callback(each.register_step_post_hook(self._after_step).remove)
            self._attached = attached
            if loader is not None:
                self.follow_loader(loader)
            self._attached = attached.pop_all()

    def follow_loader(self, loader: Any) -> None:
        """Follow a loader of the training data."""
        self._attached.callback(follow_passes(loader, self))
        self._has_loader = True

    def take_over(self, latest: LoaderPass | None, losses: BackwardLosses) -> None:
        """Take over what was noted before this was made: the pass under way over its loader, and the losses."""
        losses.hand_to(self._losses)
        if latest is not None and self._has_loader:
            latest.listener, self._pass = self, latest

    def when_closed(self, act: Callable[[], None]) -> None:
        """Call ``act`` when this is closed: what was attached elsewhere for its sake comes off with it."""
        self._attached.callback(act)

    # -- what the loop does ------------------------------------------------------------------------------------

    def _is_deaf(self) -> bool:
        """Return whether what happens is none of the loop's: an intervention does it, or a process that was forked."""
        return ENTERED.phase == "intervention" or self._process != os.getpid() or self._host.run is None

    @_torch.untraced_in_place  # also where a loop compiles the step of its optimizer
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_deaf() or (self._may_nest and _torch.is_inner_step(optimizer)):
            return
        # The optimizer itself is the first argument; the rest is asked only where there is one, which is rare.
        self._losses.is_closure = (len(args) > 1 or bool(kwargs)) and any(map(callable, (*args, *kwargs.values())))
        if not self._host.in_step:  # the batch was taken in evaluation mode, or there is no loader
            latest = self._latest_pass
            with self._between_steps():
                self._begin_step(self._pass if latest is None or latest.is_over else latest)

    @_torch.untraced_in_place
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not self._optimizers[-1] or not self._host.in_step or self._is_deaf():
            return
        if self._may_nest and _torch.is_inner_step(optimizer):
            return
        loss = self._losses.take()
        found_inf = optimizer.__dict__.get("found_inf")  # a scaler lets fused optimizers decide by themselves
        if found_inf is not None and bool(found_inf):  # and this one has left the parameters alone
            return
        told, self._told_loss = self._told_loss, None
        self._steps_in_pass += 1
        with self._between_steps():
            self._host.end_step(loss=loss if told is None else told)
            if self._ends_with_step:
                self._end_epoch()

    def _note_backward(self) -> None:
        """Remember which batch a backward is of."""
        if self._pass is not None:
            self._batches_trained = self._pass.count

    def _forget_batches(self) -> None:
        """Leave out the batches whose gradients the loop has cleared without a step: they are no part of one."""
        latest = self._pass
        if latest is not None and self._host.in_step and latest.count > self._batches_trained:
            self._host.replace_batch(latest.batch, latest.count - 1)

    def take_batch(self, each: LoaderPass) -> None:
        """Begin a step with a batch, or add it to the one that is being made."""
        if self._is_deaf():
            return
        self._latest_pass = each
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if not self._host.in_step:
            self._begin_step(each)
        elif each is self._pass:
            self._host.add_batch(each.batch)
        else:  # the loop had looked at a batch, and begins its pass now
            self._begin_pass(each)
            self._host.replace_batch(each.batch, each.count - 1)

    def end_pass(self, each: LoaderPass) -> None:
        """End the epoch with its pass; if the step of the last batch is still to come, after that."""
        if each is not self._pass or self._is_deaf():
            return
        if self._host.in_step:  # of a loader that fetches ahead
            self._ends_with_step = True
        elif self._steps_in_pass:
            self._end_epoch()

    def _begin_step(self, each: LoaderPass | None) -> None:
        self._begin_pass(each)
        if each is None:
            self._host.begin_step()
        else:
            self._host.begin_step(batch=each.batch, batch_idx=each.count - 1)

    def _begin_pass(self, each: LoaderPass | None) -> None:
        """Begin an epoch, if none has begun; a pass that the loop has left before its end has ended one."""
        if each is not self._pass and self._pass is not None and self._steps_in_pass and self._host.in_epoch:
            self._end_epoch()
        self._pass = each
        if not self._host.in_epoch:
            self._host.begin_epoch(self.epoch)

    def _end_epoch(self) -> None:
        self._host.end_epoch()
        self.epoch += 1
        self._steps_in_pass, self._ends_with_step = 0, False

    # -- what the user reads and says --------------------------------------------------------------------------

    @property
    def manager(self) -> HookManager:
        """Fires the hooks; has their metrics, errors and costs."""
        return self._host.manager

    @property
    def metrics(self) -> dict[str, Any]:
        """What each hook returned last, by ``"hook/metric"``."""
        last = self.manager.get_last_metrics
        return {name: value for point in HookPoint for name, value in last(point).items()}

    @property
    def step(self) -> int:
        """The step that is being made or was made last, counted from 0; -1 before the first."""
        return self.manager.global_step

    def note(self, **facts: Any) -> None:
        """Write more about the run into ``run.json``, if it has one."""
        self._host.note(**facts)

    def loss(self, value: Tensor | float) -> None:
        """Say what the loss of the step is that is being made, where ``backward()`` does not tell."""
        self._told_loss = value

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return the state of the hooks, for the loop to put into its own checkpoint.

        Of several ranks it is this rank's. With ``all_ranks`` every rank calls it, and one file has the states of all.
        """
        own = {"epoch": self.epoch, "steps_in_pass": self._steps_in_pass}
        return {**self._host.state_dict(all_ranks=all_ranks), "follow": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; call it before the loop goes on."""
        self._host.load_state_dict(state)
        self.epoch, self._steps_in_pass = state["follow"]["epoch"], state["follow"]["steps_in_pass"]

    def __repr__(self) -> str:
        names = ", ".join(self.manager.hooks) or "none"
        state = "" if self._host.is_running else ", closed"
        return f"<Follow of {type(self._model).__name__}, epoch {self.epoch}, step {self.step}{state}; hooks: {names}>"

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the last epoch, take everything off the loop, write all metrics, close the sinks; may be called again."""
        self._close(is_exit=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._error = error
        try:
            self.close()
        except BaseException:
            if error is None:  # else what ended the block is what the user has to see
                raise

    def _close_at_end(self) -> None:
        if self._process != os.getpid():
            return
        self._error = error_of_process()
        self._close(is_exit=self._error is None)

    def _close(self, *, is_exit: bool) -> None:
        if not self._host.is_running:
            return
        atexit.unregister(self._close_at_end)
        self._at_end.cancel()
        self._attached.close()
        self._pass = self._latest_pass = None
        # Many loops destroy the process group before the process ends.
        with self.manager.output.ranks.ending(is_exit=is_exit) as together, ExitStack() as last:
            last.callback(self._host.close)
            last.callback(self._host.end_run, self._error, report=together)
            if together and self._error is None and self._host.in_epoch and self._steps_in_pass:
                self._host.end_epoch()


def _unwrapped(optimizer: Any) -> list[Any]:
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not optimizers:
        raise OptionError("follow(model, optimizer) was given an empty list; give the optimizers whose steps count.")
    return [checked_optimizer(unwrap_optimizer(each)) for each in optimizers]  # hooks are called with the one inside


def _has_several_steps(optimizer: Any) -> bool:
    """Return whether its ``step`` may call that of a base class, which torch calls hooks around too."""
    return sum("step" in vars(cls) for cls in type(optimizer).__mro__) > 2  # its own, and the one of Optimizer


def error_of_process() -> BaseException | None:
    """Return the error that is ending this process; None if it ends well."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return None if isinstance(error, SystemExit) else error
