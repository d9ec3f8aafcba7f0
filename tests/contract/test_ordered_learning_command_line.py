"""OrderedLearning's command line, word for word."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

from helpers_cli import TINY, alone, facts_of, records_of, run_here

from hookline.lifecycle.registry import HookRegistry
from hookline.runs.build import chosen_hooks
from hookline.runs.read import How
from hookline.runs.run import Run, run_flags_by_name

__all__ = ["alone"]

QUIET = ("--silent", "--no-report", "--epochs", "1")
FOLDER = Path("runs/tiny/forward")


FLAGS = """
    with_hooks hooks hook_config hook_offload_state hook_csv hook_jsonl hook_wandb profile_hooks hooks_list
    hooks_describe live silent no_console_output seed output_dir resume save_checkpoints validate_checkpoints
    with_compile no_determinism matmul_precision record_trajectory config
"""


def test_every_flag_of_the_source_is_there_by_its_name_and_the_seed_is_its_own():
    """Word for word, with dashes; a switch has both forms."""
    known = set(run_flags_by_name())
    missing = [name for name in FLAGS.split() if name.removeprefix("no_") not in known and not hasattr(How, name)]
    assert missing == []
    assert Run().seed == 199


def test_a_group_and_hooks_are_united_without_doubles_training_metrics_first():
    """``--with-hooks observers --hooks hessian norms``."""
    assert run_here("run", TINY, *QUIET, "--with-hooks", "observers", "--hooks", "hessian", "norms") == 0
    assert list(facts_of(FOLDER)["hooks"]) == ["training_metrics", "norms", "hessian"]


def test_all_excludes_hooks_for_debugging_and_with_debug_adds_them():
    """``--hooks all``; ``--hooks all with_debug``."""
    everything = chosen_hooks(None, ["all"], {})
    assert everything[0] == "training_metrics"
    assert {"hessian", "norms", "counterfactual"} < set(everything)
    assert "counterfactual_validator" not in everything
    assert chosen_hooks(None, ["all", "with_debug"], {}) == [*everything, "counterfactual_validator"]


def test_observers_are_those_that_do_not_intervene():
    """``--hooks observers``."""
    found = chosen_hooks(None, ["observers"], {})
    assert "norms" in found
    assert not {"hessian", "counterfactual", "adam_dynamics"} & set(found)


def test_a_group_drops_hooks_for_debugging_even_if_it_lists_them():
    sets = {"sloppy": ["norms", "counterfactual_validator"]}
    assert chosen_hooks("sloppy", None, sets) == ["training_metrics", "norms"]
    assert chosen_hooks("sloppy", ["counterfactual_validator"], sets)[-1] == "counterfactual_validator"


MALFORMED = "Invalid --hook-config format: '{}' (expected hook_name.param=value)"
REFUSED = [
    (
        ("--with-hooks", "observer"),
        "Unknown group of hooks: 'observer'. Did you mean 'observers'? Groups: none, minimal",
    ),
    (("--hooks", "hesian"), "Unknown hook: 'hesian'. Did you mean 'hessian'? Available: training_metrics, norms"),
    *(
        (("--hooks", "hessian", "--hook-config", item), MALFORMED.format(item))
        for item in ("hessian", "hessian=1", "hessian.epsilon", "=1")
    ),
    # without effect: of an unknown argument, of a hook that is not selected, of one that there is not
    *(
        (("--hooks", "norms", "--hook-config", item), item.partition(".")[0])
        for item in ("norms.x=1", "hessian.epsilon=1", "nothing.x=1")
    ),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_cannot_be_leaves_in_the_sources_words_with_the_valid_names(flags, said, capsys):
    """A code that is not 0, and nothing is trained."""
    assert run_here("run", TINY, *QUIET, *flags) != 0
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_experiment_without_groups_says_so(capsys):
    path = TINY.replace(":Tiny", ":Steps")
    assert run_here("run", path, "--with-hooks", "observers") != 0
    assert "no group of hooks 'observers'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:--hook-csv will write nothing")
@pytest.mark.parametrize("flags", [("--hooks", "none"), ("--with-hooks", "none")])
def test_no_hooks_no_manager(flags):
    """An empty group alone: no log, no sinks."""
    assert run_here("run", TINY, *QUIET, *flags, "--hook-csv") == 0
    assert facts_of(FOLDER)["hooks"] == {}
    assert not (FOLDER / "records.jsonl").exists()
    assert not (FOLDER / "forward.csv").exists()


@pytest.mark.parametrize("flags", [(), ("--hooks",), ("--with-hooks", "none", "--hooks"), ("--with-hooks", "minimal")])
def test_bare_hooks_are_the_training_metrics(flags):
    """``--hooks`` without a name; and no flag at all, where the source records nothing."""
    assert run_here("run", TINY, *QUIET, *flags) == 0
    assert list(facts_of(FOLDER)["hooks"]) == ["training_metrics"]
    assert any("training_metrics/loss" in record["metrics"] for record in records_of(FOLDER))


def test_the_hook_config_of_the_scenario_is_float_and_int():
    """``--hook-config hessian.epsilon=1e-3 hessian.every_n_steps=500``."""
    config = ("hessian.epsilon=1e-3", "hessian.every_n_steps=500")
    assert run_here("run", TINY, *QUIET, "--hooks", "hessian", "--hook-config", *config) == 0
    found = facts_of(FOLDER)["run"]["hooks"]["config"]
    assert found == {"hessian": {"epsilon": 0.001, "every_n_steps": 500}}
    assert isinstance(found["hessian"]["every_n_steps"], int)


def test_hooks_describe_prints_what_the_source_prints(capsys):
    """Of those that are named, the description and the metrics; the list is tested in tests/cli/test_commands.py."""
    assert run_here("run", "--hooks-describe", "norms", "hessian") == 0
    described = capsys.readouterr().out
    assert "total_norm" in described
    assert "rayleigh_quotient" in described


def test_the_groups_of_the_shipped_experiment_are_the_sources():
    """none, minimal, observers, interventions, full; every name in them is a hook."""
    from hookline.training.mod_arithmetic import ModArithmetic

    groups = ModArithmetic.hook_sets
    assert list(groups) == ["none", "minimal", "observers", "interventions", "full"]
    assert (groups["none"], list(groups["minimal"])) == ([], ["training_metrics"])
    assert set(groups["interventions"]) == {"hessian", "counterfactual", "adam_dynamics"}
    assert set(groups["observers"]) | set(groups["interventions"]) == set(groups["full"])
    for names in groups.values():
        assert HookRegistry.resolve(names) == list(names)


def test_offloaded_hooks_give_the_same_metrics():
    """``--hook-offload-state``."""
    hooks = ("--hooks", "norms", "path_length", "variance", "--epochs", "4", "--silent", "--no-report")
    assert run_here("run", TINY, *hooks, "--output-dir", "a") == 0
    assert run_here("run", TINY, *hooks, "--output-dir", "b", "--hook-offload-state") == 0
    plain, offloaded = ([r["metrics"] for r in records_of(Path(name) / "tiny" / "forward")] for name in "ab")
    assert plain == offloaded
    assert any("variance/gradient_variance" in metrics for metrics in plain)


@pytest.mark.parametrize(
    ("flags", "tables", "lines"),
    [
        (("--live", "--silent", "--no-console-output"), False, False),
        (("--live", "--silent"), False, True),
        (("--console", "tables"), True, True),
        (("--console", "tables", "--silent"), False, True),
    ],
)
def test_nothing_goes_before_silent_goes_before_live(flags, tables, lines, capsys):
    """null > silent > live."""
    assert run_here("run", TINY, "--no-report", "--epochs", "1", "--hooks", *flags) == 0
    out = capsys.readouterr().out
    assert ("Hook Metrics" in out) is tables
    assert ("finished" in out) is lines


def test_a_config_file_does_not_go_with_resume(capsys):
    Path("run.json").write_text(json.dumps({"experiment": TINY}))
    assert run_here("run", "--config", "run.json", "--resume") != 0
    assert "--config and --resume" in capsys.readouterr().err
    assert run_here("run", "--config", "run.json", *QUIET) == 0
