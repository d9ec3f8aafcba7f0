"""``parameter_delta``: measure how far the parameters have moved since the last report."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.analyses._analysis import ChangeAnalysis
from hookline.analyses._firing_values import FiringValues
from hookline.analyses._vectors import norm, ratio


class ParameterDeltaHook(ChangeAnalysis):
    """Measure the length of the change of all parameters, biases included; nothing the first time.

    Recipe: ``hookline.HookManager(["parameter_delta"], sinks=[...])``. Keeps one copy of the parameters.
    """

    name = "parameter_delta"
    description = "how far the parameters have moved since the last epoch"
    metrics = (
        (
            "relative_delta",
            "the move as a share of where they were",
            "‖θ − θ_prev‖ / ‖θ_prev‖; 0 if θ_prev is 0",
            "falls as training settles",
            "relative move",
        ),
        ("absolute_delta", "length of the move", "‖θ − θ_prev‖", "", "move"),
        ("param_norm", "length of the parameters", "‖θ‖", "grows without weight decay", "‖θ‖"),
    )

    def vector(self, values: FiringValues) -> Tensor | None:
        """Return the parameters."""
        return values.flat_parameters

    def compare(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """Return the move from one to the other."""
        move = norm(now - before)
        return {"relative_delta": ratio(move, norm(before)), "absolute_delta": move, "param_norm": norm(now)}
