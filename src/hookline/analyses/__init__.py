"""The built-in hooks over time, one to a file: what researchers look at while a model trains.

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
    "variance": "hookline.analyses.variance:VarianceHook",
    "batch_dynamics": "hookline.analyses.batch_dynamics:BatchDynamicsHook",
    "weight_tracking": "hookline.analyses.weight_tracking:WeightTrackingHook",
    "parameter_delta": "hookline.analyses.parameter_delta:ParameterDeltaHook",
    "path_length": "hookline.analyses.path_length:PathLengthHook",
    "training_diagnostics": "hookline.analyses.training_diagnostics:TrainingDiagnosticsHook",
    "gradient_projection": "hookline.analyses.gradient_projection:GradientProjectionHook",
    "subspace_gradient_info": "hookline.analyses.subspace_gradient_info:SubspaceGradientInfoHook",
    "attention": "hookline.analyses.attention:AttentionHook",
    "fourier": "hookline.analyses.fourier:FourierHook",
    "token_gradient": "hookline.analyses.token_gradient:TokenGradientHook",
    "phases": "hookline.analyses.phases:PhasesHook",
    "stats": "hookline.analyses.stats:StatsHook",
    "relu_activations": "hookline.analyses.relu_activations:ReLUActivationsHook",
    "saturated_activations": "hookline.analyses.saturated_activations:SaturatedActivationsHook",
    "fisher_information": "hookline.analyses.fisher_information:FisherInformationHook",
    "gradient_flow": "hookline.analyses.gradient_flow:GradientFlowHook",
    "relu_gradient_flow": "hookline.analyses.relu_gradient_flow:ReLUGradientFlowHook",
    "moe_routing": "hookline.analyses.moe_routing:MoeRoutingHook",
    "gradient_noise_scale": "hookline.analyses.gradient_noise_scale:GradientNoiseScaleHook",
    "hessian": "hookline.analyses.hessian:HessianHook",
    "hessian_spectrum": "hookline.analyses.hessian_spectrum:HessianSpectrumHook",
    "loss_landscape": "hookline.analyses.loss_landscape:LossLandscapeHook",
    "paired_step": "hookline.analyses.paired_step:PairedStepHook",
    "adam_dynamics": "hookline.analyses.adam_dynamics:AdamDynamicsHook",
    "counterfactual": "hookline.analyses.counterfactual:CounterfactualHook",
    "counterfactual_validator": "hookline.analyses.counterfactual_validator:CounterfactualValidatorHook",
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
