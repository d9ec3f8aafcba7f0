"""A loop of several ranks that is followed: what it leaves open, and what is written when its process group is gone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from helpers_hosts import metrics_of
from helpers_ranks import RankTests
from torch import nn

import hookline as hl
from hookline.sinks import MemorySink

on_ranks = RankTests(__file__)


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


@contextmanager
def _told(words: str) -> Iterator[list[str]]:
    """Gather the warnings with these words in a list, when the block is over."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in caught if words in str(one.message)]


@on_ranks.case
def test_a_process_that_ends_in_the_middle_does_not_wait_for_ranks_that_train():
    """As ``sys.exit(1)`` on one rank: the others wait for it in a collective of DDP, so it has to go."""
    loop = _Loop()
    run, _ = loop.follow()
    loop.train(2)
    with _told("only of rank") as told:
        if dist.get_rank() == 1:
            os.environ["HOOKLINE_RANK_TIMEOUT"] = "0.5"  # so long it waits for rank 0, which never comes so far
            run._close_at_end()
            del os.environ["HOOKLINE_RANK_TIMEOUT"]
    dist.barrier()
    run.__exit__(RuntimeError, RuntimeError("the other rank is gone"), None)
    assert ["only of rank 1" in text and "rank 0 did not end" in text for text in told] == [True] * dist.get_rank()


@on_ranks.case
def test_metrics_are_of_all_ranks_also_after_the_process_group_was_destroyed():
    """``destroy_process_group()`` comes before ``close()``, as at the end of most scripts. It is the last case here.

    Both ranks close the first of two runs. Rank 0 closes the second alone: rank 1 has left by then, or leaves. So
    rank 0 writes its own metrics, says which, and the record says so too.
    """
    loop, rank = _Loop(), dist.get_rank()
    (first, sink), (second, lonely) = loop.follow(), loop.follow()
    loop.train(3)
    dist.destroy_process_group()
    first.close()
    if rank == 0:
        metrics = metrics_of(sink)
        assert {step: metrics["one/of_each", "POST_STEP", step] for step in range(3)} == {0: 2.0, 1: 2.0, 2: 2.0}
        assert metrics["one/of_each", "POST_EPOCH", 0] == 2.0
        with _told("only of rank") as told:
            second.close()
        alone = metrics_of(lonely)
        assert alone["one/of_each", "POST_STEP", 2] == 1.0
        (text,) = told
        assert "only of rank 0" in text
        assert "beginning with metrics of steps 0 to 2" in text
        assert "Next: call close() of the run on every rank, before destroy_process_group()" in text
        assert [name for name, _, _ in alone if name == "run/error"]
