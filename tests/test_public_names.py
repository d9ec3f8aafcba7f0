"""The public names: which there are, of what make, and that asking for none of them costs nothing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from typing import Any

import pytest
from helpers_waiting import PATIENCE

import hookline as hl


def _named(table: str) -> list[str]:
    """Return ``package.name`` for every name of ``table``, whose packages have a colon behind them."""
    found, package = [], ""
    for word in table.split():
        if word.endswith(":"):
            package = word[:-1]
        else:
            found.append(f"{package}.{word}")
    return found


FUNCTIONS = _named("""
    hookline: assert_no_hooks attach attach_everywhere attach_function attach_node attach_optimizer attach_tensor
        attached audit capture clip_gradients compare doctor epoch_loop find follow freeze load_run load_runs parity
        patch
        record register_hooks rollback saved_tensors step_loop trace watch write_report
    debug: read_trace trace_outputs find_bad_operations doctor bisect packed_rows padded_rows
        read_flight replay_check alarm
    distributed: gather_objects is_distributed rank_count this_rank
    edits: ablate mean_ablate replace scale steer swap
    guard: rollback
    metta: attach_fisher_information_hooks attach_gradient_flow_hooks attach_relu_activation_hooks
        attach_relu_gradient_flow_hooks attach_saturated_activation_hooks build_extractor compute_dead_neuron_stats
        compute_saturated_activation_stats
    report: load_run load_runs write_report
    serve: load make_app
    sglang: register_forward_hook_for_model
    records: read_log replay
    lifecycle: record
    sites: find_roles
    specs: register_hooks resolve_callable
    training: epoch_loop step_loop
""")
ERRORS = _named("""
    hookline: HooklineError
    distributed: RankError
    errors: CaptureError CheckpointError ConfigError EngineBusy EngineClosed GuardError HookCheckError HookNameError
        HookReturnError HookSignatureError HooksLeftError KindError LifecycleError MetricError MissingPackageError
        NoMatchError NonFiniteError NotAllowedError OptionError RankError ResumeError ScopeError TargetError
        UnhookableError
""")
CLASSES = _named("""
    hookline: Checkpoints Experiment HandleSet HookHandle HookManager HookPoint HookRegistry HookSpec InterventionHook
        Kind MetricInfo MetricSink ModelDataContext PrecisionChecker RunDataContext Site StepSchedule TrainingHook
    debug: Parity ParityCallback
    debug: PrecisionChecker PrecisionConfig PrecisionRecord Fingerprint MeshPlacement RowKey RowKeys Trace
        TraceFolder Value ValueKey BadOperation BadOperations BadStep TensorSummary FirstBadOperation
        Diagnosis FoundHook SilentSite Audit Bisection Blame Comparison Culprit FusedRule Pair PairRule
        RenameRule Flight FlightRecorder Replay StepAlarm Trouble
    distributed: Exchange
    edits: Edit
    guard: Guard ModelDataContext
    metta: ComponentContext FisherInformationState GradientFlowState PolicyAutoBuilder ReLUActivationState
        ReLUGradientFlowState SaturatedActivationState StatsReporter Tracker TrainTool Trainer
    observe: Cache Captured HeatMap Patch Watch
    report: LoadedRun
    serve: Engine Finished GenerationRequest LiveHook LiveHooks Server Settings StatesOfLayer StatesWanted Ticket Token
    sglang: Dumper DumperConfig ModelRunner ServerArgs TensorDumper
    sinks: CSVSink ConsoleSink JSONLSink MLflowSink MemorySink ParquetSink PrometheusSink TensorBoardSink WandbSink
    sites: FunctionSite HandleSet HookHandle Kind OptimizerSite Receipt SavedTensors Site Sites
    specs: HookSpec
    lifecycle: CheckpointProfiler DebugInterventionHook FiringReceipt HookManager HookRegistry InterventionHook
        MetricInfo Plan RunDataContext TrackerHook TrainingHook
    records: FanOut MetricSink Record RecordLog StepSeries
    training: Checkpoints Experiment LoopResult StepResult
