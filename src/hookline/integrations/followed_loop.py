"""Learn from a loop what it does, without an edit in it: steps from its optimizer, batches and epochs from its loader.

`Follow` makes one, which attaches itself to the optimizer, the loader and ``backward()``, and calls `HostRun`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.integrations.backward_losses import BackwardLosses
from hookline.integrations.host_run import HostRun
from hookline.integrations.loader_passes import LoaderPass, LoaderPasses
from hookline.phases import ENTERED
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["FollowedLoop"]

_NOTHING: Final = nullcontext()


class FollowedLoop:
    """Turn what a loop does into the events of a `HostRun`, which has begun."""

    def __init__(self, host: HostRun, model: nn.Module, optimizers: list[Any], scaler: Any) -> None:
        self._host = host
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._process = os.getpid()  # a child that is forked later has this too, and is not followed
        self.epoch = 0
        """The epoch, counted from 0."""
        self.steps_in_pass = 0
        """How many steps of it were made."""
        self.has_begun_epoch = False
        """Whether hooks know of it."""
        self.told_loss: Any = None
        """What the user says that the loss of the step is."""
        self._pass: LoaderPass | None = None
        self._latest_pass: LoaderPass | None = None
        """The one that gave a batch last, perhaps in evaluation mode."""
        self._has_begun_step = self._ends_with_step = self._has_closure = False
        self._may_nest = any(map(_has_several_steps, optimizers))
        self._holds = host.manager.needs_prev_step_grads()
        self._count_at_backward = 0
        """How many batches of the pass were given when ``backward()`` was called last."""
        self._is_left = False
        """Whether the loop has cleared the gradients of the batches that the step has so far."""
        self._handles: list[RemovableHandle] = []
        self._passes: list[LoaderPasses] = []
        if self._holds:
            host.held.copy(model, none=True)  # there is no step before the first
        self._losses = BackwardLosses(
            self._note_backward,
            parameters=[each for one in optimizers for group in one.param_groups for each in group["params"]],
            on_forget=self._forget_batches,
        )

    @property
    def epoch_of_step(self) -> int:
        """The epoch of the step that was made last."""
        return self.epoch if self.has_begun_epoch else max(self.epoch - 1, 0)

    def attach(self, loader: Any) -> None:
        """Attach this to the optimizers, and to the loader if there is one."""
        for each in self._optimizers:
            self._handles += [
                each.register_step_pre_hook(self._before_step),
                each.register_step_post_hook(self._after_step),
            ]
        if loader is not None:
            self.follow_loader(loader)

    def follow_loader(self, loader: Any) -> None:
        """Follow a loader of the training data."""
        self._passes.append(LoaderPasses(loader, self._take_batch, self._end_pass))

    def go_on(self, epoch: int, steps_in_pass: int) -> None:
        """Go on in the middle of a run."""
        self.epoch, self.steps_in_pass = epoch, steps_in_pass
        self.has_begun_epoch = self._has_begun_step = False

    def take_over(self, latest: LoaderPass | None, losses: BackwardLosses | None) -> None:
        """Take over what was noted before this was made: the pass under way over its loader, and the losses."""
        if losses is not None:
            losses.hand_to(self._losses)
        if latest is not None and self._passes:
            latest.hand_to(self._passes[0])
            self._pass = latest

    def take_off(self) -> None:
        """Take everything off the loop; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._losses.remove()
        for passes in self._passes:
            passes.remove()
        self._pass = self._latest_pass = None

    # -- what the loop does ------------------------------------------------------------------------------------

    @_torch.untraced_in_place  # also where a loop compiles the step of its optimizer
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if ENTERED.phase == "intervention" or (self._may_nest and _torch.is_inner_step(optimizer)):
            return
        # The optimizer itself is the first argument; the rest is asked only where there is one, which is rare.
        self._has_closure = self._losses.keeps_all = (len(args) > 1 or bool(kwargs)) and any(
            map(callable, (*args, *kwargs.values()))
        )
        if not self._has_begun_step:  # the batch was taken in evaluation mode, or there is no loader
            latest = self._latest_pass
            with self._between_steps():
                self._begin_step(self._pass if latest is None or latest.is_over else latest)

    @_torch.untraced_in_place
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not self._optimizers[-1] or not self._has_begun_step or ENTERED.phase == "intervention":
            return
        if self._may_nest and _torch.is_inner_step(optimizer):
            return
        loss = self._losses.take(first=self._has_closure)  # closures may be called many times
        found_inf = optimizer.__dict__.get("found_inf")  # a scaler lets fused optimizers decide by themselves
        if found_inf is not None and bool(found_inf):  # and this one has left the parameters alone
            return
        told, self.told_loss = self.told_loss, None
        self._has_begun_step = False
        self.steps_in_pass += 1
        if self._process == os.getpid():
            self._end_step(loss if told is None else told)
        if self._ends_with_step:
            with self._between_steps():
                self._end_epoch()

    def _end_step(self, loss: Any) -> None:
        if self._holds and self._host.manager.plan.needs(
            "needs_prev_step_grads", step=self._host.manager.global_step + 1
        ):
            self._host.held.copy(self._model)  # the loop may clear them in place, before the next step begins
        with self._between_steps():
            self._host.end_step(loss=loss)

    def _note_backward(self) -> Tensor | None:
        """Remember which batch a backward is of; return the scale of its loss."""
        if self._pass is not None:
            self._count_at_backward = self._pass.count
        return _scale_of(self._scaler)

    def _forget_batches(self) -> None:
        """Leave out the batches whose gradients the loop has cleared without a step: they are no part of one."""
        latest = self._pass
        if latest is None or not self._has_begun_step:
            return
        if latest.count > self._count_at_backward:
            self._host.replace_batch(latest.batch, latest.count - 1)
        else:
            self._is_left = True

    def _between_steps(self) -> AbstractContextManager[None]:
        """Return a context in which an intervention may train, with the scaler that is making a step."""
        return _NOTHING if self._scaler is None else _torch.between_scaler_steps(self._scaler)

    def _take_batch(self, each: LoaderPass) -> None:
        if ENTERED.phase == "intervention":
            return
        self._latest_pass = each
        if self._model.training and torch.is_grad_enabled():
            if self._has_begun_step and each is self._pass:
                self._add_batch(each)
            elif not self._has_begun_step:
                self._begin_step(each)
            else:  # the loop had looked at a batch, and begins its pass now
                self._begin_pass(each)
                self._host.replace_batch(each.batch, each.count - 1)

    def _add_batch(self, each: LoaderPass) -> None:
        if self._is_left:
            self._is_left = False
            self._host.replace_batch(each.batch, each.count - 1)
        else:
            self._host.add_batch(each.batch)

    def _end_pass(self, each: LoaderPass) -> None:
        if each is not self._pass or ENTERED.phase == "intervention":
            return
        if self._has_begun_step:  # a loader that fetches ahead, and the step of the last batch is still to come
            self._ends_with_step = True
        elif self.steps_in_pass:
            self._end_epoch()

    def _begin_step(self, each: LoaderPass | None) -> None:
        if self._process != os.getpid():
            return
        self._begin_pass(each)
        if not self.has_begun_epoch:
            self.has_begun_epoch = True
            self._host.begin_epoch(self.epoch)
        self._has_begun_step, self._is_left = True, False
        if each is None:
            self._host.begin_step()
        else:
            self._host.begin_step(batch=each.batch, batch_idx=each.count - 1)

    def _begin_pass(self, each: LoaderPass | None) -> None:
        if each is self._pass:
            return
        if self._pass is not None and self.steps_in_pass and self.has_begun_epoch:
            self._end_epoch()  # a pass that the loop has left before its end
        self._pass = each

    def _end_epoch(self) -> None:
        self._host.end_epoch()
        self.has_begun_epoch = self._ends_with_step = False
        self.epoch += 1
        self.steps_in_pass = 0


def _has_several_steps(optimizer: Any) -> bool:
    """Return whether its ``step`` may call that of a base class, which torch calls hooks around too."""
    return sum("step" in vars(cls) for cls in type(optimizer).__mro__) > 2  # its own, and the one of Optimizer


def _scale_of(scaler: Any) -> Tensor | None:
    if scaler is None or not scaler.is_enabled():
        return None
    scale = _torch.scale_of(scaler)
    return None if scale is None else scale.clone()  # it is changed in place
