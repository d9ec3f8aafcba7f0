"""Statistics of a watch over four ranks equal those of one process on the whole batch, however the model is spread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers_nets import (
    STAGES,
    STATS,
    Stage,
    column_and_row,
    fsdp,
    mesh_of,
    refused,
    sequence,
    small_net,
    train_pipeline,
    train_steps,
    whole_batch,
)
from helpers_ranks import RankTests
from torch import nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import hookline as hl

on_ranks = RankTests(__file__, ranks=4)
Found = tuple[dict[str, Any], dict[str, str]]
"""Metrics, and what is silent, with the reason."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def watched(model: nn.Module, part: int, parts: int, **options: Any) -> Found:
    """Train, and return the statistics of all ranks."""
    optimizer = sgd(model)
    with hl.watch(model, optimizer=optimizer, stats=STATS, **options) as watch:
        train_steps(model, optimizer, part, parts)
        return watch.to_metrics(), watch.report()["silent"]


@functools.cache
def one_process() -> dict[str, Any]:
    """The reference: the whole batch, no ranks."""
    model = small_net()
    optimizer = sgd(model)
    with hl.watch(model, optimizer=optimizer, stats=[*STATS, "dead_fraction"]) as watch:
        train_steps(model, optimizer)
        return watch.to_metrics(local=True)


def ddp() -> Found:
    model = nn.parallel.DistributedDataParallel(small_net())
    return watched(model, dist.get_rank(), 4)


def fsdp_one_dimension() -> Found:
    return watched(fsdp(small_net(), mesh_of(4)), dist.get_rank(), 4)


def fsdp_two_dimensions() -> Found:
    return watched(fsdp(small_net(), mesh_of(2, 2, names=("replicate", "shard"))), dist.get_rank(), 4)


def tensor_parallel() -> Found:
    return watched(column_and_row(small_net(), mesh_of(4)), 0, 1)


def sequence_parallel() -> Found:
    return watched(sequence(small_net(), mesh_of(4)), 0, 1)


def fsdp_and_tensor_parallel() -> Found:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = fsdp(column_and_row(small_net(), mesh["tp"]), mesh["dp"])
    return watched(model, mesh["dp"].get_local_rank(), 2)


def fsdp_and_sequence_parallel() -> Found:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = fsdp(sequence(small_net(), mesh["tp"]), mesh["dp"])
    return watched(model, mesh["dp"].get_local_rank(), 2)


