"""``paired_step``: measure what a change does to one step, made with and without it from the same state.

The change is another learning rate; for any other, derive from the hook and define ``change``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.analyses._analysis import Intervention, loss_on_batch, same_random_numbers
from hookline.analyses._firing_values import parameters_of
from hookline.analyses._vectors import cosine, flat_vector, flat_vector_or_none, norm, ratio
from hookline.errors import OptionError
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext


class PairedStepHook(Intervention):
    """Make the next step on the batch of this one twice, with the same random numbers, and compare.

    Recipe: ``hookline.HookManager(["paired_step"], hook_config={"paired_step": {"lr_factor": 0.5}}, sinks=[...])``.

    Both begin at the weights after the step and the state of the optimizer then; everything is put back. A firing
    costs two steps, three forwards and a snapshot.

    Args:
        every_n_steps: How many steps from one look to the next; the first is at that step.
        lr_factor: What the learning rates are multiplied by in the changed step.
    """

    name = "paired_step"
    description = "one step with and without a change, from the same state"
    requires = frozenset({"loss_fn"})
    # With p the plain step, c the changed one; losses are of the same batch.
    metrics = (
        ("loss_before", "before either", "L(θ)"),
        ("loss_plain", "after the step as it would be", "L(θ + p)"),
        ("loss_changed", "after the changed one", "L(θ + c)"),
        ("loss_difference", "what the change does", "L(θ + c) − L(θ + p)", "below 0: it helps"),
        ("step_length_ratio", "the changed step over the plain one", "‖c‖/‖p‖"),
        ("step_cosine", "whether they go the same way", "cos(c, p)", "1: the same way"),
    )

    def __init__(self, every_n_steps: int = 500, lr_factor: float = 2.0) -> None:
        self.set_schedule(every_n_steps)
        if not lr_factor >= 0:
            raise OptionError(f"lr_factor= of hook 'paired_step' is 0 or more, got {lr_factor!r}.")
        self.lr_factor = lr_factor

    def change(self, model_ctx: ModelDataContext) -> None:
        """Change the second step: scale the learning rates, unless defined otherwise. It is undone."""
        model_ctx.scale_learning_rates(self.lr_factor)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Make the plain step, go back, make the changed step, and compare."""
        step = self.step_of(run_ctx)
        start = flat_vector_or_none(parameters_of(model_ctx.model).values())
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
        """Make one step; return the move of the weights, and the loss after it."""
        with same_random_numbers(step):
            model_ctx.run_training_epoch([model_ctx.current_batch()], step=True)
        return flat_vector(parameters_of(model_ctx.model).values()) - start, loss_on_batch(model_ctx, step)
