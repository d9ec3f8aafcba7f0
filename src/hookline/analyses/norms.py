"""``norms``: measure the norm of the mean gradient, as a whole and by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hookline.analyses._analysis import Analysis
from hookline.analyses._firing_values import values_of
from hookline.analyses._vectors import norm
from hookline.lifecycle.run_context import RunDataContext


class NormsHook(Analysis):
    """Measure the norm of the mean gradient since the last report; biases are left out.

    Recipe: ``hookline.HookManager(["norms"], sinks=[...])``.
    """

    name = "norms"
    description = "norm of the mean gradient, as a whole and by parameter"
    reduce = MappingProxyType({"max_component": "max"})
    needs_grads = True
    metrics = (
        ("total_norm", "norm of the whole gradient", "‖g‖", "falls as training settles", "‖g‖"),
        ("max_component", "largest entry", "max |gᵢ|", "far above the mean: few weights learn", "max"),
        ("mean_component", "mean size of an entry", "mean |gᵢ|", "", "mean |g|"),
        ("norm_{param}", "norm of one parameter's gradient", "‖g_w‖", "0: that part does not learn"),
    )

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the norms, on the device."""
        values = values_of(ctx)
        flat = values.flat_mean_gradient
        if flat is None:
            return None
        sizes = flat.abs()
        return {
            "total_norm": norm(flat),
            "max_component": sizes.max(),
            "mean_component": sizes.mean(),
            **{f"norm_{name}": norm(grad) for name, grad in values.mean_gradients.items()},
        }
