"""Gradients before and after ranks reduce them, runs that stay the same to the last bit, and who broke it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from helpers_nets import SmallNet, loss_of, small_net
from helpers_ranks import run_cases
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import hookline as hl


class HouseNet(SmallNet):
    """With dropout, and a part that activation checkpointing computes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.relu(self.embed(x)))
        x = checkpoint(lambda y: self.act(self.up(y)), x, use_reentrant=False)
        return self.head(self.dropout(self.down(x)))


def house_net() -> HouseNet:
    torch.manual_seed(3)
    return HouseNet().double()


def wrapped(model: nn.Module, how: str) -> nn.Module:
    """DDP, FSDP2, or the model as it is."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        for module in (model.up, model.down, model):
            fully_shard(module)
    return model


def rank_batch(step: int, part: int = 0, rank: int | None = None) -> Tensor:
    """Another batch for each step, micro-batch and rank."""
    seed = 1000 * step + 10 * part + (dist.get_rank() if rank is None else rank)
    return torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def no_sync(model: nn.Module, how: str, last: bool) -> Any:
    """Accumulate without a reduction, until the last micro-batch."""
    if how == "fsdp2":
        model.set_requires_gradient_sync(last)
    return model.no_sync() if how == "ddp" and not last else contextlib.nullcontext()


def train(model: nn.Module, how: str, optimizer: Any, steps: int, parts: int = 1, batches: Any = rank_batch) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            with no_sync(model, how, part == parts - 1):
                loss_of(model(batches(step, part))).backward()
        optimizer.step()


# -- before and after ------------------------------------------------------------------------------------------


def gradients_of(rank: int, part: int = 0) -> dict[str, Tensor]:
    """The gradients of the first step on the batch of one rank, in one process."""
    model = small_net()
    loss_of(model(rank_batch(0, part, rank))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def before_and_after(how: str) -> Any:
    """For each parameter the norms that the watch has and those of the reference, before and after the reduction."""
    model = wrapped(small_net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = hl.watch(model, on=["param_grad", "param_grad_local"], stats="norm", optimizer=optimizer)
    train(model, how, optimizer, 1)
    own, every = watch.to_metrics(local=True), watch.to_metrics()
    watch.remove()
    hl.assert_no_hooks(model)
    by_rank = [gradients_of(rank) for rank in range(2)]
    expected = {}
    for name in by_rank[0]:
        local = by_rank[dist.get_rank()][name]
        expected[f"{name}/local"] = own[f"{name}/param_grad_local/norm"], local.norm().item()
        mean = torch.stack([each[name] for each in by_rank]).mean(0)
        expected[f"{name}/reduced"] = every[f"{name}/param_grad/norm"], mean.norm().item()
        root = torch.stack([each[name].norm() for each in by_rank]).square().mean().sqrt()
        expected[f"{name}/all local"] = every[f"{name}/param_grad_local/norm"], root.item()
    return expected


def before_and_after_ddp() -> Any:
    return before_and_after("ddp")


def before_and_after_fsdp2() -> Any:
    return before_and_after("fsdp2")


def accumulated(how: str) -> Any:
    """Two micro-batches a step, three steps: how often each kind was counted, with checkpointing."""
    model = wrapped(house_net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ["forward", "backward", "param_grad", "param_grad_local"]
    watch = hl.watch(model, ["up", "head"], on=kinds, optimizer=optimizer)
    train(model, how, optimizer, 3, parts=2)
    fired = watch.report()["fired"]
    watch.remove()
    return fired


def accumulated_ddp() -> Any:
    return accumulated("ddp")


def accumulated_fsdp2() -> Any:
    return accumulated("fsdp2")


# -- the same bits ---------------------------------------------------------------------------------------------


def outcome(how: str, hooking: Any) -> list[Tensor]:
    """Train 20 steps, and return all weights, optimizer state and the next random number."""
    model = wrapped(house_net(), how)
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handles = hooking(model, optimizer)
    train(model, how, optimizer, 20, parts=2)
    for handle in handles:
        handle.remove()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    found = [*model.parameters(), *state, torch.rand(3)]
    return [(each.to_local() if hasattr(each, "to_local") else each).detach().clone() for each in found]


def observers(model: nn.Module, optimizer: Any) -> list[Any]:
    kinds = ["forward", "backward", "param", "param_grad", "param_grad_local"]
    watch = hl.watch(model, on=kinds, optimizer=optimizer)
    hl.attach_optimizer(optimizer, lambda *args: watch.to_metrics(), on="step_post")
    return [watch, hl.watch(model, every=2), hl.observe.alarm(model, optimizer=optimizer, spike=10)]


def meddler(model: nn.Module, optimizer: Any) -> list[Any]:
    return [hl.attach(model, "head", lambda module, args, output: output * (1 + 1e-15))]


def same_bits(how: str) -> Any:
    plain = outcome(how, lambda model, optimizer: [])
    found = {}
    for name, hooking in {"observers": observers, "meddler": meddler}.items():
        other = outcome(how, hooking)
        found[name] = len(plain) == len(other) and all(map(torch.equal, plain, other))
    return found


def same_bits_ddp() -> Any:
    return same_bits("ddp")


def same_bits_fsdp2() -> Any:
    return same_bits("fsdp2")


# -- who broke it ----------------------------------------------------------------------------------------------


def broken(how: str, on: str, name: str) -> Any:
    """NaN on rank 1 in the second micro-batch of the third step, in the output or in its gradient."""
    logging.getLogger("hookline.observe.alarm").setLevel(logging.ERROR)
    model = wrapped(house_net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    now = {"step": -1, "part": -1}

    def batches(step: int, part: int) -> Tensor:
        now.update(step=step, part=part)
        alarm.note_batch([step, part, dist.get_rank()])
        return rank_batch(step, part)

    def is_now() -> bool:
        return dist.get_rank() == 1 and now == {"step": 2, "part": 1}

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * float("nan") if is_now() else None

    def spoil_gradient(module: nn.Module, grads: Any) -> Any:
        return tuple(grad * float("inf") for grad in grads) if is_now() else None

    hook = hl.attach(model, name, spoil if on == "forward" else spoil_gradient, on=on)
    alarm = hl.observe.alarm(model, optimizer=optimizer)
    train(model, how, optimizer, 4, parts=2, batches=batches)
    every = alarm.gather()
    own = alarm.troubles[:1]
    hook.remove()
    alarm.remove()
    first = every[0]
    return {
        "first": (first.step, first.micro_batch, first.rank, first.place, first.what, first.batch),
        "own": [(each.step, each.rank) for each in own],
        "text": str(first),
    }


def nan_forward_ddp() -> Any:
    return broken("ddp", "forward", "up")


def nan_forward_fsdp2() -> Any:
    return broken("fsdp2", "forward", "down")


def inf_backward_ddp() -> Any:
    return broken("ddp", "backward_pre", "norm")


def spikes() -> Any:
    """The loss of rank 0 is a thousand times as large in step 8."""
    logging.getLogger("hookline.observe.alarm").setLevel(logging.ERROR)
    model = wrapped(small_net(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with hl.observe.alarm(model, optimizer=optimizer, spike=20) as alarm:
        for step in range(10):
            optimizer.zero_grad()
            factor = 1000 if step == 8 and dist.get_rank() == 0 else 1
            (loss_of(model(rank_batch(step))) * factor).backward()
            optimizer.step()
        return [(each.step, each.rank, each.what, each.place, each.places) for each in alarm.gather()], str(alarm)


CASES = [
    *(before_and_after_ddp, before_and_after_fsdp2, accumulated_ddp, accumulated_fsdp2, same_bits_ddp, same_bits_fsdp2),
    *(nan_forward_ddp, nan_forward_fsdp2, inf_backward_ddp, spikes),
]


def all_gradients() -> dict[str, Any]:
    """Every case above, on two ranks."""
    warnings.simplefilter("ignore")
    return run_cases(CASES)
