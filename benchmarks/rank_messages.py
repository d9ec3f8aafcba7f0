"""Count what a flush of a watch sends, with 2, 64 and 1,024 ranks and up to 10,000 sites.

    python benchmarks/rank_messages.py          prints the table of docs/scaling.md

Runs in one process: torch's ``fake`` process group stands in for the other ranks. It sends nothing, so that bytes and
messages can be counted, and the work of one rank be timed (CPU time), for more ranks than there are machines.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hookline as hl
from hookline.distributed.channels import Channel

RANKS = (2, 64, 1024)
LAYERS = (10, 100, 1000)
"""Linear layers: each is six sites (output, weight, bias, and their gradients); the model itself is two more."""


class Counted:
    """What went through the channels of hookline."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []

    def bytes(self, *kinds: str) -> int:
        return sum(size for kind, size in self.messages if kind in kinds)


@contextmanager
def counting() -> Iterator[Counted]:
    """Count every collective of hookline, and what this rank hands to it."""
    counted = Counted()
    real = {"gather": Channel.gather, "reduce": Channel.reduce}

    def gather(self: Channel, value: Any, what: str) -> list[Any]:
        counted.messages.append(("gather", len(pickle.dumps(value))))
        return real["gather"](self, value, what)

    def reduce(self: Channel, added: torch.Tensor, kept: torch.Tensor, what: str) -> None:
        counted.messages += [("sum", added.nbytes), ("max", kept.nbytes)]
        real["reduce"](self, added, kept, what)

    Channel.gather, Channel.reduce = gather, reduce
    try:
        yield counted
    finally:
        Channel.gather, Channel.reduce = real["gather"], real["reduce"]


def measure(ranks: int, layers: int, sharded: bool) -> list[str]:
    """One row of the table: the first flush, then a later one."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        watch = hl.watch(model, optimizer=optimizer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with counting() as first:
            start = time.thread_time()
            watch.to_metrics()
            agreement = time.thread_time() - start
        with counting() as later:
            start = time.thread_time()
            watch.to_metrics()
            flush = time.thread_time() - start
        sites = len(watch.report()["fired"])
        watch.remove()
    finally:
        dist.destroy_process_group()
    assert [kind for kind, _ in later.messages] == ["sum", "max"]
    names = first.bytes("gather")
    return [
        *(
            "FSDP2" if sharded else "DDP",
            f"{ranks:,}",
            f"{sites:,}",
            f"{names / 1e3:.1f}",
            f"{names * ranks / 1e6:.2f}",
        ),
        *(f"{len(later.messages)}", f"{later.bytes('sum', 'max') / 1e3:.1f}"),
        *(f"{agreement * 1e3:.0f}", f"{flush * 1e3:.0f}"),
    ]


def fake_store() -> Any:
    """Torch's store for nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| | ranks | sites | agreement, kB sent by a rank | MB received | messages a flush | kB a flush | "
          "first flush, ms | later, ms |")  # fmt: skip
    print("|---|" + "---:|" * 8)
    for sharded in (False, True):
        for layers in LAYERS if not sharded else LAYERS[1:2]:
            for ranks in RANKS:
                print("| " + " | ".join(measure(ranks, layers, sharded)) + " |", flush=True)


if __name__ == "__main__":
    main()
