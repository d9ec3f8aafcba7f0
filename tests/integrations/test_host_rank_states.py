"""Other trainers with several ranks: each rank goes on with its own hook state, and guarded steps average gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_ranks import run_ranks
from host_rank_scenarios import CountsByRank, save_and_resume
from torch import nn

import hookline as hl
from hookline.errors import HooklineWarning


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found in every case."""
    folder: Path = tmp_path_factory.mktemp("hosts")
    trainers = ("accelerate", "lightning", "transformers.trainer")
    found = run_ranks(save_and_resume, str(folder), ranks=2, initialize=False, imports=trainers)
    for one in found:
        assert not [text for text in one.values() if isinstance(text, str)], "\n".join(map(str, one.values()))
    return found


def test_the_trainer_goes_on_with_the_state_of_each_rank(both: list[dict[str, Any]]) -> None:
    """Four steps, and the last two again from the checkpoint in the middle: rank 1 counts on by hundreds."""
    straight, resumed = both[0]["transformers_trainer"]
    assert straight == {step: [step + 1, 100 * (step + 1)] for step in range(4)}
    assert resumed == straight  # the checkpoint has the metrics of its first steps too, which were not written yet


def test_accelerate_goes_on_with_the_state_of_each_rank(both: list[dict[str, Any]]) -> None:
    """``save_state`` on every rank; nothing is warned of."""
    for rank, found in enumerate(both):
        straight, resumed, told = found["accelerate_loop"]
        assert told == []
        if rank == 0:
            assert straight == {step: [step + 1, 100 * (step + 1)] for step in range(4)}
            assert resumed == straight


def test_accelerate_on_rank_0_alone_waits_for_nobody_and_says_what_is_missing(both: list[dict[str, Any]]) -> None:
    """Many loops call ``save_state`` on the main process only; rank 1 then goes on from what there is, and says so."""
    (_, resumed, told), (_, _, told_second) = (found["accelerate_on_rank_0"] for found in both)
    assert {step: resumed[step] for step in (2, 3)} == {2: [3, 102], 3: [4, 202]}
    assert told == []
    assert len(told_second) == 1
    assert "is only of rank 0, and rank 1 continues with it" in told_second[0]


def test_lightning_goes_on_with_the_state_of_each_rank(both: list[dict[str, Any]]) -> None:
    """Two steps an epoch; the checkpoint is written at the end of the first."""
    straight, resumed = both[0]["lightning_trainer"]
    assert straight == {0: [1, 100], 1: [2, 200]}
    assert resumed == {**straight, 2: [3, 300], 3: [4, 400]}


def test_a_followed_loop_goes_on_with_the_state_of_each_rank(both: list[dict[str, Any]]) -> None:
    """One dictionary of all ranks, or one of each rank; the dictionary of rank 0 alone is loaded with a warning."""
    first, second = (found["followed_loop"] for found in both)
    assert first["of all"] == first["of this rank"] == (3, [])
    assert second["of all"] == second["of this rank"] == (300, [])
    assert first["of rank 0"] == (3, [])
    count, told = second["of rank 0"]
    assert count == 102
    assert "state_dict(all_ranks=True)" in told[0]


def test_an_intervention_that_trains_averages_gradients_over_ranks(both: list[dict[str, Any]]) -> None:
    """Each rank has other rows; after a guarded epoch all have the weights of the others, and hooks see the model."""
    found = both[0]["guarded_epochs"]
    assert set(found) == {"_accelerate_trains", "_followed_trains"}
    for seen, [(first, second)] in found.values():
        assert seen == "Linear"
        assert first == second


def test_another_number_of_ranks_goes_on_with_rank_0_and_is_told(both: list[dict[str, Any]]) -> None:
    """Two ranks have saved, one process goes on."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = CountsByRank()
    with hl.follow(model, optimizer, [hook], sinks=[]) as run:
        with pytest.warns(HooklineWarning, match="saved by 2 ranks, and the run continues with 1"):
            run.load_state_dict(both[0]["followed_loop"]["every"])
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert (run.step, hook.count) == (2, 3)
