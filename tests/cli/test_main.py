"""The command line as a whole: help, versions, mistakes, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import EXPERIMENTS, TINY, facts_of, hookline, run_here
from helpers_waiting import PATIENCE

import hookline as hl
from hookline.cli.main import COMMANDS, main


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["replay", "-h"]])
def test_help_comes_without_torch(arguments):
    """Not one module of it."""
    code = (
        "import sys\nfrom hookline.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as left:\n    assert not left.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "hook" in done.stdout


def test_the_help_names_every_command_the_exit_codes_and_examples(capsys):
    """Everything a newcomer needs on one screen."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert "130" in text
    assert "hookline run mod_arithmetic" in text
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_what_it_does(name, capsys):
    """Its first lines say what it is for, with an example."""
    assert run_here(name, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: hookline {name}")
    assert f"hookline {name} " in text.partition("\n")[2]


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hookline {hl.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rum"], "Unknown command 'rum'. Did you mean 'run'? Commands: run, hooks"),
        (["run"], "needs an experiment: mod_arithmetic, "),
        (
            ["run", TINY, "--epoch", "5"],
            "There is no option --epoch. Did you mean '--epochs'? All of them: hookline run",
        ),
        (["run", "mod_aritmetic"], "Unknown experiment 'mod_aritmetic'. Did you mean 'mod_arithmetic'?"),
        (["run", "nothing.py:X"], "There is no file nothing.py."),
        (["run", f"{EXPERIMENTS}:Tinny"], "has no 'Tinny'. Did you mean 'Tiny'?"),
        (["run", f"{EXPERIMENTS}"], f"write {EXPERIMENTS}:NAME. There are: Tiny, Nested, Needy"),
        (["run", f"{EXPERIMENTS}:NUMBER"], "is 3, and hookline run takes an Experiment"),
        (["run", f"{EXPERIMENTS}:make_nothing"], "gave 3, and hookline run takes an Experiment"),
        (["run", TINY, "--strategy", "forwards"], "tiny has no strategy 'forwards'. Did you mean 'forward'?"),
        (["run", TINY, "--device", "cuda:77"], "cuda:77: there is no such device here"),
        (["run", TINY, "--resume"], "There is nothing to resume: no checkpoints in runs/tiny/forward."),
        (["run", TINY, "--hook-sink", "csw"], "Unknown sink 'csw'. Did you mean 'csv'?"),
        (["run", TINY, "--hooks", f"{EXPERIMENTS}:Config"], "a hook is a class derived from TrainingHook"),
        (["run", TINY, "--save-checkpoints", "0"], "--save-checkpoints: expected greater than or equal to 1"),
        (["run", TINY, "--save-checkpoints", "--validate-checkpoints"], "do not go together"),
        (["report", "nowhere"], "There is no folder nowhere: hookline run leaves one in runs/EXPERIMENT/STRATEGY"),
        (["find", f"{EXPERIMENTS}:make_model", "2.x"], "No module matches '2.x'"),
        (["check"], "arguments are required: FILE"),
        (["hooks", "nrms"], "Unknown hook: 'nrms'. Did you mean 'norms'?"),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments, said, capsys, tmp_path):
    """No traceback, nothing written."""
    assert run_here(*arguments) == 2
    heard = capsys.readouterr()
    assert said in heard.err
    assert "Traceback" not in heard.err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("train.py",), ("bash", "train.py", "--lr", "1")])
def test_a_script_without_the_two_dashes_is_not_imported(words, capsys, tmp_path):
    """It would train; the error names the command that follows it."""
    Path("train.py").write_text("class Net: ...\nopen('trained', 'w').close()\n")
    assert run_here("run", *words) == 2
    program = words[0] if words[0] == "bash" else "python"
    assert f"hookline run -- {program} train.py" in capsys.readouterr().err
    assert not (tmp_path / "trained").exists()


def test_a_file_does_not_get_the_arguments_of_the_command(monkeypatch, capsys):
    """A model's file may read the arguments of its own program, when it is imported and when it makes the model."""
    Path("model.py").write_text(
        "import sys\nfrom torch import nn\nassert len(sys.argv) == 1, sys.argv\n"
        "def make():\n    assert len(sys.argv) == 1, sys.argv\n    return nn.Linear(2, 2)\n"
    )
    monkeypatch.setattr("sys.argv", words := ["hookline", "doctor", "model.py:make", "--json"])
    assert run_here(*words[1:]) == 0
    assert sys.argv is words


def test_an_error_in_the_users_file_is_shown_with_its_place(capsys, tmp_path):
    """Exit code 1, with the place; run.json says that it failed."""
    assert run_here("run", f"{EXPERIMENTS}:Broken", "--silent") == 1
    heard = capsys.readouterr().err
    assert "ZeroDivisionError: the user's own mistake" in heard
    assert 'experiments.py", line' in heard
    facts = facts_of(tmp_path / "runs" / "broken" / "forward")
    assert (facts["status"], facts["error"]) == ("failed", "ZeroDivisionError: the user's own mistake")


def test_an_error_of_hooklines_own_while_training_is_a_failed_run(capsys, tmp_path):
    """Exit code 1, though it is one sentence: the command was right, the run was not."""
    assert run_here("run", f"{EXPERIMENTS}:NoBatches", "--silent") == 1
    heard = capsys.readouterr().err
    assert "hookline: The loader gave no batch in epoch 0" in heard
    assert "Traceback" not in heard
    assert facts_of(tmp_path / "runs" / "no_batches" / "forward")["status"] == "failed"


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    """``hookline hooks | head -1``."""
    code = f"{sys.executable} -m hookline hooks | head -1"
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_the_module_and_its_exit_code(tmp_path):
    """``python -m hookline`` leaves with the code."""
    assert hookline("run", "nothing", cwd=tmp_path).returncode == 2
