"""``parameter_delta``: how far the parameters have moved since the last report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._shared import work_of
from hookline.hooks.metric_info import MetricInfo
from hookline.lifecycle.point import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["ParameterDeltaHook"]


class ParameterDeltaHook(Analysis):
    """The length of the change of all parameters, biases included; nothing the first time.

    Recipe: ``hookline.HookManager(["parameter_delta"], sinks=[...])``. Keeps one copy of the parameters.
    """

    name = "parameter_delta"
    description = "how far the parameters have moved since the last epoch"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    kept = ("previous",)
    previous: Tensor | None

    def __init__(self) -> None:
        self.reset()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean."""
        return [
            MetricInfo(
                "relative_delta",
                "the move as a share of where they were",
                "‖θ − θ_prev‖ / ‖θ_prev‖; 0 if θ_prev is 0",
                "falls as training settles",
                "relative move",
            ),
            MetricInfo("absolute_delta", "length of the move", "‖θ − θ_prev‖", "", "move"),
            MetricInfo("param_norm", "length of the parameters", "‖θ‖", "grows without weight decay", "‖θ‖"),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """The move since the last time."""
        flat = work_of(ctx).flat_parameters
        previous, self.previous = self.previous, flat
        if flat is None or previous is None or previous.shape != flat.shape:
            return None
        previous = previous.to(flat.device)
        move, length = torch.linalg.vector_norm(flat - previous), torch.linalg.vector_norm(previous)
        return {
            "relative_delta": torch.where(length > 0, move / length, 0.0),
            "absolute_delta": move,
            "param_norm": torch.linalg.vector_norm(flat),
        }

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.previous = None
