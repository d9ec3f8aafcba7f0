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


def _named(table: dict[str, str]) -> list[str]:
    """Return ``package.name`` for every name of ``table``."""
    return [f"{package}.{name}" for package, names in table.items() for name in names.split()]


FUNCTIONS = _named(
    {
        "hookline": """
        assert_no_hooks attach attach_everywhere attach_function attach_node attach_optimizer attach_tensor
        attached audit capture clip_gradients compare doctor epoch_loop find follow freeze load_run load_runs patch
        profile record register_hooks rollback saved_tensors step_loop trace watch write_report
    """,
        "debug": """
        compare_npy_folders read_trace trace_outputs
        find_bad_operations
        doctor graph
        bisect packed_rows padded_rows
        on_trigger read_flight replay_check
    """,
        "distributed": """
        gather_objects is_distributed rank_count reduce_metrics this_rank
    """,
        "edits": """
        ablate mean_ablate replace scale steer swap
    """,
        "guard": """
        rollback
    """,
        "metta": """
        attach_fisher_information_hooks attach_gradient_flow_hooks attach_relu_activation_hooks
        attach_relu_gradient_flow_hooks attach_saturated_activation_hooks build_extractor
        compute_dead_neuron_stats compute_saturated_activation_stats
    """,
        "observe": """
        alarm check_roles
    """,
        "report": """
        load_run load_runs write_report
    """,
        "serve": """
        load make_app
    """,
        "sglang": """
        register_forward_hook_for_model
    """,
        "records": """
        read_log replay
    """,
        "lifecycle": """
        record
    """,
        "sites": """
        find_roles
    """,
        "specs": """
        register_hooks resolve_callable
    """,
        "training": """
        epoch_loop step_loop
    """,
    }
)
ERRORS = _named(
    {
        "hookline": """
        HooklineError
    """,
        "distributed": """
        RankError
    """,
        "errors": """
        CaptureError CheckpointError ConfigError EngineBusy EngineClosed GuardError HookCheckError HookNameError
        HookOrderError HookReturnError HookSignatureError HooksLeftError KindError LifecycleError MetricError
        MissingPackageError NoMatchError NonFiniteError NotAllowedError OptionError RankError ResumeError ScopeError
        TargetError UnhookableError
    """,
    }
)
CLASSES = _named(
    {
        "hookline": """
        Checkpoints Experiment HandleSet HookHandle HookManager HookPoint HookRegistry HookSpec
        InterventionHook Kind MetricInfo MetricSink ModelDataContext PrecisionChecker RunDataContext Site StepSchedule
        TrainingHook
    """,
        "debug": """
        NpyComparison PrecisionChecker PrecisionConfig PrecisionRecord
        Fingerprint MeshPlacement RowKey RowKeys Trace TraceFolder Value ValueKey
        BadOperation BadOperations BadStep TensorSummary
        FirstBadOperation AutogradGraph Diagnosis FoundHook GraphNode SilentSite
        Audit Bisection Blame Comparison Culprit FusedRule Pair PairRule RenameRule
        Flight FlightRecorder Replay TriggeredHooks
    """,
        "distributed": """
        Exchange
    """,
        "edits": """
        Edit
    """,
        "guard": """
        Guard ModelDataContext
    """,
        "metta": """
        ComponentContext FisherInformationState GradientFlowState PolicyAutoBuilder ReLUActivationState
        ReLUGradientFlowState SaturatedActivationState StatsReporter Tracker TrainTool Trainer
    """,
        "observe": """
        Budget Cache Captured HeatMap Patch Profile ProfileRow RoleCheck StepAlarm Trouble Watch
    """,
        "report": """
        LoadedRun
    """,
        "serve": """
        Engine Finished GenerationRequest LiveHook LiveHooks Server Settings StatesOfLayer StatesWanted Ticket Token
    """,
        "sglang": """
        Dumper DumperConfig ModelRunner ServerArgs TensorDumper
    """,
        "sinks": """
        CSVSink ConsoleSink JSONLSink MLflowSink MemorySink ParquetSink PrometheusSink TensorBoardSink WandbSink
    """,
        "sites": """
        FunctionSite HandleSet HookHandle Kind OptimizerSite Receipt SavedTensors Site Sites
    """,
        "specs": """
        HookSpec
    """,
        "lifecycle": """
        CheckpointProfiler DebugInterventionHook FiringReceipt HookManager HookRegistry InterventionHook MetricInfo Plan
        RunDataContext TrackerHook TrainingHook
    """,
        "records": """
        FanOut MetricSink Record RecordLog StepSeries
    """,
        "training": """
        Checkpoints Experiment LoopResult StepResult
    """,
    }
)
ALIASES = _named(
    {
        "hook_types": """
        FunctionPostHook FunctionPreHook ModulePostHook ModulePreHook
    """,
        "metta": """
        BackwardHookBuilder ComponentBackwardHookSpec ComponentHookSpec HookBuilder
    """,
    }
)
OBJECTS = ["sglang.dumper"]
WARNINGS = ["hookline.HooklineWarning", "errors.HookNeverFired"]
LAZY = [
    *(
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
    ),
    *("lifecycle", "records", "specs", "training"),
]
"""Packages whose names are imported when first used; ``hookline`` itself stands for the top."""


