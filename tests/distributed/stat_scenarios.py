"""Statistics of all ranks for every way to spread a model, beside those of one process on the whole batch."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers_nets import (
    STAGES,
    STATS,
    Stage,
    column_and_row,
    fsdp,
    mesh_of,
    sequence,
    small_net,
    train_pipeline,
    train_steps,
    whole_batch,
)
from helpers_ranks import run_cases
from rank_scenarios import refused
from torch import nn
from torch.distributed.tensor import distribute_tensor

import hookline as hl


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def watched(model: nn.Module, part: int, parts: int, **options: Any) -> dict[str, Any]:
    """Train, and return the statistics of all ranks."""
    optimizer = sgd(model)
    watch = hl.watch(model, optimizer=optimizer, stats=STATS, **options)
    train_steps(model, optimizer, part, parts)
    found = watch.to_metrics()
    report = watch.report()
    watch.remove()
    return {"metrics": found, "silent": report["silent"]}


def one_process() -> Any:
    """The reference: the whole batch, no ranks."""
    model = small_net()
    optimizer = sgd(model)
    watch = hl.watch(model, optimizer=optimizer, stats=[*STATS, "dead_fraction"])
    train_steps(model, optimizer)
    return {"metrics": watch.to_metrics(local=True), "silent": {}}


def ddp() -> Any:
    model = nn.parallel.DistributedDataParallel(small_net())
    return watched(model, dist.get_rank(), 4)


def fsdp_one_dimension() -> Any:
    return watched(fsdp(small_net(), mesh_of(4)), dist.get_rank(), 4)


def fsdp_two_dimensions() -> Any:
    return watched(fsdp(small_net(), mesh_of(2, 2, names=("replicate", "shard"))), dist.get_rank(), 4)


def tensor_parallel() -> Any:
    return watched(column_and_row(small_net(), mesh_of(4)), 0, 1)


def sequence_parallel() -> Any:
    return watched(sequence(small_net(), mesh_of(4)), 0, 1)


def fsdp_and_tensor_parallel() -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = fsdp(column_and_row(small_net(), mesh["tp"]), mesh["dp"])
    return watched(model, mesh["dp"].get_local_rank(), 2)


def fsdp_and_sequence_parallel() -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = fsdp(sequence(small_net(), mesh["tp"]), mesh["dp"])
    return watched(model, mesh["dp"].get_local_rank(), 2)


def pipeline() -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Stage(small_net(), STAGES[dist.get_rank() // 2])
    optimizer = sgd(model)
    watch = hl.watch(model, optimizer=optimizer, stats=STATS)
    train_pipeline(model, optimizer, groups)
    return {"metrics": watch.to_metrics(), "silent": watch.report()["silent"]}


def zeros_at_first() -> Any:
    """A column-parallel layer whose first output is zero on all ranks, as that of an adapter is; then it is not."""
    model = small_net()
    weight, bias = model.up.weight.detach().clone(), model.up.bias.detach().clone()
    expected = nn.functional.linear(model.norm(model.relu(model.embed(whole_batch(0)))), weight, bias).norm()
    torch.nn.init.zeros_(model.up.weight)
    torch.nn.init.zeros_(model.up.bias)
    mesh = mesh_of(4)
    column_and_row(model, mesh)
    watch = hl.watch(model, "up", on="forward", stats=["norm"])
    model(whole_batch(0))
    zero = watch.to_metrics(reset=True)
    with torch.no_grad():
        model.up.weight.copy_(distribute_tensor(weight, mesh, model.up.weight.placements))
        model.up.bias.copy_(distribute_tensor(bias, mesh, model.up.bias.placements))
    model(whole_batch(0))
    return zero, watch.to_metrics(), float(expected.detach())


def own_values() -> Any:
    """A number of the user's own, on two ranks of four."""
    watch = hl.watch(small_net(), "head", on="forward", stats=["mean", "max"])
    if dist.get_rank() % 2:
        watch.update("loss", torch.tensor([1.0, 2.0 + dist.get_rank()]))
    return watch.to_metrics()


def declared() -> Any:
    """The user says that what ranks hold is the same although it is not, and the other way round."""
    options = {"replicated": "up", "sharded": "head"}
    return watched(column_and_row(small_net(), mesh_of(4)), 0, 1, **options)


def dead_units() -> Any:
    """A unit is dead if it was zero on all ranks; each rank shows one unit of eight."""
    model = nn.Sequential(nn.ReLU())
    watch = hl.watch(model, "0", on="forward", stats=["dead_fraction"])
    model(torch.nn.functional.one_hot(torch.tensor([dist.get_rank()]), 8).double())
    return watch.to_metrics(), watch.to_metrics(local=True)


def flushes() -> Any:
    """How often ranks meet for a flush, for printing and for the report."""
    model = nn.parallel.DistributedDataParallel(small_net())
    watch = hl.watch(model, on="forward")
    model(whole_batch(0))
    made: list[int] = []
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        for call in (watch.to_metrics, lambda: str(watch), watch.report, lambda: watch.to_metrics(local=True)):
            call()
            made.append(gather.call_count)
    return made, str(watch).splitlines()[-1]


def nothing_yet() -> Any:
    watch = hl.watch(small_net(), on="forward")
    return watch.to_metrics()


def other_stats() -> Any:
    watch = hl.watch(small_net(), stats=["mean"] if dist.get_rank() else ["max"])
    return refused(watch.to_metrics)


def other_target() -> Any:
    watch = hl.watch(small_net(), "up" if dist.get_rank() == 3 else "*")
    return refused(watch.to_metrics)


def without_a_module() -> Any:
    model = small_net()
    if dist.get_rank() == 3:
        del model.down
    watch = hl.watch(model, on=["forward", "param"])
    return refused(watch.to_metrics)


def partial_outputs() -> Any:
    """A DTensor whose ranks hold summands is not counted; the report says what to do."""
    from torch.distributed.tensor import DTensor, Partial

    class Summands(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, mesh, [Partial()])

    mesh = mesh_of(4)
    model = nn.Sequential(Summands())
    watch = hl.watch(model, "0", on="forward", during={"train", "eval"})
    model(torch.ones(2, 2))
    return watch.to_metrics(), watch.report()["silent"]


CASES = [
    *(one_process, ddp, fsdp_one_dimension, fsdp_two_dimensions, tensor_parallel, sequence_parallel),
    *(
        fsdp_and_tensor_parallel,
        fsdp_and_sequence_parallel,
        pipeline,
        declared,
        zeros_at_first,
        own_values,
        dead_units,
        flushes,
    ),
    *(nothing_yet, other_stats, other_target, without_a_module, partial_outputs),
]


def all_statistics() -> dict[str, Any]:
    """Every case above, on four ranks."""
    warnings.simplefilter("ignore")
    return run_cases(CASES)
