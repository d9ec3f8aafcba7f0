"""``path_length``: how long the way of the parameters is, and how far it has led."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.analyses._analysis import EACH_STEP, Analysis
from hookline.analyses._shared import Work, work_of
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["PathLengthHook"]


class PathLengthHook(Analysis):
    """Adds up the steps of the parameters, biases included, and compares the sum with the distance covered.

    Recipe: ``hookline.HookManager(["path_length"], sinks=[...])``.

    The way begins where the loop starts the hook; in a loop of your own that does not, at the first step it sees.
    Keeps two copies of the parameters; nothing waits for the device at a step.
    """

    name = "path_length"
    description = "length of the way of the parameters, and how straight it is"
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    loop_points = EACH_STEP
    kept = ("beginning", "previous", "length")
    beginning: Tensor | None
    previous: Tensor | None
    length: Tensor | None

    def __init__(self) -> None:
        self.reset()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo("path_length", "sum of all steps so far", "Σ ‖θₜ₊₁ − θₜ‖", "never falls", "way"),
            MetricInfo("net_displacement", "distance from the beginning", "‖θₜ − θ₀‖", "", "distance"),
            MetricInfo(
                "path_efficiency",
                "distance over way",
                "‖θₜ − θ₀‖ / Σ ‖θₜ₊₁ − θₜ‖; 1 before the first move",
                "1: straight; near 0: going round in circles",
                "straightness",
            ),
        ]

    def start(self, model: nn.Module) -> None:
        """The way begins here, unless it goes on from a checkpoint."""
        if self.beginning is None:
            self._begin(Work(model, None).flat_parameters)

    def _begin(self, flat: Tensor | None) -> None:
        if flat is not None:
            self.beginning = self.previous = flat
            self.length = flat.new_zeros((), dtype=torch.float32 if flat.device.type == "mps" else torch.float64)

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Add a step, and report when it is time."""
        flat = work_of(ctx).flat_parameters
        if flat is None:
            return None
        if self.previous is None or self.length is None or self.previous.shape != flat.shape:
            self._begin(flat)
        else:
            self.length = self.length + torch.linalg.vector_norm(flat - self.previous)
            self.previous = flat
        if ctx.hook_point is HookPoint.POST_STEP or self.beginning is None or self.length is None:
            return None
        distance = torch.linalg.vector_norm(flat - self.beginning)
        # A straight way may come out longer than it is by rounding.
        efficiency = torch.where(self.length > 0, (distance / self.length).clamp(max=1.0), 1.0)
        return {"path_length": self.length, "net_displacement": distance, "path_efficiency": efficiency}

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.beginning = None
        self.previous = None
        self.length = None
