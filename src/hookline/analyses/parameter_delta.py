"""``parameter_delta``: how far the parameters have moved since the last report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.analyses._shared import Work, ratio
from hookline.analyses._since_last import SinceLast
from hookline.training.training_hook import MetricInfo

__all__ = ["ParameterDeltaHook"]


class ParameterDeltaHook(SinceLast):
    """The length of the change of all parameters, biases included; nothing the first time.

    Recipe: ``hookline.HookManager(["parameter_delta"], sinks=[...])``. Keeps one copy of the parameters.
    """

    name = "parameter_delta"
    description = "how far the parameters have moved since the last epoch"

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

    def vector(self, work: Work) -> Tensor | None:
        """The parameters."""
        return work.flat_parameters

    def compared(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """The move from one to the other."""
        move, length = torch.linalg.vector_norm(now - before), torch.linalg.vector_norm(before)
        return {
            "relative_delta": ratio(move, length),
            "absolute_delta": move,
            "param_norm": torch.linalg.vector_norm(now),
        }
