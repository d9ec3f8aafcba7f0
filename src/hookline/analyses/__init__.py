"""The built-in hooks over time, families in one file: what researchers look at while a model trains.

`hookline.lifecycle.registry` reads ``BUILT_IN``, the table of names and paths. Classes are imported when they are first
used, so that listing the hooks does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

BUILT_IN: Final = {
    "training_metrics": "hookline.analyses.training_metrics:TrainingMetricsHook",
    "norms": "hookline.analyses.gradients:NormsHook",
    "consecutive": "hookline.analyses.gradients:ConsecutiveHook",
    "variance": "hookline.analyses.gradients:VarianceHook",
    "batch_dynamics": "hookline.analyses.gradients:BatchDynamicsHook",
    "weight_tracking": "hookline.analyses.weights:WeightTrackingHook",
    "parameter_delta": "hookline.analyses.weights:ParameterDeltaHook",
    "path_length": "hookline.analyses.weights:PathLengthHook",
    "training_diagnostics": "hookline.analyses.training_metrics:TrainingDiagnosticsHook",
    "gradient_projection": "hookline.analyses.gradients:GradientProjectionHook",
    "subspace_gradient_info": "hookline.analyses.gradients:SubspaceGradientInfoHook",
    "attention": "hookline.analyses.weights:AttentionHook",
    "fourier": "hookline.analyses.weights:FourierHook",
    "token_gradient": "hookline.analyses.weights:TokenGradientHook",
    "phases": "hookline.analyses.weights:PhasesHook",
    "stats": "hookline.analyses.layers:StatsHook",
    "hessian": "hookline.analyses.interventions:HessianHook",
    "adam_dynamics": "hookline.analyses.interventions:AdamDynamicsHook",
    "counterfactual": "hookline.analyses.interventions:CounterfactualHook",
    "counterfactual_validator": "hookline.analyses.interventions:CounterfactualValidatorHook",
}
"""Every built-in hook by its name, and where its class is."""

_CLASSES: Final = {path.partition(":")[2]: path.partition(":")[0] for path in BUILT_IN.values()}

__all__ = ["BUILT_IN", *_CLASSES]  # noqa: PLE0604  (names of classes, worked out above)


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_CLASSES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
