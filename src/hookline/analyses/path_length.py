"""``path_length``: measure how long the way of the parameters is, and how far it has led."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.analyses._analysis import StepAnalysis
from hookline.analyses._firing_values import FiringValues, values_of
from hookline.analyses._vectors import norm, widest_float
from hookline.lifecycle.context import RunDataContext
from hookline.when import HookPoint


class PathLengthHook(StepAnalysis):
    """Add up the steps of the parameters, biases included, and compare the sum with the distance covered.

    Recipe: ``hookline.HookManager(["path_length"], sinks=[...])``.

    The way begins where the loop starts the hook; in a loop of your own that does not, at the first step it sees.
    Keeps two copies of the parameters.
    """

    name = "path_length"
    description = "length of the way of the parameters, and how straight it is"
    kept = ("beginning", "previous", "length")
    beginning: Tensor | None = None
    previous: Tensor | None = None
    length: Tensor | None = None
    metrics = (
        ("path_length", "sum of all steps so far", "Σ ‖θₜ₊₁ − θₜ‖", "never falls", "way"),
        ("net_displacement", "distance from the beginning", "‖θₜ − θ₀‖", "", "distance"),
        (
            "path_efficiency",
            "distance over way",
            "‖θₜ − θ₀‖ / Σ ‖θₜ₊₁ − θₜ‖; 1 before the first move",
            "1: straight; near 0: going round in circles",
            "straightness",
        ),
    )

    def start(self, model: nn.Module) -> None:
        """Begin the way here, unless it goes on from a checkpoint."""
        if self.beginning is None:
            self._begin(FiringValues(model).flat_parameters)

    def _begin(self, flat: Tensor | None) -> None:
        if flat is not None:
            self.beginning = self.previous = flat
            self.length = flat.new_zeros((), dtype=widest_float(flat.device))

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Add a step; report at the other points."""
        flat = values_of(ctx).flat_parameters
        if flat is None:
            return None
        if self.previous is None or self.length is None or self.previous.shape != flat.shape:
            self._begin(flat)
        else:
            self.length = self.length + norm(flat - self.previous)
            self.previous = flat
        if ctx.hook_point is HookPoint.POST_STEP or self.beginning is None or self.length is None:
            return None
        distance = norm(flat - self.beginning)
        # A straight way may come out longer than it is by rounding.
        efficiency = torch.where(self.length > 0, (distance / self.length).clamp(max=1.0), 1.0)
        return {"path_length": self.length, "net_displacement": distance, "path_efficiency": efficiency}
