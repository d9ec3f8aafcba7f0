"""The public names of ``hookline.training``, each with the module it lives in."""

from hookline.lifecycle.overhead_budget import Budget as Budget
from hookline.training.checkpoint_profiler import CheckpointProfiler as CheckpointProfiler
from hookline.training.checkpoints.checkpoints import Checkpoints as Checkpoints
from hookline.training.choose_hooks import TrackerHook as TrackerHook
from hookline.training.firing import FiringReceipt as FiringReceipt
from hookline.training.loops.epoch_loop import epoch_loop as epoch_loop
from hookline.training.loops.experiment import Experiment as Experiment
from hookline.training.loops.loop_result import LoopResult as LoopResult
from hookline.training.loops.step_loop import step_loop as step_loop
from hookline.training.loops.training_step import StepResult as StepResult
from hookline.training.manager import HookManager as HookManager
from hookline.training.metric_output import record as record
from hookline.training.plan import Plan as Plan
from hookline.training.registry import HookRegistry as HookRegistry
from hookline.training.training_hook import DebugInterventionHook as DebugInterventionHook
from hookline.training.training_hook import InterventionHook as InterventionHook
from hookline.training.training_hook import MetricInfo as MetricInfo
from hookline.training.training_hook import TrainingHook as TrainingHook

__all__: list[str]
