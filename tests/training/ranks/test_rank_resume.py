"""Checkpoints of several ranks: resume with as many, bit for bit, and with another number. Real gloo processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers_ranks import run_ranks

SCENARIOS = Path(__file__).with_name("rank_resume_scenarios.py")
STEPS = 36


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    return run_ranks(f"{SCENARIOS}:all_resumed", str(tmp_path_factory.mktemp("resumed")))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a whole run, and one whose second rank was killed; and what rank 0 found."""
    folder = tmp_path_factory.mktemp("killed")
    first, _ = run_ranks(f"{SCENARIOS}:begin_and_die", str(folder), may_fail=[1])
    return folder, first


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_resumed_run_ends_with_the_same_bits(both, kind):
    """Weights, buffers, optimizer, hooks and records, from the middle of an epoch; another seed is told apart."""
    for found in both:
        case = found["run_goes_on"]
        assert case[kind].pop("ended") == "RuntimeError: stopped here"
        assert case[kind] == {"weights": True, "steps": (STEPS, STEPS), "hooks": True, "records": True}
        assert case[f"{kind} files"] == ["step_00000032.ranks", "step_00000036.ranks"]
        assert case["other"] is False


def test_a_signal_to_one_rank_stops_all_at_one_step_and_they_go_on(both):
    """SIGTERM to rank 1: both save after the same step, and end as the run that was not stopped."""
    first, second = (found["run_signalled"] for found in both)
    assert first["stopped"] == second["stopped"] < STEPS
    assert (first["weights"], second["weights"], first["records"]) == (True, True, True)


def test_what_one_rank_cannot_save_is_told_on_all(both):
    """The run goes on, with one warning on each rank."""
    for found in both:
        assert found["run_unwritable"]["steps"] == 12
        (warned,) = found["run_unwritable"]["warned"]
        assert "could not be saved" in warned


def test_a_run_whose_rank_was_killed_is_resumed_to_the_same_bits(killed):
    """kill -9 of rank 1 in the middle of an epoch."""
    folder, (whole, ended) = killed
    assert ended.startswith("RankError: The ranks have lost each other; rank 1 left no word")
    first, second = run_ranks(f"{SCENARIOS}:go_on", str(folder), "killed")
    assert first[0]["weights"] == whole["weights"]
    assert repr(first[0]["records"][-2:]) == repr(whole["records"][-2:])
    assert second[0]["steps"] == STEPS


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_and_says_what_is_lost(killed, ranks, tmp_path):
    """Model, optimizer and the common state of hooks carry over; one sentence says what does not."""
    folder, _ = killed
    shutil.copytree(folder / "whole", tmp_path / "copy")
    found = run_ranks(f"{SCENARIOS}:go_on", str(tmp_path), "copy", 4, ranks=ranks)
    (result, warned) = found[0]
    parameters = [
        {name: one[0]["weights"][name] for name in one[0]["weights"] if "running" not in name} for one in found
    ]
    assert all(one == parameters[0] for one in parameters)
    assert result["steps"] > STEPS
    (lost,) = [text for text in warned if "carry over" in text]
    assert f"saved by 2 processes and goes on with {ranks} process" in lost
    assert "random streams" in lost
    assert "the state of draws" in lost


def test_several_ranks_go_on_from_a_checkpoint_of_one_process(tmp_path):
    """The file of one process is read by every rank."""
    run_ranks(f"{SCENARIOS}:begin_alone", str(tmp_path), ranks=1)
    found = run_ranks(f"{SCENARIOS}:go_on", str(tmp_path), "alone", 2)
    assert [one[0]["steps"] for one in found] == [36, 36]
    assert any("saved by 1 process and goes on with 2 processes" in text for text in found[0][1])
