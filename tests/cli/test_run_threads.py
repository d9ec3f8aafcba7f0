"""Threads of torch: one for a small model, unless the user says otherwise; written down, and kept by --resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_cli import TINY, facts_of, run_here

from hookline.runs.find import choose_threads

SAID = "1 thread: a model of 44 parameters is faster so; set OMP_NUM_THREADS or --threads N to change\n"


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    """torch's own number, as on a machine of three cores; nothing in the environment."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "environment", "recorded", "parameters", "number", "words"),
    [
        (None, None, None, 12_345, 1, "1 thread: a model of 12k parameters is faster so; set OMP_NUM_THREADS or"),
        (None, None, None, 5_000_000, 3, ""),
        (2, None, None, 12_345, 2, ""),
        (2, "3", None, 12_345, 2, ""),
        (None, "3", None, 12_345, 3, ""),
        (None, None, 2, 12_345, 2, "2 threads, as before; set OMP_NUM_THREADS or --threads N to change"),
        (None, None, 1, 5_000_000, 1, "1 thread, as before"),
        (None, None, 3, 12_345, 3, ""),
        (None, "3", 1, 12_345, 3, "3 threads, and 1 before: results may differ in their last bits."),
        (1, None, 2, 12_345, 1, "1 thread, and 2 before: results may differ in their last bits."),
    ],
)
def test_what_counts(asked, environment, recorded, parameters, number, words, monkeypatch):
    """The flag, the environment, the run that is resumed, the size of the model, torch; in this order."""
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    found, said = choose_threads(asked, parameters, on_cpu=True, recorded=recorded)
    assert (found, torch.get_num_threads()) == (number, number)
    assert said.startswith(words)
    assert bool(said) is bool(words)


def test_a_model_on_a_gpu_leaves_the_threads_alone():
    """They feed it."""
    assert choose_threads(None, 10, on_cpu=False) == (3, "")


def test_a_run_takes_one_thread_says_so_and_a_resumed_one_keeps_it(capsys):
    """Until a flag says otherwise, which is told; and the process has its own number again."""
    seen = []
    run = ("run", TINY, "--silent", "--no-report", "--epochs")
    assert run_here(*run, "1") == 0
    assert capsys.readouterr().out.startswith(SAID)
    folder = Path("runs/tiny/forward")
    seen.append(facts_of(folder)["threads"])
    assert run_here(*run, "2", "--resume") == 0
    assert capsys.readouterr().out.startswith("1 thread, as before; ")
    seen.append(facts_of(folder)["threads"])
    assert run_here(*run, "3", "--resume", "--threads", "2") == 0
    assert "2 threads, and 1 before: results may differ in their last bits.\n" in capsys.readouterr().out
    seen.append(facts_of(folder)["threads"])
    assert seen == [1, 1, 2]
    assert torch.get_num_threads() == 3


def test_a_run_file_may_say_how_many(capsys):
    """As every flag."""
    Path("run.yaml").write_text(f"experiment: {TINY}\nconfig: {{epochs: 1}}\nthreads: 2\n")
    assert run_here("run", "run.yaml", "--silent", "--no-report") == 0
    assert facts_of(Path("runs/tiny/forward"))["threads"] == 2
    assert "thread" not in capsys.readouterr().out
    Path("run.yaml").write_text(f"experiment: {TINY}\nthreads: 0\n")
    assert run_here("run", "run.yaml") == 2
    assert "line 2, at $.threads: expected greater than or equal to 1, got 0." in capsys.readouterr().err


def test_a_number_below_one_is_refused(capsys):
    """Before anything is written."""
    assert run_here("run", TINY, "--threads", "0") == 2
    told = capsys.readouterr().err
    assert "--threads" in told
    assert "equal to 1" in told
    assert not Path("runs").exists()
