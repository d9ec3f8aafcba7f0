"""Keep what a hook that will be due needs: mean gradients, those of the step before, the state before the epoch.

`Run` calls it at each step and reads it; it asks the `HookManager` what is needed, and copies ``.grad``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.error_policy import warn_user
from hookline.guard.snapshot import PreEpochState
from hookline.sites.wrappers import clean_modules
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager
    from hookline.training.experiment import Experiment
    from hookline.training.state import GuardedState

__all__ = ["GradientRetention", "Gradients"]


class GradientRetention:
    """Keep gradients and earlier state for hooks, from one point to the next, only if one is going to need them."""

    def __init__(self, experiment: Experiment, manager: HookManager, guarded: GuardedState) -> None:
        self._experiment = experiment
        self._manager = manager
        self._guarded = guarded
        self._gradients = Gradients(experiment.model)
        self._averages = False
        self._may_need_previous = manager.needs_prev_step_grads()  # asked once, as asking takes 3 µs a step
        self._has_trained = self._warned = False
        self.mean: dict[str, Tensor] | None = None
        """Mean gradients since `begin`, from `end` on."""
        self.previous: dict[str, Tensor] | None = None
        """Gradients of the step before the one that is being made."""
        self.pre_epoch: PreEpochState | None = None
        """Everything as it was when the epoch began."""
        self._memory: PreEpochState | None = None
        """Of an earlier epoch: the memory is used again, also if epochs in between did without."""

    def begin(self, points: tuple[HookPoint, ...], position: int) -> None:
        """Begin steps after which those points come, in that epoch (in the step loop: at that step)."""
        self.mean = None
        self._gradients = Gradients(self._experiment.model)  # parameters may have been replaced since
        self._averages = bool(points) and self._manager.needs_grad_accumulation_at(*points, epoch=position)

    def begin_epoch(self, points: tuple[HookPoint, ...], epoch: int) -> None:
        """Begin the steps of an epoch; keep the state before it if a hook may go back there."""
        self.begin(points, epoch)
        self.pre_epoch = None
        within = (HookPoint.PRE_EPOCH, HookPoint.PRE_STEP, HookPoint.POST_STEP, *points)
        if self._manager.needs_pre_epoch_state_at(*within, epoch=epoch):
            self.take_pre_epoch()

    def take_pre_epoch(self) -> None:
        """Keep everything as it is now, to go back to."""
        experiment, others = self._experiment, self._guarded.all_but_optimizer
        self.pre_epoch = self._memory = PreEpochState.take(
            experiment.model, experiment.optimizer, others, experiment.scaler, into=self._memory
        )

    def begin_step(self, position: int) -> None:
        """Keep the gradients of the step before, which are still in ``.grad``, if a hook needs them."""
        self.previous = None
        if self._may_need_previous and self._manager.needs_prev_step_grads_this_step(position):
            self.previous = self._gradients.copy()
            if not self.previous and self._has_trained:
                self._warn_of_none("those of the step before")

    def end_step(self, *, trained: bool) -> None:
        """Add the gradients of a step to their mean, if a hook needs it."""
        if not trained:
            return
        self._has_trained = True
        if self._averages and not self._gradients.add():
            self._warn_of_none("their mean")

    def end(self) -> None:
        """Finish the mean of the steps since `begin`."""
        self.previous = None
        if self._averages:  # of no step that trained, none at all; but not None, as a hook has asked for them
            self.mean = self._gradients.take_mean()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, between two steps, without copying."""
        return {"averages": self._averages, "sums": dict(self._gradients.sums), "steps": self._gradients.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._averages = state["averages"]
        self._gradients = Gradients(self._experiment.model, state["sums"], state["steps"])

    def release(self) -> None:
        """Drop everything: the run is over."""
        self.mean = self.previous = self.pre_epoch = self._memory = None
        self._gradients = Gradients(self._experiment.model)

    def _warn_of_none(self, which: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn_user(
            f"Hooks need gradients ({which}), and after train_step() no parameter has any: zero them before the "
            "backward, not after the step."
        )


class Gradients:
    """Copy and add up the gradients of a model's parameters, by names without wrappers; of tied ones once.

    One for each epoch: parameters are looked up once. It may go on from ``sums`` of so many steps.
    """

    def __init__(self, model: nn.Module, sums: Mapping[str, Tensor] | None = None, num_steps: int = 0) -> None:
        self._model = model
        known = self._parameters if sums else {}
        self.sums = {name: total.to(known[name].device) for name, total in (sums or {}).items() if name in known}
        self.num_steps = num_steps
        """How many steps were added."""

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        named, seen = {}, set()
        for prefix, module in clean_modules(self._model):
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"{prefix}.{key}" if prefix else key] = parameter
        return named

    def copy(self) -> dict[str, Tensor]:
        """Return copies of the gradients that there are now."""
        return {name: p.grad.detach().clone() for name, p in self._parameters.items() if p.grad is not None}

    def add(self) -> bool:
        """Add the gradients of the last step to a sum; one that is missing counts as zero. Return whether any is there.

        In float32 where they are narrower: 512 bfloat16 gradients of 1 would add up to 256.
        """
        self.num_steps += 1
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        with torch.no_grad():
            for name, gradient in found.items():
                if name in self.sums:
                    self.sums[name].add_(gradient)
                else:
                    self.sums[name] = _copy_to_add_to(gradient)
        return bool(found)

    def take_mean(self) -> dict[str, Tensor]:
        """Return the mean of what was added since the last time."""
        sums, num_steps = self.sums, self.num_steps
        self.sums, self.num_steps = {}, 0
        for total in sums.values():
            total.div_(num_steps)
        return sums


def _copy_to_add_to(grad: Tensor) -> Tensor:
    dense = grad.detach().to_dense() if grad.layout != torch.strided else grad.detach()
    wide = torch.float32 if dense.dtype in (torch.bfloat16, torch.float16) else dense.dtype
    return dense.to(wide, copy=True)
