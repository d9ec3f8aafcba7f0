"""A small model in float64, the ways to spread it over ranks, and how an error of all ranks reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from hookline.errors import RankError

BATCH, TOKENS, STEPS = 8, 4, 3
STATS = ["mean", "std", "norm", "rms", "min", "max", "absmax", "zero_fraction", "nonfinite", "over:1", "histogram"]


class SmallNet(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.act = nn.ReLU()
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.relu(self.embed(x)))
        return self.head(self.down(self.act(self.up(x))))


def small_net() -> SmallNet:
    """The same weights on every rank."""
    torch.manual_seed(3)
    return SmallNet().double()


def whole_batch(step: int) -> Tensor:
    """The batch of all ranks."""
    return torch.randn(BATCH, TOKENS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def part_of_batch(step: int, part: int, parts: int) -> Tensor:
    return whole_batch(step).chunk(parts)[part]


def loss_of(output: Any) -> Tensor:
    return output.square().mean()


def train_steps(model: nn.Module, optimizer: Any, part: int = 0, parts: int = 1, steps: int = STEPS) -> None:
    """A few steps on this part of each batch."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(part_of_batch(step, part, parts))).backward()
        optimizer.step()


def fsdp(model: SmallNet, mesh: Any) -> SmallNet:
    """FSDP2 on two parts and on the whole."""
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    return model


def column_and_row(model: SmallNet, mesh: Any) -> SmallNet:
    """Tensor parallel: one all-reduce, activations around it replicated."""
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence(model: SmallNet, mesh: Any) -> SmallNet:
    """Sequence parallel: tokens are sharded between the parallel layers."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


class Stage(nn.Module):
    """Some modules of the net, under their names in it."""

    def __init__(self, net: SmallNet, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, copy.deepcopy(net.get_submodule(name)))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


STAGES = (("embed", "relu", "norm", "up"), ("act", "down", "head"))


def train_pipeline(model: Stage, optimizer: Any, groups: list[Any]) -> None:
    """Two stages of two ranks each: ranks 0 and 1 send to 2 and 3; each pair has half of the batch."""
    rank = dist.get_rank()
    stage, part = divmod(rank, 2)
    for step in range(STEPS):
        optimizer.zero_grad()
        if stage == 0:
            output = model(part_of_batch(step, part, 2))
            dist.send(output.detach().contiguous(), rank + 2)
            gradient = torch.empty_like(output)
            dist.recv(gradient, rank + 2)
            output.backward(gradient)
        else:
            given = torch.empty(BATCH // 2, TOKENS, 32, dtype=torch.float64)
            dist.recv(given, rank - 2)
            given.requires_grad_()
            loss_of(model(given)).backward()
            dist.send(given.grad.contiguous(), rank - 2)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[stage])
            parameter.grad /= 2
        optimizer.step()


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def refused(call: Callable[[], Any]) -> str:
    """Return the text of the RankError that ``call`` raises."""
    with pytest.raises(RankError) as caught:
        call()
    return str(caught.value)
