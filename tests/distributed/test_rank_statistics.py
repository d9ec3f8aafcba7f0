"""Statistics of a watch over four ranks equal those of one process on the whole batch, however the model is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_ranks import run_ranks

SCENARIOS = Path(__file__).with_name("stat_scenarios.py")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of four ranks found in every case."""
    return run_ranks(f"{SCENARIOS}:all_statistics", ranks=4)


PARTS = {
    **{"ddp": 4, "fsdp_one_dimension": 4, "fsdp_two_dimensions": 4, "tensor_parallel": 1, "sequence_parallel": 1},
    **{"fsdp_and_tensor_parallel": 2, "fsdp_and_sequence_parallel": 2, "pipeline": 2},
}
"""Into how many parts the batch goes. The gradient of a mean over a part is so many times that over the whole."""
LINEAR = ("mean", "std", "norm", "rms", "min", "max", "absmax")


def without(metrics: dict[str, Any], places: list[str]) -> dict[str, Any]:
    """Return the metrics of other places than these, and without dead units."""
    return {
        name: value
        for name, value in metrics.items()
        if name.rpartition("/")[0] not in places and not name.endswith("dead_fraction")
    }


def scaled(metrics: dict[str, Any], parts: int) -> dict[str, Any]:
    """Return the reference, its activation gradients times ``parts``; of those, not what has no scale."""
    found = {}
    for name, value in metrics.items():
        is_gradient = "backward" in name.split("/")
        statistic = name.rpartition("/")[2]
        if is_gradient and parts > 1 and statistic in ("histogram", "over:1"):
            continue
        found[name] = value * parts if is_gradient and statistic in LINEAR else value
    return found


@pytest.mark.parametrize("case", PARTS)
def test_all_ranks_together_are_one_process_on_the_whole_batch(ranks, case):
    """Every statistic of every place, and whole counts exactly, on every rank."""
    reference = ranks[0]["one_process"]["metrics"]
    for found in ranks:
        silent = list(found[case]["silent"])
        expected = without(scaled(reference, PARTS[case]), silent)
        got = {name: found[case]["metrics"][name] for name in expected}
        counts = [name for name in expected if name.endswith("histogram")]
        assert counts
        assert {name: got.pop(name) for name in counts} == {name: expected.pop(name) for name in counts}
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert set(found[case]["metrics"]) == set(without(reference, silent))


def test_what_cannot_be_reduced_is_silent_with_a_reason(ranks):
    """Gradients that are Partial under sequence parallel alone, and the outputs of a model cut into stages."""
    found = {case: ranks[0][case]["silent"] for case in PARTS}
    partial = found.pop("sequence_parallel")
    assert set(partial) == {"norm.weight/param_grad", "norm.bias/param_grad"}
    assert all("Partial" in reason and "Redistribute" in reason for reason in partial.values())
    stages = found.pop("pipeline")
    assert set(stages) == {"forward", "backward"}
    assert all("stages of a pipeline" in reason for reason in stages.values())
    assert not any(found.values())
    assert ranks[0]["partial_outputs"][0] == {}
    assert "Partial" in ranks[0]["partial_outputs"][1]["0/forward"]


def test_replicas_and_shards_can_be_declared(ranks):
    """``replicated=`` counts the numbers of one rank of a group, ``sharded=`` those of all, whatever they are."""
    reference, found = ranks[0]["one_process"]["metrics"], ranks[0]["declared"]["metrics"]
    ratios = {name: sum(found[name].values()) / sum(reference[name].values()) for name in found if "histogram" in name}
    different = {name: ratio for name, ratio in ratios.items() if ratio != 1}
    assert set(different) == {f"{name}/{kind}/histogram" for name in ("up", "head") for kind in ("forward", "backward")}
    assert ratios["head/forward/histogram"] == 4
    assert ratios["up/forward/histogram"] == pytest.approx(0.25, rel=0.1)  # whole numbers in each bin


def test_what_is_zero_on_all_ranks_at_first_is_not_taken_for_replicas(ranks):
    """Zeros are equal whatever ranks hold; they are compared again when there are numbers."""
    for found in ranks:
        zero, later, expected = found["zeros_at_first"]
        assert zero == {"up/forward/norm": 0.0}
        assert later["up/forward/norm"] == pytest.approx(expected, rel=1e-9)


def test_a_unit_is_dead_if_it_was_zero_on_every_rank(ranks):
    """Marks of units are joined, not averaged."""
    for found in ranks:
        both, alone = found["dead_units"]
        assert both == {"0/forward/dead_fraction": 0.5}
        assert alone == {"0/forward/dead_fraction": 0.875}


def test_a_flush_is_one_gather_and_printing_is_none(ranks):
    """Whoever prints a watch on one rank alone waits for nobody."""
    for rank, found in enumerate(ranks):
        made, foot = found["flushes"]
        assert made == [1, 1, 1, 1]
        assert foot.startswith(f"only rank {rank} of 4")


def test_a_value_of_the_users_own_is_reduced_over_the_ranks_that_have_it(ranks):
    """``watch.update`` on two ranks of four; every rank receives it."""
    assert [found["own_values"] for found in ranks] == [{"loss/mean": 2.5, "loss/max": 5.0}] * 4


def test_before_the_first_forward_there_is_nothing(ranks):
    """No numbers, no error."""
    assert [found["nothing_yet"] for found in ranks] == [{}] * 4


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_stats", ["stats: rank 0: ('max',); ranks 1, 2, 3: ('mean',)", "(0,)"]),
        ("other_target", ["target: ranks 0, 1, 2: '*'; rank 3: 'up'", "(3,)"]),
        ("without_a_module", ["rank 3 has no 'down.bias/param', 'down.weight/param', 'down/forward'"]),
    ],
)
def test_watches_that_differ_are_refused_on_every_rank(ranks, case, words):
    """The same error everywhere; it names the rank and the difference."""
    for found in ranks:
        assert all(word in found[case] for word in words), found[case]
