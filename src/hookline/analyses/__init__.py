"""The built-in hooks over time, families in one file: what researchers look at while a model trains.

`hookline.lifecycle.registry` reads ``BUILT_IN``, the table of names and paths. Classes are imported when they are first
used, so that listing the hooks does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

BUILT_IN: Final = {
    "training_metrics": "hookline.analyses.training_metrics:TrainingMetricsHook",
    "norms": "hookline.analyses.norms:NormsHook",
    "consecutive": "hookline.analyses.consecutive:ConsecutiveHook",
    "variance": "hookline.analyses.consecutive:VarianceHook",
    "batch_dynamics": "hookline.analyses.batch_dynamics:BatchDynamicsHook",
    "weight_tracking": "hookline.analyses.movement:WeightTrackingHook",
    "parameter_delta": "hookline.analyses.movement:ParameterDeltaHook",
    "path_length": "hookline.analyses.movement:PathLengthHook",
    "training_diagnostics": "hookline.analyses.training_metrics:TrainingDiagnosticsHook",
    "gradient_projection": "hookline.analyses.gradient_projection:GradientProjectionHook",
    "subspace_gradient_info": "hookline.analyses.gradient_projection:SubspaceGradientInfoHook",
    "attention": "hookline.analyses.attention:AttentionHook",
    "fourier": "hookline.analyses.embedding:FourierHook",
    "token_gradient": "hookline.analyses.embedding:TokenGradientHook",
    "phases": "hookline.analyses.embedding:PhasesHook",
    "stats": "hookline.analyses.stats:StatsHook",
    "relu_activations": "hookline.analyses.tracked:ReLUActivationsHook",
    "saturated_activations": "hookline.analyses.tracked:SaturatedActivationsHook",
    "fisher_information": "hookline.analyses.tracked:FisherInformationHook",
    "gradient_flow": "hookline.analyses.tracked:GradientFlowHook",
    "relu_gradient_flow": "hookline.analyses.tracked:ReLUGradientFlowHook",
    "moe_routing": "hookline.analyses.moe_routing:MoeRoutingHook",
    "gradient_noise_scale": "hookline.analyses.gradient_noise_scale:GradientNoiseScaleHook",
    "hessian": "hookline.analyses.hessian:HessianHook",
    "hessian_spectrum": "hookline.analyses.hessian:HessianSpectrumHook",
    "loss_landscape": "hookline.analyses.trials:LossLandscapeHook",
    "paired_step": "hookline.analyses.trials:PairedStepHook",
    "adam_dynamics": "hookline.analyses.adam_dynamics:AdamDynamicsHook",
    "counterfactual": "hookline.analyses.counterfactual:CounterfactualHook",
    "counterfactual_validator": "hookline.analyses.counterfactual:CounterfactualValidatorHook",
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
