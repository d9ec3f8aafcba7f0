"""The public names of hookline, each with the module it lives in: the one list, for `_lazy` and for type checkers."""

from hookline import distributed as distributed
from hookline import edits as edits
from hookline import errors as errors
from hookline import factories as factories
from hookline import guard as guard
from hookline import hook_types as hook_types
from hookline import integrations as integrations
from hookline import metta as metta
from hookline import observe as observe
from hookline import report as report
from hookline import serve as serve
from hookline import sglang as sglang
from hookline import sinks as sinks
from hookline import sites as sites
from hookline import specs as specs
from hookline import testing as testing
from hookline import training as training
from hookline.errors import HooklineError as HooklineError
from hookline.errors import HooklineWarning as HooklineWarning
from hookline.guard.guard import rollback as rollback
from hookline.guard.model_context import ModelDataContext as ModelDataContext
from hookline.integrations.follow import follow as follow
from hookline.lifecycle.points import HookPoint as HookPoint
from hookline.lifecycle.run_context import RunDataContext as RunDataContext
from hookline.lifecycle.schedule import StepSchedule as StepSchedule
from hookline.observe.capture.capture import capture as capture
from hookline.observe.patch.patch import patch as patch
from hookline.observe.profile.profile import profile as profile
from hookline.observe.watch.watch import watch as watch
from hookline.report.loaded_run import load_run as load_run
from hookline.report.loaded_run import load_runs as load_runs
from hookline.report.report_page import write_report as write_report
from hookline.sinks.sink import MetricSink as MetricSink
from hookline.sites.attach import attach as attach
from hookline.sites.find import assert_no_hooks as assert_no_hooks
from hookline.sites.find import attached as attached
from hookline.sites.find import find as find
from hookline.sites.functions.attach_function import attach_function as attach_function
from hookline.sites.handle import HandleSet as HandleSet
from hookline.sites.handle import HookHandle as HookHandle
from hookline.sites.kinds import Kind as Kind
from hookline.sites.modules.attach_everywhere import attach_everywhere as attach_everywhere
from hookline.sites.optimizers.optimizer_hooks import attach_optimizer as attach_optimizer
from hookline.sites.site_info import Site as Site
from hookline.sites.tensors.gradient_limits import clip_gradients as clip_gradients
from hookline.sites.tensors.gradient_limits import freeze as freeze
from hookline.sites.tensors.saved_tensors import saved_tensors as saved_tensors
from hookline.sites.tensors.tensor_hooks import attach_node as attach_node
from hookline.sites.tensors.tensor_hooks import attach_tensor as attach_tensor
from hookline.specs.hook_spec import HookSpec as HookSpec
from hookline.specs.hook_spec import register_hooks as register_hooks
from hookline.training.checkpoints.checkpoints import Checkpoints as Checkpoints
from hookline.training.loops.epoch_loop import epoch_loop as epoch_loop
from hookline.training.loops.experiment import Experiment as Experiment
from hookline.training.loops.step_loop import step_loop as step_loop
from hookline.training.manager import HookManager as HookManager
from hookline.training.metric_output import record as record
from hookline.training.registry import HookRegistry as HookRegistry
from hookline.training.training_hook import InterventionHook as InterventionHook
from hookline.training.training_hook import MetricInfo as MetricInfo
from hookline.training.training_hook import TrainingHook as TrainingHook

__version__: str

__all__: list[str]
