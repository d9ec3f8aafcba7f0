"""Checkpoints of several ranks: resume with as many, bit for bit. Real gloo processes."""

from __future__ import annotations

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


def test_another_number_of_ranks_is_refused_with_the_number_to_take(killed):
    """One process cannot go on with what two have saved, and says so; nothing in the folder has changed."""
    before = sorted(path.name for path in (killed[0] / "whole").iterdir())
    ((ended, _),) = run_ranks(f"{SCENARIOS}:go_on", str(killed[0]), "whole", 4, ranks=1)
    assert ended.startswith("ResumeError")
    assert "was saved by 2 processes" in ended
    assert "Next: resume with 2 processes" in ended
    assert sorted(path.name for path in (killed[0] / "whole").iterdir()) == before
