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
    """From the middle of an epoch, and from the checkpoint before a damaged one; another seed is told apart."""
    for found in both:
        case = found["run_goes_on"]
        assert case[kind].pop("ended") == "RuntimeError: stopped here"
        assert case[kind] == {"weights": True, "steps": (STEPS, STEPS), "hooks": True, "records": True}
        assert case[f"{kind} files"] == ["step_00000032.ranks", "step_00000036.ranks"]
        assert case[f"{kind} damaged"] is True
        assert case["other"] is False


def test_a_signal_to_one_rank_stops_all_at_one_step_and_they_go_on(both):
    """SIGTERM to rank 1: both save after the same step, and end as the run that was not stopped."""
    first, second = (found["run_signalled"] for found in both)
    assert first["stopped"] == second["stopped"] < STEPS
    assert (first["weights"], second["weights"], first["records"]) == (True, True, True)


def test_what_one_rank_cannot_save_is_told_on_all(both):
    """The run goes on, with the same warnings on each rank, ever fewer."""
    for found in both:
        assert found["run_unwritable"]["steps"] == 12
        warned = found["run_unwritable"]["warned"]
        assert warned
        assert all("could not be saved" in text for text in warned)


def test_a_killed_rank_ends_the_others_and_the_log_is_whole(killed):
    """kill -9 in the middle of an epoch: rank 0 ends within the time-out, and has written all it had."""
    folder, (_, ended, lines, seconds) = killed
    assert ended.startswith("RankError: Rank 0 has lost another rank")
    assert seconds < 60
    steps = [step for line in lines for step in line.get("steps", {}).get("draws/total", [])]
    assert steps == list(range(18))
    assert any("lost another rank" in line["metrics"].get("run/error", "") for line in lines if "metrics" in line)
    assert not list(folder.glob("*rank1*"))


def test_a_run_whose_rank_was_killed_is_resumed_to_the_same_bits(killed):
    """The second rank is there again."""
    folder, (whole, *_) = killed
    first, second = run_ranks(f"{SCENARIOS}:go_on", str(folder), "killed")
    assert first[0]["weights"] == whole["weights"]
    assert repr(first[0]["records"][-2:]) == repr(whole["records"][-2:])
    assert second[0]["steps"] == STEPS


def _check_carried_over(found: Any, ranks: int) -> None:
    result, warned, *_ = found
    assert result["steps"] > STEPS
    (lost,) = [text for text in warned if "carry over" in text]
    assert f"saved by 2 processes and goes on with {ranks} process" in lost
    assert "random streams" in lost
    assert "the state of draws" in lost


@pytest.mark.variant
def test_more_ranks_go_on_and_say_what_is_lost(killed, tmp_path):
    """Model, optimizer and the common state of hooks carry over to three ranks; one sentence says what does not."""
    shutil.copytree(killed[0] / "whole", tmp_path / "copy")
    found = run_ranks(f"{SCENARIOS}:go_on", str(tmp_path), "copy", 4, ranks=3)
    _check_carried_over(found[0], 3)
    weights = [one[0]["weights"] for one in found]
    parameters = [{name: value for name, value in one.items() if "running" not in name} for one in weights]
    assert all(one == parameters[0] for one in parameters)


@pytest.fixture(scope="module")
def fewer_and_more(killed, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """What one process found that goes on with what two have saved, and two with what one has."""
    folder = tmp_path_factory.mktemp("other ranks")
    shutil.copytree(killed[0] / "whole", folder / "copy")
    shutil.copytree(killed[0] / "sharded by two", folder / "sharded by two")
    shutil.copy(killed[0] / "sharded by two.pt", folder)
    (alone,) = run_ranks(f"{SCENARIOS}:in_one_process", str(folder), ranks=1)
    return alone, run_ranks(f"{SCENARIOS}:go_on_as_two", str(folder))


def test_one_process_goes_on_with_what_two_have_saved_and_the_other_way_round(fewer_and_more):
    """A folder of two ranks is read by one process, and the file of one process by two ranks."""
    alone, found = fewer_and_more
    _check_carried_over(alone, 1)
    assert [one[0]["steps"] for one in found] == [36, 36]
    assert any("saved by 1 process and goes on with 2 processes" in text for text in found[0][1])


def test_a_sharded_model_goes_on_with_fewer_and_with_more_ranks(fewer_and_more):
    """FSDP2 from two ranks to one and from one to two: parameters and moments to the last bit, and training goes on."""
    alone, found = fewer_and_more
    for case, warning in [(alone[2], "by 2 processes and goes on with 1 process"), (found[0][2], "by 1 process and")]:
        assert case["differing"] == []
        assert case["tensors"] > 10
        assert case["steps"][0] < case["steps"][1]
        assert any(warning in text for text in case["warned"])