def pipeline() -> Found:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Stage(small_net(), STAGES[dist.get_rank() // 2])
    optimizer = sgd(model)
    with hl.watch(model, optimizer=optimizer, stats=STATS) as watch:
        train_pipeline(model, optimizer, groups)
        return watch.to_metrics(), watch.report()["silent"]


WAYS: dict[str, tuple[Callable[[], Found], int]] = {
    "ddp": (ddp, 4),
    "fsdp, one dimension": (fsdp_one_dimension, 4),
    "fsdp, two dimensions": (fsdp_two_dimensions, 4),
    "tensor parallel": (tensor_parallel, 1),
    "sequence parallel": (sequence_parallel, 1),
    "fsdp and tensor parallel": (fsdp_and_tensor_parallel, 2),
    "fsdp and sequence parallel": (fsdp_and_sequence_parallel, 2),
    "pipeline": (pipeline, 2),
}
"""Each with the number of parts that the batch goes into: the gradient of a mean over a part is so many times that over
the whole."""
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


@on_ranks.case(way=list(WAYS))
def test_all_ranks_together_are_one_process_on_the_whole_batch(way):
    """Every statistic of every place, and whole counts exactly, on every rank.

    What cannot be reduced is silent, with a reason: gradients that are Partial under sequence parallel alone, and the
    outputs of a model cut into stages.
    """
    spread, parts = WAYS[way]
    metrics, silent = spread()
    expected = without(scaled(one_process(), parts), list(silent))
    got = {name: metrics[name] for name in expected}
    counts = [name for name in expected if name.endswith("histogram")]
    assert counts
    assert {name: got.pop(name) for name in counts} == {name: expected.pop(name) for name in counts}
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert set(metrics) == set(without(one_process(), list(silent)))
    if way == "sequence parallel":
        assert set(silent) == {"norm.weight/param_grad", "norm.bias/param_grad"}
        assert all("Partial" in reason and "Redistribute" in reason for reason in silent.values())
    elif way == "pipeline":
        assert set(silent) == {"forward", "backward"}
        assert all("stages of a pipeline" in reason for reason in silent.values())
    else:
        assert not silent


@on_ranks.case
def test_a_tensor_whose_ranks_hold_summands_is_not_counted():
    """The report says why."""

    class Summands(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, mesh, [Partial()])

    mesh = mesh_of(4)
    model = nn.Sequential(Summands())
    watch = hl.watch(model, "0", on="forward", during={"train", "eval"})
    model(torch.ones(2, 2))
    assert watch.to_metrics() == {}
    assert "Partial" in watch.report()["silent"]["0/forward"]


@on_ranks.case
def test_replicas_can_be_declared():
    """``replicated=`` counts the numbers of one rank of a group, whatever they are."""
    reference = one_process()
    found, _ = watched(column_and_row(small_net(), mesh_of(4)), 0, 1, replicated="up")
    ratios = {name: sum(found[name].values()) / sum(reference[name].values()) for name in found if "histogram" in name}
    different = {name: ratio for name, ratio in ratios.items() if ratio != 1}
    assert set(different) == {f"{name}/{kind}/histogram" for name in ("up",) for kind in ("forward", "backward")}
    assert ratios["up/forward/histogram"] == pytest.approx(0.25, rel=0.1)  # whole numbers in each bin


@on_ranks.case
def test_what_is_zero_on_all_ranks_at_first_is_not_taken_for_replicas():
    """A column-parallel layer whose first output is zero everywhere, as an adapter's is: it is compared again later."""
    model = small_net()
    weight, bias = model.up.weight.detach().clone(), model.up.bias.detach().clone()
    expected = nn.functional.linear(model.norm(model.relu(model.embed(whole_batch(0)))), weight, bias).norm()
    torch.nn.init.zeros_(model.up.weight)
    torch.nn.init.zeros_(model.up.bias)
    mesh = mesh_of(4)
    column_and_row(model, mesh)
    watch = hl.watch(model, "up", on="forward", stats=["norm"])
    model(whole_batch(0))
    assert watch.to_metrics(reset=True) == {"up/forward/norm": 0.0}
    with torch.no_grad():
        model.up.weight.copy_(distribute_tensor(weight, mesh, model.up.weight.placements))
        model.up.bias.copy_(distribute_tensor(bias, mesh, model.up.bias.placements))
    model(whole_batch(0))
    assert watch.to_metrics()["up/forward/norm"] == pytest.approx(expected.item(), rel=1e-9)


@on_ranks.case
def test_a_unit_is_dead_if_it_was_zero_on_every_rank():
    """Marks of units are joined, not averaged; each rank shows one unit of eight."""
    model = nn.Sequential(nn.ReLU())
    watch = hl.watch(model, "0", on="forward", stats=["dead_fraction"])
    model(torch.nn.functional.one_hot(torch.tensor([dist.get_rank()]), 8).double())
    assert watch.to_metrics() == {"0/forward/dead_fraction": 0.5}
    assert watch.to_metrics(local=True) == {"0/forward/dead_fraction": 0.875}


@on_ranks.case
def test_a_flush_is_one_gather_and_printing_is_none():
    """Whoever prints a watch on one rank alone waits for nobody."""
    model = nn.parallel.DistributedDataParallel(small_net())
    watch = hl.watch(model, on="forward")
    model(whole_batch(0))
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        for call in (watch.to_metrics, lambda: str(watch), watch.report, lambda: watch.to_metrics(local=True)):
            call()
            assert gather.call_count == 1
    assert str(watch).splitlines()[-1].startswith(f"only rank {dist.get_rank()} of 4")


@on_ranks.case
def test_watches_of_other_statistics_are_refused_on_every_rank():
    """The same error everywhere; it names the ranks and the difference."""
    text = refused(hl.watch(small_net(), stats=["mean"] if dist.get_rank() else ["max"]).to_metrics)
    assert "rank 0: stats=('max',)" in text
    assert "ranks 1, 2, 3: stats=('mean',)" in text
    text = refused(hl.watch(small_net(), every=1 + (dist.get_rank() == 3)).to_metrics)
    assert "stride=2" in text