""")
ALIASES = _named("""
    hook_types: FunctionPostHook FunctionPreHook ModulePostHook ModulePreHook
    metta: BackwardHookBuilder ComponentBackwardHookSpec ComponentHookSpec HookBuilder
""")
OBJECTS = ["sglang.dumper"]
WARNINGS = ["hookline.HooklineWarning", "errors.HookNeverFired"]
LAZY = [
    "hookline",
    "debug",
    "distributed",
    "factories",
    "guard",
    "metta",
    "observe",
    "report",
    "serve",
    "sglang",
    "sinks",
    "sites",
    "lifecycle",
    "records",
    "specs",
    "training",
]
"""Packages whose names are imported when first used; ``hookline`` itself stands for the top."""


def package(name: str) -> Any:
    """Return the package ``name`` of hookline; ``"hookline"`` is the top."""
    return hl if name == "hookline" else importlib.import_module(f"hookline.{name}")


def public(path: str) -> Any:
    """Return what ``package.name`` stands for."""
    where, _, name = path.partition(".")
    return getattr(package(where), name)


def test_the_public_names_are_exactly_these() -> None:
    """Nothing becomes public by accident, nothing disappears, and each name leads to something."""
    listed = {
        path for path in FUNCTIONS + ERRORS + WARNINGS + CLASSES + ALIASES + OBJECTS if path.partition(".")[0] in LAZY
    }
    served = [f"{where}.{name}" for where in LAZY if where != "factories" for name in package(where).__all__]
    assert sorted(served) == sorted(listed | {"hookline.__version__"})
    assert all(public(path) is not None for path in served)
    assert len(hl.__all__) <= 51


def test_verbs_are_annotated_functions_and_nouns_are_classes() -> None:
    """Each with a docstring; errors and warnings are ours, and shapes of hooks are for annotations alone."""
    for path in FUNCTIONS:
        signature = inspect.signature(public(path))
        found = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
        assert inspect.isfunction(public(path)), path
        assert inspect.Signature.empty not in found, path
    assert all(inspect.isclass(public(path)) for path in CLASSES)
    assert all(issubclass(public(path), hl.HooklineError) for path in ERRORS)
    assert all(issubclass(public(path), hl.HooklineWarning) for path in WARNINGS)
    assert not any(inspect.isclass(public(path)) for path in ALIASES)
    assert [path for path in FUNCTIONS + CLASSES + ERRORS + WARNINGS if not public(path).__doc__] == []


@pytest.mark.parametrize("where", LAZY)
def test_no_public_name_is_a_module_of_its_package(where: str) -> None:
    """``hookline.find`` must stay the function, whatever is imported later."""
    present = {module.name for module in pkgutil.iter_modules(package(where).__path__)}
    assert not set(package(where).__all__) & present


WHEN = """
import sys
import hookline, hookline as hl
dir(hl), hl.__version__, hl.errors.NoMatchError
print("torch" in sys.modules, "numpy" in sys.modules)
print(*dir(hookline))
import torch
from torch.nn.modules import module as m
call, impl = m.Module.__call__, m.Module._call_impl
from hookline import *
print(hl.attach.__name__, hl.sinks.CSVSink.__name__, hl.edits.scale.__name__)
print(m.Module.__call__ is call, m.Module._call_impl is impl, bool(m._has_any_global_hook()))
"""


def test_what_is_imported_when() -> None:
    """Looking at names takes no torch; they are listed before use, and all of them change nothing in torch."""
    done = subprocess.run([sys.executable, "-c", WHEN], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    before, listed, used, torch_is = done.stdout.splitlines()
    assert before == "False False"
    assert set(hl.__all__) <= set(listed.split())
    assert listed.split() == sorted(listed.split())
    assert used == "attach CSVSink scale"
    assert torch_is == "True True False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As on any module, so that Python can suggest the nearest."""
    with pytest.raises(AttributeError, match="'hookline' has no attribute 'atach'") as told:
        hl.atach
    assert (told.value.obj, told.value.name) == (hl, "atach")


def test_the_package_ships_its_types() -> None:
    """``py.typed`` is there for type checkers."""
    assert pkgutil.get_data("hookline", "py.typed") is not None
