"""Count what a flush of a watch sends, with 2, 64, 256 and 1,024 ranks and up to 6,002 sites.

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
from hookline.distributed.channels import Connections

RANKS = (2, 64, 256, 1024)
LAYERS = (10, 100, 1000)
"""Linear layers: each is six sites (output, weight, bias, and their gradients); the model itself is two more."""


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the bytes that this rank hands to each gather of hookline."""
    sent: list[int] = []
    real = Connections.gather

    def gather(self: Connections, value: Any, what: str) -> list[Any]:
        sent.append(len(pickle.dumps(value)))
        return real(self, value, what)

    Connections.gather = gather
    try:
        yield sent
    finally:
        Connections.gather = real


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
        with counting() as sent:
            seconds = []
            for _ in range(2):
                start = time.thread_time()
                watch.to_metrics()
                seconds.append(time.thread_time() - start)
        sites = len(watch.report()["fired"])
        watch.remove()
    finally:
        dist.destroy_process_group()
    assert len(sent) == 2
    return [
        *("FSDP2" if sharded else "DDP", f"{ranks:,}", f"{sites:,}"),
        *(f"{sent[1] / 1e3:.1f}", f"{sent[1] * ranks / 1e6:.2f}"),
        *(f"{each * 1e3:.0f}" for each in seconds),
    ]


def fake_store() -> Any:
    """Torch's store for nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| | ranks | sites | kB sent by a rank | MB received | first flush, ms | later, ms |")
    print("|---|" + "---:|" * 6)
    for sharded in (False, True):
        for layers in LAYERS if not sharded else LAYERS[1:2]:
            for ranks in RANKS:
                print("| " + " | ".join(measure(ranks, layers, sharded)) + " |", flush=True)


if __name__ == "__main__":
    main()
