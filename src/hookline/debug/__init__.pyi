"""The public names of ``hookline.debug``, each with the module it lives in."""

from hookline.debug.bisect_runs import Bisection as Bisection
from hookline.debug.bisect_runs import bisect as bisect
from hookline.debug.compare.compared_value import Blame as Blame
from hookline.debug.compare.compared_value import ComparedValue as ComparedValue
from hookline.debug.compare.comparison import Comparison as Comparison
from hookline.debug.compare.name_rules import FusedRule as FusedRule
from hookline.debug.compare.name_rules import PairRule as PairRule
from hookline.debug.compare.name_rules import RenameRule as RenameRule
from hookline.debug.compare.row_layouts import packed_rows as packed_rows
from hookline.debug.compare.row_layouts import padded_rows as padded_rows
from hookline.debug.diagnose.autograd_graph import AutogradGraph as AutogradGraph
from hookline.debug.diagnose.autograd_graph import GraphNode as GraphNode
from hookline.debug.diagnose.autograd_graph import graph as graph
from hookline.debug.diagnose.diagnosis import Diagnosis as Diagnosis
from hookline.debug.diagnose.diagnosis import doctor as doctor
from hookline.debug.diagnose.hook_owners import FoundHook as FoundHook
from hookline.debug.diagnose.silent_sites import SilentSite as SilentSite
from hookline.debug.first_bad.bad_operation import BadOperation as BadOperation
from hookline.debug.first_bad.bad_operation import BadStep as BadStep
from hookline.debug.first_bad.bad_operation import TensorSummary as TensorSummary
from hookline.debug.first_bad.find_bad_operations import BadOperations as BadOperations
from hookline.debug.first_bad.find_bad_operations import find_bad_operations as find_bad_operations
from hookline.debug.first_bad.first_bad_hook import FirstBadOperation as FirstBadOperation
from hookline.debug.first_bad.flight_file import Flight as Flight
from hookline.debug.first_bad.flight_file import read_flight as read_flight
from hookline.debug.first_bad.flight_recorder import FlightRecorder as FlightRecorder
from hookline.debug.first_bad.replay_check import Replay as Replay
from hookline.debug.first_bad.replay_check import replay_check as replay_check
from hookline.debug.first_bad.triggers import TriggeredHooks as TriggeredHooks
from hookline.debug.first_bad.triggers import on_trigger as on_trigger
from hookline.debug.precision.compare_npy import NpyComparison as NpyComparison
from hookline.debug.precision.compare_npy import compare_npy_folders as compare_npy_folders
from hookline.debug.precision.precision_checker import PrecisionChecker as PrecisionChecker
from hookline.debug.precision.precision_config import PrecisionConfig as PrecisionConfig
from hookline.debug.precision.precision_record import PrecisionRecord as PrecisionRecord
from hookline.debug.trace.read_trace import TraceFolder as TraceFolder
from hookline.debug.trace.read_trace import read_trace as read_trace
from hookline.debug.trace.start_trace import Trace as Trace
from hookline.debug.trace.trace_outputs import trace_outputs as trace_outputs
from hookline.debug.trace.trace_record import Fingerprint as Fingerprint
from hookline.debug.trace.trace_record import MeshPlacement as MeshPlacement
from hookline.debug.trace.trace_record import RowKey as RowKey
from hookline.debug.trace.trace_record import RowKeys as RowKeys
from hookline.debug.trace.trace_record import TraceRecord as TraceRecord

__all__: list[str]
