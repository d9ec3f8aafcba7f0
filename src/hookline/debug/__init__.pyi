"""The public names of ``hookline.debug``, each with the module it lives in."""

from hookline.debug.audit.audit import Audit as Audit
from hookline.debug.audit.audit import Culprit as Culprit
from hookline.debug.compare.bisect_runs import Bisection as Bisection
from hookline.debug.compare.bisect_runs import bisect as bisect
from hookline.debug.compare.blame import Blame as Blame
from hookline.debug.compare.key import Fingerprint as Fingerprint
from hookline.debug.compare.key import MeshPlacement as MeshPlacement
from hookline.debug.compare.key import Pair as Pair
from hookline.debug.compare.key import RowKey as RowKey
from hookline.debug.compare.key import RowKeys as RowKeys
from hookline.debug.compare.key import Value as Value
from hookline.debug.compare.key import ValueKey as ValueKey
from hookline.debug.compare.result import Comparison as Comparison
from hookline.debug.compare.rows import packed_rows as packed_rows
from hookline.debug.compare.rows import padded_rows as padded_rows
from hookline.debug.compare.rules import FusedRule as FusedRule
from hookline.debug.compare.rules import PairRule as PairRule
from hookline.debug.compare.rules import RenameRule as RenameRule
from hookline.debug.compare.trace import Trace as Trace
from hookline.debug.compare.trace import trace_outputs as trace_outputs
from hookline.debug.compare.trace_files import TraceFolder as TraceFolder
from hookline.debug.compare.trace_files import read_trace as read_trace
from hookline.debug.diagnose.doctor import Diagnosis as Diagnosis
from hookline.debug.diagnose.doctor import FoundHook as FoundHook
from hookline.debug.diagnose.doctor import SilentSite as SilentSite
from hookline.debug.diagnose.doctor import doctor as doctor
from hookline.debug.first_bad.bad_operation import BadOperation as BadOperation
from hookline.debug.first_bad.bad_operation import BadStep as BadStep
from hookline.debug.first_bad.bad_operation import TensorSummary as TensorSummary
from hookline.debug.first_bad.find_bad_operations import BadOperations as BadOperations
from hookline.debug.first_bad.find_bad_operations import FirstBadOperation as FirstBadOperation
from hookline.debug.first_bad.find_bad_operations import find_bad_operations as find_bad_operations
from hookline.debug.first_bad.flight_recorder import FlightRecorder as FlightRecorder
from hookline.debug.first_bad.replay_check import Replay as Replay
from hookline.debug.first_bad.replay_check import replay_check as replay_check
from hookline.debug.parity.parity import Parity as Parity
from hookline.debug.parity.parity import ParityCallback as ParityCallback
from hookline.debug.precision.precision_checker import PrecisionChecker as PrecisionChecker
from hookline.debug.precision.precision_checker import PrecisionConfig as PrecisionConfig
from hookline.debug.precision.precision_checker import PrecisionRecord as PrecisionRecord
from hookline.report.report_runs import Flight as Flight
from hookline.report.report_runs import read_flight as read_flight

__all__: list[str]
