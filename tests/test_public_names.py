"""The public names: which there are, of what make, and that asking for none of them costs nothing."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys

import pytest
from helpers_waiting import PATIENCE

import hookline as hl

FUNCTIONS = {
    "ablate",
    "assert_no_hooks",
    "attach",
    "attach_everywhere",
    "attach_fisher_information_hooks",
    "attach_function",
    "attach_gradient_flow_hooks",
    "attach_node",
    "attach_optimizer",
    "attach_relu_activation_hooks",
    "attach_relu_gradient_flow_hooks",
    "attach_saturated_activation_hooks",
    "attach_tensor",
    "attached",
    "build_extractor",
    "capture",
    "clip_gradients",
    "compute_dead_neuron_stats",
    "compute_saturated_activation_stats",
    "epoch_loop",
    "find",
    "freeze",
    "load_run",
    "load_runs",
    "mean_ablate",
    "patch",
    "profile",
    "read_log",
    "record",
    "register_hooks",
    "replace",
    "replay",
    "resolve_callable",
    "rollback",
    "saved_tensors",
    "scale",
    "steer",
    "step_loop",
    "swap",
    "watch",
    "write_report",
}
ERRORS = {
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "EngineBusy",
    "EngineClosed",
    "GuardError",
    "HookCheckError",
    "HookNameError",
    "HookOrderError",
    "HookReturnError",
    "HookSignatureError",
    "HooklineError",
    "HooksLeftError",
    "KindError",
    "LifecycleError",
    "MetricError",
    "MissingPackageError",
    "NoMatchError",
    "NonFiniteError",
    "NotAllowedError",
    "OptionError",
    "ResumeError",
    "ScopeError",
    "TargetError",
    "UnhookableError",
}
WARNINGS = {"HookNeverFired", "HooklineWarning"}
CLASSES = {
    "CSVSink",
    "Cache",
    "Captured",
    "CheckpointProfiler",
    "Checkpoints",
    "ComponentContext",
    "ConsoleSink",
    "DebugInterventionHook",
    "Edit",
    "Experiment",
    "FanOut",
    "FiringReceipt",
    "FisherInformationState",
    "FunctionSite",
    "GradientFlowState",
    "Guard",
    "HandleSet",
    "HookHandle",
    "HookManager",
    "HookPoint",
    "HookRegistry",
    "HookSpec",
    "InterventionHook",
    "JSONLSink",
    "Kind",
    "LoadedRun",
    "LoopResult",
    "MLflowSink",
    "MemorySink",
    "MetricInfo",
    "MetricSink",
    "ModelDataContext",
    "ModelRunner",
    "OptimizerSite",
    "ParquetSink",
    "Patch",
    "Plan",
    "PolicyAutoBuilder",
    "Profile",
    "ProfileRow",
    "PrometheusSink",
    "ReLUActivationState",
    "ReLUGradientFlowState",
    "Receipt",
    "Record",
    "RecordLog",
    "RunDataContext",
    "SaturatedActivationState",
    "SavedTensors",
    "ServerArgs",
    "Site",
    "Sites",
    "StatsReporter",
    "StepResult",
    "StepSchedule",
    "StepSeries",
    "TensorBoardSink",
    "Tracker",
    "TrackerHook",
    "TrainTool",
    "Trainer",
    "TrainingHook",
    "WandbSink",
    "Watch",
}
ALIASES = {
    "BackwardHookBuilder",
    "ComponentBackwardHookSpec",
    "ComponentHookSpec",
    "FunctionPostHook",
    "FunctionPreHook",
    "HookBuilder",
    "ModulePostHook",
    "ModulePreHook",
}
# The subpackages of the finished design, of which only some exist yet.
SUBPACKAGES = {
    "analyses",
    "cli",
    "config",
    "dispatch",
    "distributed",
    "experiments",
    "factories",
    "guard",
    "hooks",
    "integrations",
    "lifecycle",
    "loops",
    "observe",
    "report",
    "serve",
    "sinks",
    "sites",
    "testing",
}


def run_python(code: str) -> str:
    """What a fresh interpreter prints for ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_exactly_these():
    """Nothing becomes public by accident, and nothing disappears."""
    assert set(hl.__all__) == {"__version__"} | FUNCTIONS | ERRORS | WARNINGS | CLASSES | ALIASES


def test_no_public_name_is_listed_twice():
    """``__all__`` holds each name once."""
    assert len(hl.__all__) == len(set(hl.__all__))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_verbs_are_functions_with_a_docstring_and_annotations(name):
    """Every public verb is a documented, fully annotated function."""
    function = getattr(hl, name)
    assert inspect.isfunction(function)
    assert function.__doc__
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_are_errors_of_ours(name):
    """Every public error descends from HooklineError and is documented."""
    assert issubclass(getattr(hl, name), hl.HooklineError)
    assert getattr(hl, name).__doc__


@pytest.mark.parametrize("name", sorted(WARNINGS))
def test_warnings_are_warnings_of_ours(name):
    """Every public warning descends from HooklineWarning, which is a UserWarning."""
    assert issubclass(getattr(hl, name), hl.HooklineWarning)
    assert issubclass(hl.HooklineWarning, UserWarning)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_nouns_are_classes_with_a_docstring(name):
    """Every public noun is a documented class."""
    assert inspect.isclass(getattr(hl, name))
    assert getattr(hl, name).__doc__


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_hook_shapes_are_type_aliases_and_not_classes(name):
    """The hook shapes are for annotations: aliases, not something to instantiate."""
    assert not inspect.isclass(getattr(hl, name))


def test_the_version_is_a_string_of_numbers():
    """``__version__`` reads like a version."""
    assert all(part.isdigit() for part in hl.__version__.split("."))


def test_no_public_name_is_a_subpackage_or_module_of_the_package():
    """``hookline.find`` must stay the function, whatever is imported later."""
    present = {module.name for module in pkgutil.iter_modules(hl.__path__)}
    assert not set(hl.__all__) & (present | SUBPACKAGES)


def test_every_public_name_says_the_same_to_a_type_checker_as_at_run_time():
    """The names imported under TYPE_CHECKING are the names that ``__getattr__`` serves."""
    (block,) = (node for node in ast.parse(inspect.getsource(hl)).body if isinstance(node, ast.If))
    declared = {alias.asname for line in block.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert declared == set(hl.__all__) - {"__version__"}


def test_importing_hookline_imports_no_torch():
    """``import hookline`` alone leaves torch and numpy unimported."""
    code = "import sys, hookline; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code) == "False False"


def test_errors_and_listing_need_no_torch():
    """Looking at the names, at the version, or catching an error does not import torch either."""
    look = "dir(hookline), hookline.__version__, hookline.errors.NoMatchError"
    code = f"import sys, hookline; {look}; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_using_a_name_imports_torch():
    """The first name that needs torch brings it in."""
    assert run_python("import sys, hookline; hookline.attach; print('torch' in sys.modules)") == "True"


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


def test_a_name_is_the_same_object_each_time():
    """Lazy names are fetched once."""
    assert hl.attach is hl.attach


def test_the_package_ships_its_types():
    """``py.typed`` is there for type checkers."""
    assert pkgutil.get_data("hookline", "py.typed") is not None
