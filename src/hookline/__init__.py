"""hookline: one hook system for PyTorch.

Recipe::

    import hookline as hl

    with hl.attach(model, "layers.#", lambda module, args, output: print(output.shape)) as handle:
        model(x)
    print(handle.report())

Names are imported when first used, so ``import hookline`` costs next to nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.dispatch.choose import TrackerHook as TrackerHook
    from hookline.dispatch.firing import FiringReceipt as FiringReceipt
    from hookline.dispatch.manager import HookManager as HookManager
    from hookline.dispatch.plan import Plan as Plan
    from hookline.dispatch.profiler import CheckpointProfiler as CheckpointProfiler
    from hookline.dispatch.recording import record as record
    from hookline.dispatch.registry import HookRegistry as HookRegistry
    from hookline.errors import CaptureError as CaptureError
    from hookline.errors import CheckpointError as CheckpointError
    from hookline.errors import ConfigError as ConfigError
    from hookline.errors import EngineBusy as EngineBusy
    from hookline.errors import EngineClosed as EngineClosed
    from hookline.errors import GuardError as GuardError
    from hookline.errors import HookCheckError as HookCheckError
    from hookline.errors import HooklineError as HooklineError
    from hookline.errors import HooklineWarning as HooklineWarning
    from hookline.errors import HookNameError as HookNameError
    from hookline.errors import HookNeverFired as HookNeverFired
    from hookline.errors import HookOrderError as HookOrderError
    from hookline.errors import HookReturnError as HookReturnError
    from hookline.errors import HookSignatureError as HookSignatureError
    from hookline.errors import HooksLeftError as HooksLeftError
    from hookline.errors import KindError as KindError
    from hookline.errors import LifecycleError as LifecycleError
    from hookline.errors import MetricError as MetricError
    from hookline.errors import MissingPackageError as MissingPackageError
    from hookline.errors import NoMatchError as NoMatchError
    from hookline.errors import NonFiniteError as NonFiniteError
    from hookline.errors import NotAllowedError as NotAllowedError
    from hookline.errors import OptionError as OptionError
    from hookline.errors import ResumeError as ResumeError
    from hookline.errors import ScopeError as ScopeError
    from hookline.errors import TargetError as TargetError
    from hookline.errors import UnhookableError as UnhookableError
    from hookline.guard.guard import Guard as Guard
    from hookline.guard.model_context import ModelDataContext as ModelDataContext
    from hookline.guard.rollback import rollback as rollback
    from hookline.hooks.builders import BackwardHookBuilder as BackwardHookBuilder
    from hookline.hooks.builders import ComponentBackwardHookSpec as ComponentBackwardHookSpec
    from hookline.hooks.builders import ComponentHookSpec as ComponentHookSpec
    from hookline.hooks.builders import HookBuilder as HookBuilder
    from hookline.hooks.builders import attach_fisher_information_hooks as attach_fisher_information_hooks
    from hookline.hooks.builders import attach_gradient_flow_hooks as attach_gradient_flow_hooks
    from hookline.hooks.builders import attach_relu_activation_hooks as attach_relu_activation_hooks
    from hookline.hooks.builders import attach_relu_gradient_flow_hooks as attach_relu_gradient_flow_hooks
    from hookline.hooks.builders import attach_saturated_activation_hooks as attach_saturated_activation_hooks
    from hookline.hooks.builders import build_extractor as build_extractor
    from hookline.hooks.components import ComponentContext as ComponentContext
    from hookline.hooks.components import PolicyAutoBuilder as PolicyAutoBuilder
    from hookline.hooks.metric_info import MetricInfo as MetricInfo
    from hookline.hooks.resolve import resolve_callable as resolve_callable
    from hookline.hooks.specs import HookSpec as HookSpec
    from hookline.hooks.specs import register_hooks as register_hooks
    from hookline.hooks.training_hook import DebugInterventionHook as DebugInterventionHook
    from hookline.hooks.training_hook import InterventionHook as InterventionHook
    from hookline.hooks.training_hook import TrainingHook as TrainingHook
    from hookline.lifecycle.point import HookPoint as HookPoint
    from hookline.lifecycle.run_context import RunDataContext as RunDataContext
    from hookline.lifecycle.schedule import StepSchedule as StepSchedule
    from hookline.loops.checkpoints import Checkpoints as Checkpoints
    from hookline.loops.epoch_loop import epoch_loop as epoch_loop
    from hookline.loops.experiment import Experiment as Experiment
    from hookline.loops.run import LoopResult as LoopResult
    from hookline.loops.stats_reporter import StatsReporter as StatsReporter
    from hookline.loops.step_loop import step_loop as step_loop
    from hookline.loops.train_tool import TrainTool as TrainTool
    from hookline.loops.trainer import Trainer as Trainer
    from hookline.loops.training_step import StepResult as StepResult
    from hookline.observe.capture.cache import Cache as Cache
    from hookline.observe.capture.cache import Captured as Captured
    from hookline.observe.capture.capture import capture as capture
    from hookline.observe.patch.edits import Edit as Edit
    from hookline.observe.patch.edits import ablate as ablate
    from hookline.observe.patch.edits import mean_ablate as mean_ablate
    from hookline.observe.patch.edits import replace as replace
    from hookline.observe.patch.edits import scale as scale
    from hookline.observe.patch.edits import steer as steer
    from hookline.observe.patch.edits import swap as swap
    from hookline.observe.patch.patch import Patch as Patch
    from hookline.observe.patch.patch import patch as patch
    from hookline.observe.timing.profile import Profile as Profile
    from hookline.observe.timing.profile import ProfileRow as ProfileRow
    from hookline.observe.timing.profile import profile as profile
    from hookline.observe.trackers.fisher import FisherInformationState as FisherInformationState
    from hookline.observe.trackers.gradient_flow import GradientFlowState as GradientFlowState
    from hookline.observe.trackers.gradient_flow import ReLUGradientFlowState as ReLUGradientFlowState
    from hookline.observe.trackers.relu import ReLUActivationState as ReLUActivationState
    from hookline.observe.trackers.saturated import SaturatedActivationState as SaturatedActivationState
    from hookline.observe.trackers.tracker import Tracker as Tracker
    from hookline.observe.trackers.weights import compute_dead_neuron_stats as compute_dead_neuron_stats
    from hookline.observe.trackers.weights import (
        compute_saturated_activation_stats as compute_saturated_activation_stats,
    )
    from hookline.observe.watch import Watch as Watch
    from hookline.observe.watch import watch as watch
    from hookline.report.load import LoadedRun as LoadedRun
    from hookline.report.load import load_run as load_run
    from hookline.report.load import load_runs as load_runs
    from hookline.report.page import write_report as write_report
    from hookline.serve.model_runner import ModelRunner as ModelRunner
    from hookline.serve.server_args import ServerArgs as ServerArgs
    from hookline.sinks.console import ConsoleSink as ConsoleSink
    from hookline.sinks.csv import CSVSink as CSVSink
    from hookline.sinks.fan_out import FanOut as FanOut
    from hookline.sinks.jsonl import JSONLSink as JSONLSink
    from hookline.sinks.log import RecordLog as RecordLog
    from hookline.sinks.log import read_log as read_log
    from hookline.sinks.memory import MemorySink as MemorySink
    from hookline.sinks.mlflow import MLflowSink as MLflowSink
    from hookline.sinks.parquet import ParquetSink as ParquetSink
    from hookline.sinks.prometheus import PrometheusSink as PrometheusSink
    from hookline.sinks.record import Record as Record
    from hookline.sinks.record import StepSeries as StepSeries
    from hookline.sinks.replay import replay as replay
    from hookline.sinks.sink import MetricSink as MetricSink
    from hookline.sinks.tensorboard import TensorBoardSink as TensorBoardSink
    from hookline.sinks.wandb import WandbSink as WandbSink
    from hookline.sites.attach import attach as attach
    from hookline.sites.bounds import clip_gradients as clip_gradients
    from hookline.sites.bounds import freeze as freeze
    from hookline.sites.everywhere import attach_everywhere as attach_everywhere
    from hookline.sites.find import Sites as Sites
    from hookline.sites.find import assert_no_hooks as assert_no_hooks
    from hookline.sites.find import attached as attached
    from hookline.sites.find import find as find
    from hookline.sites.functions.attach import attach_function as attach_function
    from hookline.sites.functions.site import FunctionSite as FunctionSite
    from hookline.sites.handle import HandleSet as HandleSet
    from hookline.sites.handle import HookHandle as HookHandle
    from hookline.sites.kinds import Kind as Kind
    from hookline.sites.nodes import attach_node as attach_node
    from hookline.sites.optimizers import OptimizerSite as OptimizerSite
    from hookline.sites.optimizers import attach_optimizer as attach_optimizer
    from hookline.sites.receipt import Receipt as Receipt
    from hookline.sites.saved import SavedTensors as SavedTensors
    from hookline.sites.saved import saved_tensors as saved_tensors
    from hookline.sites.site import Site as Site
    from hookline.sites.tensors import attach_tensor as attach_tensor
    from hookline.types import FunctionPostHook as FunctionPostHook
    from hookline.types import FunctionPreHook as FunctionPreHook
    from hookline.types import ModulePostHook as ModulePostHook
    from hookline.types import ModulePreHook as ModulePreHook

__version__ = "0.1.0"

_HOME = {
    "BackwardHookBuilder": "hooks.builders",
    "CSVSink": "sinks.csv",
    "Cache": "observe.capture.cache",
    "CaptureError": "errors",
    "Captured": "observe.capture.cache",
    "CheckpointError": "errors",
    "CheckpointProfiler": "dispatch.profiler",
    "Checkpoints": "loops.checkpoints",
    "ComponentBackwardHookSpec": "hooks.builders",
    "ComponentContext": "hooks.components",
    "ComponentHookSpec": "hooks.builders",
    "ConfigError": "errors",
    "ConsoleSink": "sinks.console",
    "DebugInterventionHook": "hooks.training_hook",
    "Edit": "observe.patch.edits",
    "EngineBusy": "errors",
    "EngineClosed": "errors",
    "Experiment": "loops.experiment",
    "FanOut": "sinks.fan_out",
    "FiringReceipt": "dispatch.firing",
    "FisherInformationState": "observe.trackers.fisher",
    "FunctionPostHook": "types",
    "FunctionPreHook": "types",
    "FunctionSite": "sites.functions.site",
    "GradientFlowState": "observe.trackers.gradient_flow",
    "Guard": "guard.guard",
    "GuardError": "errors",
    "HandleSet": "sites.handle",
    "HookBuilder": "hooks.builders",
    "HookCheckError": "errors",
    "HookHandle": "sites.handle",
    "HookManager": "dispatch.manager",
    "HookNameError": "errors",
    "HookNeverFired": "errors",
    "HookOrderError": "errors",
    "HookPoint": "lifecycle.point",
    "HookRegistry": "dispatch.registry",
    "HookReturnError": "errors",
    "HookSignatureError": "errors",
    "HookSpec": "hooks.specs",
    "HooklineError": "errors",
    "HooklineWarning": "errors",
    "HooksLeftError": "errors",
    "InterventionHook": "hooks.training_hook",
    "JSONLSink": "sinks.jsonl",
    "Kind": "sites.kinds",
    "KindError": "errors",
    "LifecycleError": "errors",
    "LoadedRun": "report.load",
    "LoopResult": "loops.run",
    "MLflowSink": "sinks.mlflow",
    "MemorySink": "sinks.memory",
    "MetricError": "errors",
    "MetricInfo": "hooks.metric_info",
    "MetricSink": "sinks.sink",
    "MissingPackageError": "errors",
    "ModelDataContext": "guard.model_context",
    "ModelRunner": "serve.model_runner",
    "ModulePostHook": "types",
    "ModulePreHook": "types",
    "NoMatchError": "errors",
    "NonFiniteError": "errors",
    "NotAllowedError": "errors",
    "OptimizerSite": "sites.optimizers",
    "OptionError": "errors",
    "ParquetSink": "sinks.parquet",
    "Patch": "observe.patch.patch",
    "Plan": "dispatch.plan",
    "PolicyAutoBuilder": "hooks.components",
    "Profile": "observe.timing.profile",
    "ProfileRow": "observe.timing.profile",
    "PrometheusSink": "sinks.prometheus",
    "ReLUActivationState": "observe.trackers.relu",
    "ReLUGradientFlowState": "observe.trackers.gradient_flow",
    "Receipt": "sites.receipt",
    "Record": "sinks.record",
    "RecordLog": "sinks.log",
    "ResumeError": "errors",
    "RunDataContext": "lifecycle.run_context",
    "SaturatedActivationState": "observe.trackers.saturated",
    "SavedTensors": "sites.saved",
    "ScopeError": "errors",
    "ServerArgs": "serve.server_args",
    "Site": "sites.site",
    "Sites": "sites.find",
    "StatsReporter": "loops.stats_reporter",
    "StepResult": "loops.training_step",
    "StepSchedule": "lifecycle.schedule",
    "StepSeries": "sinks.record",
    "TargetError": "errors",
    "TensorBoardSink": "sinks.tensorboard",
    "Tracker": "observe.trackers.tracker",
    "TrackerHook": "dispatch.choose",
    "TrainTool": "loops.train_tool",
    "Trainer": "loops.trainer",
    "TrainingHook": "hooks.training_hook",
    "UnhookableError": "errors",
    "WandbSink": "sinks.wandb",
    "Watch": "observe.watch",
    "ablate": "observe.patch.edits",
    "assert_no_hooks": "sites.find",
    "attach": "sites.attach",
    "attach_everywhere": "sites.everywhere",
    "attach_fisher_information_hooks": "hooks.builders",
    "attach_function": "sites.functions.attach",
    "attach_gradient_flow_hooks": "hooks.builders",
    "attach_node": "sites.nodes",
    "attach_optimizer": "sites.optimizers",
    "attach_relu_activation_hooks": "hooks.builders",
    "attach_relu_gradient_flow_hooks": "hooks.builders",
    "attach_saturated_activation_hooks": "hooks.builders",
    "attach_tensor": "sites.tensors",
    "attached": "sites.find",
    "build_extractor": "hooks.builders",
    "capture": "observe.capture.capture",
    "clip_gradients": "sites.bounds",
    "compute_dead_neuron_stats": "observe.trackers.weights",
    "compute_saturated_activation_stats": "observe.trackers.weights",
    "epoch_loop": "loops.epoch_loop",
    "find": "sites.find",
    "freeze": "sites.bounds",
    "load_run": "report.load",
    "load_runs": "report.load",
    "mean_ablate": "observe.patch.edits",
    "patch": "observe.patch.patch",
    "profile": "observe.timing.profile",
    "read_log": "sinks.log",
    "record": "dispatch.recording",
    "register_hooks": "hooks.specs",
    "replace": "observe.patch.edits",
    "replay": "sinks.replay",
    "resolve_callable": "hooks.resolve",
    "rollback": "guard.rollback",
    "saved_tensors": "sites.saved",
    "scale": "observe.patch.edits",
    "steer": "observe.patch.edits",
    "step_loop": "loops.step_loop",
    "swap": "observe.patch.edits",
    "watch": "observe.watch",
    "write_report": "report.page",
}
"""Where each public name lives."""

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hookline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hookline.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
