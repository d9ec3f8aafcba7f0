"""A loop of several ranks that is followed: what it leaves open, and what is written when its process group is gone."""

from __future__ import annotations

from typing import Any

import pytest
from follow_rank_scenarios import follow_and_leave
from helpers_ranks import run_ranks


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(follow_and_leave)


def test_metrics_are_of_all_ranks_also_after_the_process_group_was_destroyed(both: list[dict[str, Any]]) -> None:
    """``destroy_process_group()`` comes before ``close()``, as at the end of most scripts."""
    metrics = both[0]["closed"]
    assert {step: metrics["one/of_each", "POST_STEP", step] for step in range(3)} == {0: 2.0, 1: 2.0, 2: 2.0}
    assert metrics["one/of_each", "POST_EPOCH", 0] == 2.0


def test_metrics_of_one_rank_alone_are_marked(both: list[dict[str, Any]]) -> None:
    """Rank 1 has left without closing: rank 0 writes its own, says which, and the record says so too."""
    metrics, (told, *more) = both[0]["alone"], both[0]["told"]
    assert metrics["one/of_each", "POST_STEP", 2] == 1.0
    assert "only of rank 0" in told
    assert "beginning with metrics of steps 0 to 2" in told
    assert "Next: call close() of the run on every rank, before destroy_process_group()" in told
    assert not more
    assert [name for name, _, _ in metrics if name == "run/error"]


def test_a_model_in_join_is_warned_of(both: list[dict[str, Any]]) -> None:
    """Ranks with different numbers of batches would wait for each other until the time-out."""
    for found in both:
        (told,) = found["joined"]
        assert "Next: give every rank as many batches" in told


def test_a_process_that_ends_in_the_middle_does_not_wait_for_ranks_that_train(both: list[dict[str, Any]]) -> None:
    """As ``sys.exit(1)`` on one rank: the others wait for it in a collective of DDP, so it has to go."""
    (told,) = both[1]["exited"]
    assert "only of rank 1" in told
    assert "rank 0 did not end" in told
