"""Gradients before and after ranks reduce them, the same bits with and without observers, and who broke it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_ranks import run_ranks
from torch import nn

import hookline as hl

SCENARIOS = Path(__file__).with_name("gradient_scenarios.py")


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    return run_ranks(f"{SCENARIOS}:all_gradients")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_before_the_reduction_are_those_of_one_rank(both, how):
    """Before: this rank's own batch alone. After: the mean over ranks. All local ones: root mean square over ranks."""
    for found in both:
        norms = found[f"before_and_after_{how}"]
        assert len(norms) == 30
        assert [got for got, _ in norms.values()] == pytest.approx([want for _, want in norms.values()], rel=1e-12)
    first, second = (found[f"before_and_after_{how}"] for found in both)
    assert all(first[name] != second[name] for name in first if name.endswith("/local"))


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_micro_batches_count_each_and_recomputation_does_not(both, how):
    """Three steps of two micro-batches; the module ``up`` is computed twice by activation checkpointing."""
    for found in both:
        fired = found[f"accumulated_{how}"]
        assert {label: count for label, count in fired.items() if count != 6} == {
            f"{name}.{kind}/param_grad": 3 for name in ("up", "head") for kind in ("weight", "bias")
        }


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_watched_run_ends_with_the_same_bits(both, how):
    """Watch of every kind, read over ranks at every step, and alarm: 20 steps, dropout, AdamW; a meddler is noticed."""
    for found in both:
        assert found[f"same_bits_{how}"] == {"observers": True, "meddler": False}


@pytest.mark.parametrize(
    ("case", "place", "what"),
    [
        ("nan_forward_ddp", "up/forward", "NaN"),
        ("nan_forward_fsdp2", "down/forward", "NaN"),
        ("inf_backward_ddp", "norm/backward", "Inf"),
    ],
)
def test_the_first_trouble_names_step_micro_batch_rank_and_layer(both, case, place, what):
    """One rank has NaN in one micro-batch; from the next step on, every rank has."""
    for found in both:
        assert found[case]["first"] == (2, 1, 1, place, what, [2, 1, 1])
        assert found[case]["text"].startswith("step 2, rank 1, micro-batch 1, batch [2, 1, 1]: " + what)
    assert both[0][case]["own"] == [(3, 0)]
    assert both[1][case]["own"] == [(2, 1)]


def test_a_spike_is_found_on_its_rank(both):
    """The gradient of the whole output is the first that is a thousand times as large; forwards are as ever."""
    for rank, found in enumerate(both):
        troubles, text = found["spikes"]
        assert [trouble[:4] for trouble in troubles] == [(8, 0, "spike", "backward")]
        assert ("spike" in text) is (rank == 0)


# -- one process -----------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_without_ranks_local_gradients_are_the_gradients():
    """One backward a step: the two kinds are equal, and the hooks come off."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, on=["param_grad", "param_grad_local"], optimizer=optimizer) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).sum().backward()
            optimizer.step()
        found = watch.to_metrics()
    after = {name: value for name, value in found.items() if "/param_grad/" in name}
    before = {name.replace("_local/", "/"): value for name, value in found.items() if "_local/" in name}
    assert len(after) == 4 * 9
    assert before == after
    hl.assert_no_hooks(model, foreign=True)


def test_an_alarm_in_one_process_counts_steps_by_hand_and_comes_off():
    """NaN in the second step; the table has it, the metrics count it, resetting forgets it."""
    model = small()
    with hl.observe.alarm(model, on=["forward"]) as alarm:
        for step in range(3):
            alarm.note_batch(f"batch {step}")
            model(torch.full((2, 4), float("nan") if step == 1 else 1.0)).sum().backward()
            alarm.step()
        assert [(each.step, each.micro_batch, each.place, each.batch) for each in alarm.troubles] == [
            (1, 0, "0/forward", "batch 1")
        ]
        assert alarm.to_metrics() == {"alarm/NaN": 1.0, "alarm/Inf": 0.0, "alarm/spike": 0.0}
        assert "0/forward" in str(alarm)
        assert alarm.gather() == alarm.troubles
        alarm.reset()
        assert "no trouble in 3 steps" in str(alarm)
    hl.assert_no_hooks(model, foreign=True)


def test_evaluations_between_steps_are_no_micro_batches():
    """A forward that does not count begins no micro-batch."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.observe.alarm(model, optimizer=optimizer) as alarm:
        for part in range(3):
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
            model(torch.full((2, 4), float("inf") if part == 2 else 1.0)).sum().backward()
        optimizer.step()
        assert {(each.step, each.micro_batch) for each in alarm.troubles} == {(0, 2)}


def test_where_parts_of_the_model_are_called_their_calls_are_micro_batches():
    """As Lightning calls ``training_step``: the model's own forward is not called."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.observe.alarm(model, optimizer=optimizer) as alarm:
        for step in range(2):
            for part in range(3):
                alarm.note_batch(f"{step}.{part}")
                is_bad = (step, part) in [(0, 0), (0, 1), (1, 2)]
                model[2](model[1](model[0](torch.full((2, 4), float("nan") if is_bad else 1.0)))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                nn.init.ones_(parameter)
    assert [(each.step, each.micro_batch, each.place, each.batch) for each in alarm.troubles] == [
        (0, 0, "0/forward", "0.0"),
        (0, 1, "0/forward", "0.1"),
        (1, 2, "0/forward", "1.2"),
    ]
    hl.assert_no_hooks(model, foreign=True)


def test_norms_that_stay_high_are_one_spike_and_then_the_usual_ones():
    """A new level from step 6 on; a spike of ten times the new level; back to the old level, and a spike of that."""
    model = small()
    sizes = [1.0] * 6 + [100.0] * 12 + [1e4] + [100.0] * 3 + [1.0] * 60 + [100.0]
    with hl.observe.alarm(model, on="forward", spike=10) as alarm:
        for size in sizes:
            model(torch.full((2, 4), size)).sum().backward()
            alarm.step()
    assert [(each.step, each.what) for each in alarm.troubles] == [(6, "spike"), (18, "spike"), (82, "spike")]
