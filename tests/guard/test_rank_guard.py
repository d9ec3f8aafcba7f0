"""Interventions of two ranks: they train, and leave no bit changed, under DDP and FSDP2. Real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_ranks import run_ranks

SCENARIOS = Path(__file__).with_name("rank_guard_scenarios.py")


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    return run_ranks(f"{SCENARIOS}:all_guarded")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_intervention_that_trains_is_undone_on_every_rank(both, kind):
    """Each rank saves and restores its shards; a change that nothing guards is found by the same comparison."""
    for rank, found in enumerate(both):
        case = found["undone"][kind]
        assert case == {
            "same": True, "control": False, "ended": "went on", "fired": 3, "records": 3 * (rank == 0), "touched": True
        }  # fmt: skip


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("policy", ["warn", "disable"])
def test_an_intervention_that_raises_on_one_rank_is_undone_on_all_and_the_run_goes_on(both, kind, policy):
    """Both ranks go on with the weights of a run without it; under disable it is off on both, else rank 0 is told."""
    for rank, found in enumerate(both):
        case = found["fails_on_one_rank"][f"{kind} {policy}"]
        told = policy == "warn" and rank == 0
        assert case == {"same": True, "ended": "went on", "off": policy == "disable", "told": told}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_intervention_that_raises_on_one_rank_ends_the_run_on_all(both, kind):
    """At the same step, with the rank named."""
    first, second = (found["fails_on_one_rank"][f"{kind} raise"] for found in both)
    assert "rank 1 failed with ValueError: after training" in first["ended"]
    assert second["ended"] == "ValueError: after training"
    assert first["step"] == second["step"]


def test_a_rank_that_raises_while_others_wait_for_it_ends_the_run_with_weights_restored():
    """Rank 0 waits in a backward pass: it loses rank 1, says so, and has its weights back."""
    found = run_ranks(f"{SCENARIOS}:fails_while_others_train", may_fail=[1], environment={"HOOKLINE_RANK_TIMEOUT": "5"})
    assert "lost another rank" in found[0]["ended"]
    assert found[0]["ended"].startswith("RankError")
    assert (found[0]["restored"], found[0]["trained"]) == (True, True)
    if found[1] is not None:
        assert found[1]["ended"] == "ValueError: before the others train"
        assert found[1]["restored"] is True
