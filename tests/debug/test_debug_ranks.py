"""Traces of real ranks (DDP, FSDP2, tensor parallelism) beside one process; a bad step on one of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from debug_rank_scenarios import DIMS, all_traced, data, fsdp_over_tp, made, train
from helpers_ranks import run_ranks

import hookline as hl
from hookline.debug import read_flight

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder with all traces, and what each of two ranks found; one launch for all."""
    folder = tmp_path_factory.mktemp("ranks")
    found = run_ranks(all_traced, str(folder), timeout=180)
    train(made(), data(), folder / "one")
    raised = [text for each in found for text in each.values() if isinstance(text, str)]
    assert not raised, raised[0]
    return folder, found


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_right_ranks_are_the_same_as_one_process(ranks: Any, name: str) -> None:
    """Parts of the batch, shards of parameters and gradients, and split layers are put together; all is compared."""
    folder, _ = ranks
    found = hl.compare(folder / "one", folder / name, dims=None if name == "tp" else DIMS)
    assert found.ok, found.summary
    assert found.only_a == found.unpaired == []
    assert {"output", "parameter", "param_grad"} == {value.kind for value in found.values}
    # Copies are compared by rank; under DDP the parameters are, and what is sharded is one value.
    assert {value.rank for value in found.values} == ({0, 1} if name == "ddp" or name == "tp" else {0})
    joined = [value for value in found.values if "put together from 2 ranks" in value.how]
    assert {value.site for value in joined} >= {"ddp": {"up", "head"}, "fsdp": {"up", "up.weight"}, "tp": {"up"}}[name]


def test_shards_of_what_tensor_parallelism_has_split_are_joined_in_the_order_they_were_cut(tmp_path: Path) -> None:
    """FSDP2 cuts the parts of ``up`` once more along the same dimension: a strided shard."""
    run_ranks(fsdp_over_tp, str(tmp_path / "four"), ranks=4, timeout=180)
    train(made(), data(), tmp_path / "one", kinds=("parameter", "param_grad"))
    laid = {each.site: each.placements for each in hl.debug.read_trace(tmp_path / "four").records}
    assert laid["up.weight"] is not None
    assert laid["up.weight"].placements == ("StridedShard(0, 2)", "Shard(0)")
    found = hl.compare(tmp_path / "one", tmp_path / "four")
    assert found.ok, found.summary
    assert found.only_a == found.unpaired == []
    assert {value.shape for value in found.values if value.site == "up.weight"} == {(16, 8)}


@pytest.mark.parametrize(("right", "wrong", "module", "rank"), [
    ("ddp", "other", "down", 1), ("fsdp", "shard", "head", 0), ("tp", "split", "down", 0),
])  # fmt: skip
def test_one_rank_with_other_weights_is_found(ranks: Any, right: str, wrong: str, module: str, rank: int) -> None:
    """Beside the right ranks and beside one process: the module alone, of copies with its rank, of shards the place."""
    folder, _ = ranks
    for reference in (right, "one"):
        found = hl.compare(folder / reference, folder / wrong, dims=None if right == "tp" else DIMS)
        assert [each.module for each in found.blamed] == [module], found.summary
        assert found.first is not None
        assert (found.first.site, found.first.kind, found.first.step) == (f"{module}.weight", "parameter", 0)
        assert found.first.rank == rank
    # Rank 1 has rows 2 and 3 of the head, and columns 8 to 15 of the other.
    assert found.first.where == {"other": "[2, 3]", "shard": "[2, 0]", "split": "[0, 8]"}[wrong]


def test_a_bad_step_of_one_rank_is_named_and_not_run_again(ranks: Any) -> None:
    """Rank 1 names its batch; rank 0 sees it one step later, in its weights. Nobody waits, and nothing is changed."""
    folder, (first, second) = ranks
    (step, verdict, batch, (why,)), count = second["bad_step"]
    assert (step, verdict, batch, count) == (1, "not run again", "ids [1]", 3)
    assert why.startswith("there are other ranks")
    (step, verdict, batch, _), count = first["bad_step"]
    assert (step, verdict, batch, count) == (2, "not run again", "ids [2]", 2)
    # The recorders of both have a file each, and the first bad step of each is in its own.
    reasons = [read_flight(folder / name).reason for name in ("flight.json", "flight.rank_1.json")]
    assert [reason.rpartition(" ")[2] for reason in reasons] == ["2", "1"]
    assert all(all(each["changes_nothing"]) for each in (first, second))
