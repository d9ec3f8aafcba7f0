"""Runs of two ranks: data, reductions, inertness, errors on one rank, a rank that is killed. Real gloo processes."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from helpers_ranks import run_ranks

from hookline.errors import OptionError
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.ranks import checked_reduce, reduce_series, rule_finder
from hookline.lifecycle.registry import HookRegistry
from hookline.records.sink import StepSeries
from hookline.training.ranks import share_loader

SCENARIOS = Path(__file__).with_name("rank_run_scenarios.py")


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    return run_ranks(f"{SCENARIOS}:all_together")


@pytest.mark.parametrize("kind", ["shuffled", "in order", "list"])
def test_ranks_get_parts_of_one_length_that_make_the_whole(both, kind):
    """Every sample goes to a rank; another order in another epoch only where the loader shuffles."""
    first, second = (found["parts_of_data"][kind] for found in both)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other)
        assert set(one) | set(other) == set(range(5 if kind == "list" else 10))
    assert (first[0] != first[1]) is (kind == "shuffled")
    assert all(found["parts_of_data"][f"{kind} again"] for found in both)


def test_data_that_can_only_be_iterated_are_refused_with_what_to_do(both):
    """An IterableDataset cannot be shared out; a list can."""
    assert all("shares_data = True" in found["unshareable"] for found in both)
    assert share_loader([1, 2, 3], rank=1, ranks=2, seed=0) == [2, 1]


def test_records_are_of_all_ranks_and_go_to_the_sinks_of_rank_zero(both):
    """Every rule, for a moment and for steps; what only rank 1 has arrives too."""
    first, second = (found["reductions"] for found in both)
    epoch = first["epoch"]
    expected = {
        **{"count": 7, "a/max": 1.0, "low": 6, "root": 5.0, "all": ["r0", "r1"], "own": 0, "plain": 1.5},
        **{"text": "r0", "by": {0: 0.5, 1: 2.0}, "second": 5},
    }
    assert {name: epoch[f"local/{name}"] for name in expected} == expected
    for name, value in expected.items():
        values, steps = first["steps"][f"local/{name}"]
        assert (values, steps) == ([value] * 12, list(range(12, 24)))
    assert type(first["steps"]["local/count"][0][0]) is int
    assert second["records"] == []
    assert first["names"] == second["names"]


def test_loss_and_evaluation_are_of_all_ranks(both):
    """The result is the same on both, and the evaluation saw the model without its wrapper."""
    first, second = (found["reductions"] for found in both)
    assert first["result"] == second["result"]
    assert first["result"][2]["val_acc"] == 0.5
    assert first["epoch"]["eval/val_acc"] == 0.5
    assert set(first["seen"] + second["seen"]) == {"Net"}
    assert first["parameters"][0] == "body.0.weight"
    assert first["synced"] == second["synced"]


def test_a_rank_that_has_enough_stops_all(both):
    """Both stop after the same step."""
    assert [found["stops_together"] for found in both] == [(5, True)] * 2


def test_observers_change_no_bit_of_a_run_of_two_ranks(both):
    """Dropout, BatchNorm, AdamW, 24 steps; a hook that draws from the run's stream is found out."""
    assert [found["inert"] for found in both] == [{"with": True, "careless": False}] * 2


def test_an_experiment_that_trains_past_the_wrapper_is_refused_after_one_step(both):
    """Its gradients would not be averaged, and nobody would notice."""
    for found in both:
        assert found["trains_another_name"].startswith("RankError: After the first step rank 1 had other weights")


def test_a_hook_that_raises_on_one_rank_ends_the_run_on_all(both):
    """At the same step, with the rank named, the other hooks' records written, and a word in the log."""
    first, second = (found["raises_everywhere"]["POST_EPOCH raise"] for found in both)
    assert first["ended"].startswith("RankError: Hook 'broken' raised ValueError: the second rank has a bad day at")
    assert first["ended"].endswith("on rank 1.")
    assert second["ended"] == "ValueError: the second rank has a bad day"
    assert first["step"] == second["step"] < 20
    assert first["kept"]
    assert [found["run/error"] for _, _, found in first["log"]] == [first["ended"]]


@pytest.mark.parametrize("point", ["POST_STEP", "POST_EPOCH", "start"])
@pytest.mark.parametrize("policy", ["warn", "disable"])
def test_the_policy_holds_on_all_ranks(both, point, policy):
    """The run goes on to its end; under disable the hook is off everywhere; both ranks are told which rank it was."""
    found = [one["raises_everywhere"][f"{point} {policy}"] for one in both]
    assert [one["ended"] for one in found] == ["went on"] * 2
    assert [one["off"] for one in found] == [policy == "disable"] * 2
    assert all(any("on rank 1" in text for text in one["warned"]) for one in found)