def package(name: str) -> Any:
    """Return the package ``name`` of hookline; ``"hookline"`` is the top."""
    return hl if name == "hookline" else importlib.import_module(f"hookline.{name}")


def public(path: str) -> Any:
    """Return what ``package.name`` stands for."""
    where, _, name = path.partition(".")
    return getattr(package(where), name)


def run_python(code: str) -> str:
    """What a fresh interpreter prints for ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_exactly_these():
    """Nothing becomes public by accident, and nothing disappears."""
    listed = {
        path for path in FUNCTIONS + ERRORS + WARNINGS + CLASSES + ALIASES + OBJECTS if path.partition(".")[0] in LAZY
    }
    served = {f"{where}.{name}" for where in LAZY if where != "factories" for name in package(where).__all__}
    assert served == listed | {"hookline.__version__"}


def test_at_most_fifty_names_stand_at_the_top():
    """The rest is one level down, under names that users guess."""
    assert len(hl.__all__) <= 50


@pytest.mark.parametrize("where", LAZY)
def test_no_public_name_is_listed_twice(where):
    """``__all__`` holds each name once."""
    names = package(where).__all__
    assert len(names) == len(set(names))


@pytest.mark.parametrize("where", LAZY)
def test_every_name_of_a_package_can_be_had(where):
    """The stub beside each ``__init__.py`` names homes that exist."""
    for name in package(where).__all__:
        assert getattr(package(where), name) is not None


@pytest.mark.parametrize("path", FUNCTIONS)
def test_verbs_are_functions_with_a_docstring_and_annotations(path):
    """Every public verb is a documented, fully annotated function."""
    function = public(path)
    assert inspect.isfunction(function)
    assert function.__doc__
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("path", ERRORS)
def test_errors_are_errors_of_ours(path):
    """Every public error descends from HooklineError and is documented."""
    assert issubclass(public(path), hl.HooklineError)
    assert public(path).__doc__


@pytest.mark.parametrize("path", WARNINGS)
def test_warnings_are_warnings_of_ours(path):
    """Every public warning descends from HooklineWarning, which is a UserWarning."""
    assert issubclass(public(path), hl.HooklineWarning)
    assert issubclass(hl.HooklineWarning, UserWarning)


@pytest.mark.parametrize("path", CLASSES)
def test_nouns_are_classes_with_a_docstring(path):
    """Every public noun is a documented class."""
    assert inspect.isclass(public(path))
    assert public(path).__doc__


@pytest.mark.parametrize("path", ALIASES)
def test_hook_shapes_are_type_aliases_and_not_classes(path):
    """The hook shapes are for annotations: aliases, not something to instantiate."""
    assert not inspect.isclass(public(path))


def test_the_version_is_a_string_of_numbers():
    """``__version__`` reads like a version."""
    assert all(part.isdigit() for part in hl.__version__.split("."))


@pytest.mark.parametrize("where", LAZY)
def test_no_public_name_is_a_module_of_its_package(where):
    """``hookline.find`` must stay the function, whatever is imported later."""
    present = {module.name for module in pkgutil.iter_modules(package(where).__path__)}
    assert not set(package(where).__all__) & present


def test_importing_hookline_imports_no_torch():
    """``import hookline`` alone leaves torch and numpy unimported."""
    code = "import sys, hookline; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code) == "False False"


def test_errors_and_listing_need_no_torch():
    """Looking at the names, at the version, or catching an error does not import torch either."""
    look = "dir(hookline), hookline.__version__, hookline.errors.NoMatchError"
    code = f"import sys, hookline; {look}; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_using_a_name_imports_what_it_needs():
    """``hl.sinks.CSVSink`` works after ``import hookline as hl``; the first name that needs torch brings it in."""
    code = (
        "import sys, hookline as hl\n"
        "print(hl.errors.KindError.__name__, 'torch' in sys.modules)\n"
        "print(hl.attach.__name__, 'torch' in sys.modules, hl.sinks.CSVSink.__name__, hl.edits.scale.__name__)"
    )
    assert run_python(code).splitlines() == ["KindError False", "attach True CSVSink scale"]


def test_importing_everything_changes_nothing_in_torch():
    """A star import registers no hook and wraps no function of torch."""
    code = (
        "import torch; from torch.nn.modules import module as m; call = m.Module.__call__; impl = m.Module._call_impl\n"
        "from hookline import *\n"
        "print(m.Module.__call__ is call, m.Module._call_impl is impl, bool(m._has_any_global_hook()))"
    )
    assert run_python(code) == "True True False"


def test_dir_lists_every_public_name_sorted():
    """``dir(hookline)`` shows what there is before anything was used."""
    listed = run_python("import hookline; print(*dir(hookline))").split()
    assert set(hl.__all__) <= set(listed)
    assert listed == sorted(listed)


def test_an_unknown_attribute_is_an_attribute_error_that_names_it():
    """A mistyped name fails like on any module."""
    with pytest.raises(AttributeError, match="'hookline' has no attribute 'atach'"):
        hl.atach
    assert not hasattr(hl, "nothing_of_the_sort")


@pytest.mark.parametrize(
    ("name", "home"),
    [("HeatMap", "hookline.observe"), ("ablate", "hookline.edits"), ("OptionError", "hookline.errors"),
     ("CSVSink", "hookline.sinks")],
)  # fmt: skip
def test_a_name_of_one_level_down_is_answered_with_its_home(name: str, home: str) -> None:
    """Also of a plain module, which has no stub; what no level has gets no such answer."""
    with pytest.raises(AttributeError, match=f"'hookline' has no attribute '{name}'; it is {home}.{name}$"):
        getattr(hl, name)
    assert hasattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match=r"has no attribute 'Heatmap'$"):
        hl.Heatmap
    with pytest.raises(AttributeError, match=r"'hookline.observe' has no attribute 'OptionError'$"):
        hl.observe.OptionError


def test_a_traceback_can_suggest_the_nearest_name() -> None:
    """Python does it, where the error has the module and the name."""
    with pytest.raises(AttributeError) as told:
        hl.atach
    assert (told.value.obj, told.value.name) == (hl, "atach")


def test_a_name_is_the_same_object_each_time():
    """Lazy names are fetched once."""
    assert hl.attach is hl.attach


def test_the_package_ships_its_types():
    """``py.typed`` is there for type checkers."""
    assert pkgutil.get_data("hookline", "py.typed") is not None
