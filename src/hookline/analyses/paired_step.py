"""``paired_step``: one step as it would be, one with something changed, from the same state; what the change does.

The change is another learning rate; for any other, derive from the hook and define ``change``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.analyses._analysis import whole_number
from hookline.analyses._interventions import (
    bursts,
    cosine,
    loss_on_batch,
    norm,
    numbers_of,
    parameters_of,
    ratio,
    step_of,
)
from hookline.analyses._shared import flatten
from hookline.errors import OptionError
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import InterventionHook, LoopPoints, MetricInfo

if TYPE_CHECKING:
    from hookline.guard.model_context import ModelDataContext
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["PairedStepHook"]


class PairedStepHook(InterventionHook):
    """Makes the next step on the batch of this one twice, with the same random numbers, and compares.

    Recipe: ``hookline.HookManager(["paired_step"], hook_config={"paired_step": {"lr_factor": 0.5}}, sinks=[...])``.

    Both begin at the weights after the step and the state of the optimizer then; everything is put back. A firing
    costs two steps, three forwards and a snapshot.

    Args:
        every_n_steps: How many steps from one look to the next; the first is at that step.
        lr_factor: What the learning rates are multiplied by in the changed step.
    """

    name = "paired_step"
    description = "one step with and without a change, from the same state"
    hook_points = frozenset({HookPoint.POST_STEP})
    loop_points: LoopPoints = MappingProxyType({"epoch": {HookPoint.POST_STEP}, "step": {HookPoint.POST_STEP}})
    scope = "trains"

    def __init__(self, every_n_steps: int = 500, lr_factor: float = 2.0) -> None:
        self.step_schedule = bursts(whole_number(self.name, "every_n_steps", every_n_steps, 1), 1)
        if not lr_factor >= 0:
            raise OptionError(f"lr_factor= of hook 'paired_step' is 0 or more, got {lr_factor!r}.")
        self.lr_factor = lr_factor

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; p is the plain step, c the changed one, losses are of the same batch."""
        return [
            MetricInfo("loss_before", "before either", "L(θ)"),
            MetricInfo("loss_plain", "after the step as it would be", "L(θ + p)"),
            MetricInfo("loss_changed", "after the changed one", "L(θ + c)"),
            MetricInfo("loss_difference", "what the change does", "L(θ + c) − L(θ + p)", "below 0: it helps"),
            MetricInfo("step_length_ratio", "the changed step over the plain one", "‖c‖/‖p‖"),
            MetricInfo("step_cosine", "whether they go the same way", "cos(c, p)", "1: the same way"),
        ]

    def change(self, model_ctx: ModelDataContext) -> None:
        """What is different in the second step: the learning rates, unless defined otherwise. It is undone."""
        model_ctx.scale_learning_rates(self.lr_factor)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Step, go back, change, step."""
        step = step_of(run_ctx, self)
        start = flatten(parameters_of(model_ctx.model).values())
        if start is None or not model_ctx.param_groups:
            return None
        before = loss_on_batch(model_ctx, step)
        token = model_ctx.save_checkpoint()
        plain, plain_loss = self._stepped(step, model_ctx, start)
        model_ctx.restore_checkpoint(token)
        model_ctx.discard_checkpoint(token)
        self.change(model_ctx)
        changed, changed_loss = self._stepped(step, model_ctx, start)
        return {
            "loss_before": before,
            "loss_plain": plain_loss,
            "loss_changed": changed_loss,
            "loss_difference": changed_loss - plain_loss,
            "step_length_ratio": ratio(norm(changed), norm(plain)),
            "step_cosine": cosine(changed, plain),
        }

    def _stepped(self, step: int, model_ctx: ModelDataContext, start: Tensor) -> tuple[Tensor, Tensor]:
        """The way of the weights in one step, and the loss there."""
        with numbers_of(step):
            model_ctx.run_training_epoch([model_ctx.current_batch()], step=True)
        end = flatten(parameters_of(model_ctx.model).values())
        assert end is not None
        return end - start, loss_on_batch(model_ctx, step)
