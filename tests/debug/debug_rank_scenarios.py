"""What ranks do in the tests of `hookline.debug` with several ranks; called in processes by `helpers_ranks`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers_ranks import run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations

KINDS = ("output", "parameter", "param_grad")
DIMS = dict.fromkeys(("", "up", "act", "down", "head"), "b[dp] f")
"""Each rank has a part of the batch; parameters are copies, or say themselves how they lie."""


class Net(nn.Module):
    """A feed-forward part and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.act(self.up(x))))
        return out


def made() -> Net:
    """Return the model, the same everywhere."""
    torch.manual_seed(0)
    return Net()


def data() -> Tensor:
    """Return the batch of all ranks."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, batch: Tensor, to: Path, *, steps: int = 2, kinds: Any = KINDS, **options: Any) -> None:
    """Trace two steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.trace(model, to=to, kinds=kinds, tensors=True, step=optimizer, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def all_traced(folder: str) -> dict[str, Any]:
    """Write the traces of every case, and return what this rank found of the first bad operation."""
    root, rank = Path(folder), dist.get_rank()
    part = data().chunk(2)[rank]

    def ddp() -> None:
        train(DistributedDataParallel(made()), part, root / "ddp")

    def ddp_with_other_weights() -> None:
        model = DistributedDataParallel(made())
        if rank == 1:
            model.module.down.weight.data[2, 3] += 0.5
        train(model, part, root / "other")

    def fsdp() -> None:
        train(sharded(), part, root / "fsdp")

    def fsdp_with_another_shard() -> None:
        model = sharded()
        if rank == 1:
            spoil(model.head.weight)
        train(model, part, root / "shard")

    def tensor_parallel() -> None:
        train(split(), data(), root / "tp")

    def tensor_parallel_with_another_shard() -> None:
        model = split()
        if rank == 1:
            spoil(model.down.weight)
        train(model, data(), root / "split")

    def bad_step() -> list[Any]:
        return bad_steps(part, rank, root / "flight.json")

    def changes_nothing() -> list[bool]:
        ends = [trained_bits(part, watched) for watched in (False, True)]
        return [torch.equal(one, other) for one, other in zip(*ends, strict=True)]

    cases = (ddp, ddp_with_other_weights, fsdp, fsdp_with_another_shard, tensor_parallel)
    return run_cases([*cases, tensor_parallel_with_another_shard, bad_step, changes_nothing])


def fsdp_over_tp(folder: str) -> None:
    """Trace four ranks that shard, over two halves of the batch, what tensor parallelism has split before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model: Any = parallelize_module(made(), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    train(model, data().chunk(2)[dist.get_rank() // 2], Path(folder), kinds=("parameter", "param_grad"))


def spoil(weight: Any) -> None:
    """Change one number of this rank's part."""
    with torch.no_grad():
        weight.to_local()[0, 0] += 0.5


def sharded() -> Net:
    """Return the model under FSDP2, in two groups."""
    model = made()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split() -> Net:
    """Return the model under tensor parallelism, with outputs that say how they lie."""
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    found: Any = parallelize_module(made(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    return found


def bad_steps(part: Tensor, rank: int, to: Path) -> list[Any]:
    """Train with an infinite number in the batch of rank 1 in step 1; return what each report says."""
    model = DistributedDataParallel(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    recorder = FlightRecorder(to=to)
    with hl.follow(model, optimizer, [recorder]), find_bad_operations(model, optimizer, step_fn=step) as check:
        for number in range(4):
            check.step(part * (float("inf") if (rank, number) == (1, 1) else 1.0), ids=[number])
    return [(each.step, each.verdict, each.batch, each.notes) for each in check.reports] + [check.bad_steps]


def trained_bits(part: Tensor, watched: bool) -> list[Tensor]:
    """Train three steps, with the check or without, and return the parameters."""
    model = DistributedDataParallel(made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    hooked: AbstractContextManager[Any] = find_bad_operations(model, optimizer) if watched else nullcontext()
    with hooked:
        for _ in range(3):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]