def test_other_hooks_on_one_rank_are_an_error_on_every_rank(both):
    """At the start, with the difference."""
    assert both[0]["other_hooks"] == both[1]["other_hooks"]
    assert "rank 0 has local; rank 1 has local, broken" in both[0]["other_hooks"]


@pytest.mark.parametrize(("scenario", "error"), [("raises_in_the_data", "OSError"), ("raises_at_a_step", "ValueError")])
def test_an_error_while_ranks_train_ends_its_rank_and_the_other_loses_it(scenario, error):
    """A loader, or a hook at a step, raises on rank 1: rank 0 says that it has lost it."""
    first, second = run_ranks(f"{SCENARIOS}:{scenario}", may_fail=[1])
    assert "lost another rank" in first
    assert second is None or second.startswith(error)


# -- rules, without processes --------------------------------------------------------------------------------


def test_rules_are_found_by_pattern_and_prefix():
    """The first pattern that matches; mean for all else."""

    class Counting(TrainingHook):
        reduce = {"count": "sum", "*/max": "max"}

    rules = rule_finder({"a": Counting(), "a/b": TrainingHook()})
    names = ["a/count", "a/x/max", "a/other", "a/b/count", "train/loss"]
    assert [rules(name) for name in names] == ["sum", "max", "mean", "mean", "mean"]


@pytest.mark.parametrize(("given", "said"), [("men", "did you mean 'mean'"), ({"*": "avg"}, "avg"), (3, "mine")])
def test_a_wrong_declaration_is_refused(given, said):
    with pytest.raises(OptionError, match=said):
        checked_reduce("mine", given)


@pytest.mark.parametrize("name", HookRegistry.known())
def test_what_a_built_in_hook_declares_fits_its_metrics(name):
    """Every pattern matches a metric that the hook describes; maxima, minima and counts of data are not averaged."""
    (hook,) = HookRegistry.create([name])
    declared = checked_reduce(name, hook.reduce)
    metrics = [metric.name for metric in hook.describe_metrics()]
    for pattern in () if isinstance(declared, str) else declared:
        assert any(fnmatchcase(metric, pattern) for metric in metrics), pattern
    averaged = [metric for metric in metrics if rule_finder({name: hook})(f"{name}/{metric}") == "mean"]
    assert not [metric for metric in averaged if metric.rpartition("/")[2] in ("max", "largest", "smallest", "absmax")]


# -- the command line ----------------------------------------------------------------------------------------


def test_hookline_run_on_two_ranks_writes_one_log_and_one_page(tmp_path):
    """The embedded experiment, with the variables of torchrun: rank 0 prints and writes, and nothing is written twice.

    Those that torchrun itself sets are used in tests/cli/test_run_script.py.
    """
    options = ["--with-hooks", "minimal", "--epochs", "2", "--output-dir", str(tmp_path), "--console", "tables"]
    found = run_ranks(f"{SCENARIOS}:command_line", "run", "mod_arithmetic", *options, initialize=False)
    assert [code for code, _ in found] == [0, 0]
    assert [printed.count("mod_arithmetic/random finished: 10 steps") for _, printed in found] == [1, 0]
    folder = tmp_path / "mod_arithmetic" / "random"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert {"records.jsonl", "run.json", "report.html"} <= files
    assert not [name for name in files if "rank1" in name]
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "finished"
    assert facts["ranks"] == 2


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("sum", [11, 2, 33]), ("mean", [5.5, 2, 16.5]), ("max", [10, 2, 30]), ("min", [1, 2, 3]),
        ("l2", [101**0.5, 2, 909**0.5]), ("concat", [[1, 10], [2], [3, 30]]), ("none", [1, 2, 3]),
    ],
)  # fmt: skip
def test_a_step_that_a_rank_lacks_is_of_the_others_and_the_rest_of_all(rule, expected):
    """And a metric that is recorded several times in a step stays so."""
    parts = [StepSeries([1, 2, 3], [4, 5, 6]), StepSeries([10, 30], [4, 6])]
    found = reduce_series("a", rule, parts)
    assert found.steps == [4, 5, 6]
    assert list(found) == (expected if rule == "concat" else pytest.approx(expected))
    twice = StepSeries([1.0, 2.0], [4, 4])
    assert list(reduce_series("a", "sum", [twice, twice])) == [2.0, 4.0]
    assert reduce_series("a", "sum", [twice, twice, parts[0]]).steps == [4, 4, 5, 6]
