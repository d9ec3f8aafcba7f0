"""Ranks: who is who, numbers of all ranks as one, and errors that name ranks. Two real processes over gloo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers_ranks import run_ranks

from hookline.distributed import gather_objects, is_distributed, rank_count, this_rank
from hookline.distributed.reduce import check_rule
from hookline.errors import OptionError

SCENARIOS = Path(__file__).with_name("rank_scenarios.py")


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    return run_ranks(f"{SCENARIOS}:all_together")


def test_each_rank_knows_itself_and_receives_from_all(both):
    """Ranks, their number, and one object of each."""
    assert [found["who_is_who"] for found in both] == [(rank, 2, True, [0, 10]) for rank in range(2)]
    assert [found["afterwards"] for found in both] == [["well", "well"]] * 2


def test_sums_and_maxima_are_those_of_all_ranks(both):
    """Counts beyond 2**53 stay even numbers, NaN survives a maximum, replicas count once, absent names cost nothing."""
    first, second = (found["sums_and_maxima"] for found in both)
    assert repr(first) == repr(second)  # repr, since NaN is not equal to itself
    table = first[0]
    assert table["both"][0] == [3.0, 2.0**54 + 2]
    assert repr(table["both"][1]) == "[nan]"
    assert table["same"] == ([7.0], [-3.0], (0, 1), 1)
    assert table["second only"] == ([4.0], [float("-inf"), 2.0], (1,), 1)
    assert first[1]["late"] == ([11.0], [], (0,), 1)


def test_replicas_count_once(both):
    """Also where a sum is infinite, of which two would be the same and none would be NaN."""
    assert [found["replicas_with_infinity"] for found in both] == [[float("inf"), 3.0]] * 2


def test_metrics_are_reduced_by_their_rules(both):
    """Seven rules; a metric of one rank reaches all."""
    for found in both:
        assert found["by_rules"] == {
            **{"m": 1.5, "s": 7, "big": 1, "low": -1, "l": 5.0, "c": ["r0", "r1"], "n": 0, "one": 8.0},
            "v": [2.0, 1.0],
        }


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_words", ["rank 0: thing 0", "rank 1: thing 1", "(1,)"]),
        ("lists_of_two_lengths", ["'a' is a list of 1 and 2 values", "concat"]),
        ("other_options", ["stats: rank 0: ('mean',); rank 1: ('mean', 'max')", "same"]),
        ("other_sizes", ["'a' has not the same size", "2 + 0 numbers on rank 1"]),
    ],
)
def test_ranks_that_do_not_fit_together_all_hear_it(both, case, words):
    """Every rank raises the same error, which names the rank and the difference."""
    texts = [found[case] for found in both]
    assert texts[0] == texts[1]
    assert all(word in texts[0] for word in words), texts[0]
    assert "target" not in texts[0]


def test_a_rank_that_stays_away_is_named():
    """After the time-out the rank that came knows who did not; later calls do not wait again, its numbers are there."""
    (first, again, own), late = run_ranks(f"{SCENARIOS}:one_stays_away")
    assert "Rank 1 did not come within 2 s: rank 0 was at 'watch of Sequential'" in first
    assert "(1,)" in first
    assert "lost each other before" in again
    assert own > 0
    assert "watch of Sequential" in late


@pytest.fixture(scope="module")
def at_odds() -> list[Any]:
    """What each of two ranks found that do different things."""
    return run_ranks(f"{SCENARIOS}:crossed")


def test_ranks_that_reduce_different_things_end_with_an_error(at_odds):
    """Nobody waits for the time-out, and the ranks are still connected."""
    for text, afterwards, _ in at_odds:
        assert "rank 0: watch of the decoder; rank 1: watch of the encoder" in text
        assert afterwards == [2.0, 2.0, 2.0]


def test_a_hook_that_keeps_a_rank_is_named(at_odds):
    """A hook waits at a step on rank 1: rank 0 names the rank and the hooks that it may be in.

    Rank 1 learns what happened as soon as its hook returns.
    """
    first, second = (found[2] for found in at_odds)
    assert "Rank 1 did not come within 6 s: rank 0 was at 'metrics of steps'" in first
    assert re.search(r"hooks: .*\bblocks\b", first)
    assert "metrics of steps" in second


def test_without_ranks_everything_is_this_process(monkeypatch):
    """No process group: one rank, nothing gathered; before init_process_group the variables of torchrun count."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (this_rank(), rank_count(), is_distributed(), gather_objects(5, what="five")) == (0, 1, False, [5])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (this_rank(), rank_count(), is_distributed()) == (3, 8, False)


def test_an_unknown_rule_is_refused():
    """The error has the nearest rule."""
    with pytest.raises(OptionError, match="did you mean 'mean'"):
        check_rule("meen")
