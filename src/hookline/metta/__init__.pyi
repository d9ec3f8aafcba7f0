"""The public names of ``hookline.metta``, each with the module it lives in."""

from hookline.metta.builders import BackwardHookBuilder as BackwardHookBuilder
from hookline.metta.builders import ComponentBackwardHookSpec as ComponentBackwardHookSpec
from hookline.metta.builders import ComponentContext as ComponentContext
from hookline.metta.builders import ComponentHookSpec as ComponentHookSpec
from hookline.metta.builders import HookBuilder as HookBuilder
from hookline.metta.builders import PolicyAutoBuilder as PolicyAutoBuilder
from hookline.metta.builders import attach_fisher_information_hooks as attach_fisher_information_hooks
from hookline.metta.builders import attach_gradient_flow_hooks as attach_gradient_flow_hooks
from hookline.metta.builders import attach_relu_activation_hooks as attach_relu_activation_hooks
from hookline.metta.builders import attach_relu_gradient_flow_hooks as attach_relu_gradient_flow_hooks
from hookline.metta.builders import attach_saturated_activation_hooks as attach_saturated_activation_hooks
from hookline.metta.builders import build_extractor as build_extractor
from hookline.metta.trackers import FisherInformationState as FisherInformationState
from hookline.metta.trackers import GradientFlowState as GradientFlowState
from hookline.metta.trackers import ReLUActivationState as ReLUActivationState
from hookline.metta.trackers import ReLUGradientFlowState as ReLUGradientFlowState
from hookline.metta.trackers import SaturatedActivationState as SaturatedActivationState
from hookline.metta.trackers import Tracker as Tracker
from hookline.metta.train_tool import StatsReporter as StatsReporter
from hookline.metta.train_tool import Trainer as Trainer
from hookline.metta.train_tool import TrainTool as TrainTool
from hookline.metta.train_tool import compute_dead_neuron_stats as compute_dead_neuron_stats
from hookline.metta.train_tool import compute_saturated_activation_stats as compute_saturated_activation_stats

__all__: list[str]
