"""What each of two processes does with a loop that is followed; `test_follow_ranks` starts them."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from helpers_hosts import metrics_of
from torch import nn

import hookline as hl
from hookline.sinks import MemorySink

__all__ = ["follow_and_leave"]


class OneOfEach(hl.TrainingHook):
    """One, on each rank."""

    name = "one"
    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH}
    reduce = "sum"

    def compute(self, ctx: hl.RunDataContext) -> dict[str, float]:
        return {"of_each": 1.0}


class _Loop:
    """A model in DDP and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(3, 4)).sum().backward()
            self.optimizer.step()

    def follow(self) -> tuple[Any, MemorySink]:
        sink = MemorySink()
        watch = hl.watch(self.model.module, on=["forward"], stats=["mean"])
        return hl.follow(self.model, self.optimizer, [OneOfEach(), watch], sinks=[sink]), sink


def _exit_in_the_middle(loop: _Loop) -> list[str]:
    """The process of rank 1 ends in the middle of the run, by no error; rank 0 has not come so far, and never does."""
    run, _ = loop.follow()
    loop.train(2)
    told: list[str] = []
    if dist.get_rank() == 1:
        os.environ["HOOKLINE_RANK_TIMEOUT"] = "0.5"  # so long it waits for rank 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run._close_at_end()
        del os.environ["HOOKLINE_RANK_TIMEOUT"]
        told = [str(one.message) for one in caught if "only of rank" in str(one.message)]
    dist.barrier()
    run.__exit__(RuntimeError, RuntimeError("the other rank is gone"), None)
    return told


def follow_and_leave() -> dict[str, Any]:
    """Two runs that are open when the process group is destroyed.

    Both ranks close the first of these. Rank 0 closes the second alone: rank 1 has left by then, or leaves.
    """
    warnings.simplefilter("ignore")
    loop = _Loop()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loop.follow()[0], loop.model.join():
            loop.train(1)
    joined = [str(one.message) for one in caught if "join()" in str(one.message)]
    exited = _exit_in_the_middle(loop)
    (first, sink), (second, lonely) = loop.follow(), loop.follow()
    loop.train(3)
    rank = dist.get_rank()
    dist.destroy_process_group()
    first.close()
    found = {
        "closed": metrics_of(sink),
        "joined": joined,
        "exited": exited,
    }
    if rank == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            second.close()
        found["told"] = [str(one.message) for one in caught if "only of rank" in str(one.message)]
        found["alone"] = metrics_of(lonely)
    return found
