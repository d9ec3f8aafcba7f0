"""The public names of ``hookline.lifecycle``, each with the module it lives in."""

from hookline.lifecycle.context import CheckpointProfiler as CheckpointProfiler
from hookline.lifecycle.context import RunDataContext as RunDataContext
from hookline.lifecycle.hook import DebugInterventionHook as DebugInterventionHook
from hookline.lifecycle.hook import InterventionHook as InterventionHook
from hookline.lifecycle.hook import MetricInfo as MetricInfo
from hookline.lifecycle.hook import TrackerHook as TrackerHook
from hookline.lifecycle.hook import TrainingHook as TrainingHook
from hookline.lifecycle.managed_hooks import FiringReceipt as FiringReceipt
from hookline.lifecycle.managed_hooks import Plan as Plan
from hookline.lifecycle.manager import HookManager as HookManager
from hookline.lifecycle.manager import record as record
from hookline.lifecycle.registry import HookRegistry as HookRegistry

__all__: list[str]
