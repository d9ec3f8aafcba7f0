"""``loss_landscape``: measure the loss along a straight line through the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.analyses._analysis import Intervention, loss_on_batch
from hookline.analyses._firing_values import parameters_of
from hookline.analyses._vectors import flat_vector_or_none, norm, ratio
from hookline.errors import OptionError
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext

_DIRECTIONS: Final = ("gradient", "random")


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
        if not radius > 0:
            raise OptionError(f"radius= of hook 'loss_landscape' is over 0, got {radius!r}.")
        if direction not in _DIRECTIONS:
            raise OptionError(f"direction= of hook 'loss_landscape' is 'gradient' or 'random', got {direction!r}.")
        self.radius, self.direction = float(radius), direction

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
