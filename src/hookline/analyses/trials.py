"""``loss_landscape`` and ``paired_step``: measure the loss at other weights, and after another step.

For another change of the step than that of the learning rate, derive from `PairedStepHook` and define ``change``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.analyses._base import Intervention, loss_on_batch, same_random_numbers
from hookline.analyses._values import parameters_of
from hookline.analyses._vectors import cosine, flat_vector, flat_vector_or_none, norm, ratio
from hookline.errors import OptionError
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext


class LossLandscapeHook(Intervention):
    """Measure the loss on the batch of the step, at weights along a line through those after it.

    Recipe: ``hookline.HookManager(["loss_landscape"], hook_config={"loss_landscape": {"radius": 0.05}}, sinks=[...])``.

    The line goes ``radius`` times the length of all trained parameters to either side. Dropout is the same at each
    point. A firing costs ``points`` forwards, and a backward for the gradient.

    Args:
        every_n_steps: How many steps from one look to the next; the first is at that step.
        points: How many points on the line, an odd number, so that one is where the weights are.
        radius: How far it goes, as a share of the length of the parameters.
        direction: ``"gradient"``, of which the positive side is downhill; or ``"random"``, of as many parts as there
            are parameters, each as long as its parameter.
    """

    name = "loss_landscape"
    description = "the loss along a line through the weights"
    requires = frozenset({"loss_fn"})
    # With a from −radius to radius, and ‖θ‖·d the direction.
    metrics = (
        ("losses", "along the line, from one end to the other", "L(θ + a·‖θ‖·d)"),
        ("loss", "in the middle, where the weights are", "L(θ)"),
        ("lowest", "the smallest on the line", "min L"),
        ("lowest_at", "where that is", "a of min L", "0: here; radius: still falling at the end"),
        ("curvature", "how the line bends at the weights", "(L(h) − 2·L(0) + L(−h))/h²", ">0: a valley"),
    )

    def __init__(
        self, every_n_steps: int = 500, points: int = 11, radius: float = 0.1, direction: str = "gradient"
    ) -> None:
        self.set_schedule(every_n_steps)
        self.points = self.whole_number("points", points, 3)
        if points % 2 == 0:
            raise OptionError(f"points= of hook 'loss_landscape' is an odd number, got {points}; take {points + 1}.")
        self.radius = self.number("radius", radius)
        self.direction = self.one_of("direction", direction, ("gradient", "random"))

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Mapping[str, Any] | None:
        """Measure the loss at each point of the line."""
        step = self.step_of(run_ctx)
        trained = {name: p for name, p in parameters_of(model_ctx.model).items() if p.requires_grad}
        line = self._line(step, model_ctx, trained)
        if line is None:
            return None
        here = {name: p.detach().clone() for name, p in trained.items()}
        places = np.linspace(-self.radius, self.radius, self.points)
        found = []
        for place in places:
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(here[name] + float(place) * line[name])
            found.append(loss_on_batch(model_ctx, step))
        losses, middle = torch.stack(found).tolist(), self.points // 2
        width = self.radius / middle
        lowest = int(np.nanargmin(losses)) if not np.isnan(losses).all() else middle
        return {
            "losses": losses,
            "loss": losses[middle],
            "lowest": losses[lowest],
            "lowest_at": float(places[lowest]) if lowest != middle else 0.0,
            "curvature": (losses[middle + 1] - 2 * losses[middle] + losses[middle - 1]) / width**2,
        }

    def _line(self, step: int, model_ctx: ModelDataContext, trained: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the direction by parameter, as long as all of them together; None if there is none."""
        length = flat_vector_or_none(trained.values())
        if length is None:
            return None
        if self.direction == "random":
            draw = torch.Generator().manual_seed(step)
            drawn = {n: torch.randn(p.shape, generator=draw).to(p.device, p.dtype) for n, p in trained.items()}
            return {name: each * _fit(trained[name], each) for name, each in drawn.items()}
        gradients = model_ctx.gradients
        whole = flat_vector_or_none(gradients[name] for name in trained if name in gradients)
        if whole is None or float(norm(whole)) == 0.0:
            return None
        scale = norm(length) / norm(whole)
        return {
            name: -gradients[name] * scale.to(p.device, p.dtype) if name in gradients else torch.zeros_like(p)
            for name, p in trained.items()
        }


def _fit(parameter: Tensor, direction: Tensor) -> Tensor:
    """Return the factor that makes a direction as long as its parameter."""
    return ratio(norm(parameter.detach().flatten()), norm(direction.flatten()))


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
        self.lr_factor = self.number("lr_factor", lr_factor, allow_zero=True)

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
