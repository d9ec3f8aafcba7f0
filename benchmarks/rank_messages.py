"""Count what a flush of a watch sends, with 2, 64 and 1,024 ranks and up to 10,000 sites.

    python benchmarks/rank_messages.py          prints the table of docs/scaling.md

Runs in one process: torch's ``fake`` process group stands in for the other ranks. It sends nothing, so that bytes and
messages can be counted, and the work of one rank be timed, for more ranks than there are machines.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
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
"""Linear layers: each is four sites (output, its gradient) and parameters with their gradients; see `sites_of`."""


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
    real = {name: getattr(Channel, name) for name in ("gather", "add", "keep_largest")}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(self: Channel, value: Any, what: str) -> Any:
            size = len(pickle.dumps(value)) if name == "gather" else value.nbytes
            counted.messages.append((name, size))
            return real[name](self, value, what)

        return call

    for name in real:
        setattr(Channel, name, wrapped(name))
    try:
        yield counted
    finally:
        for name, method in real.items():
            setattr(Channel, name, method)


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
            start = time.perf_counter()
            watch.to_metrics()
            agreement = time.perf_counter() - start
        with counting() as later:
            start = time.perf_counter()
            watch.to_metrics()
            flush = time.perf_counter() - start
        sites = len(watch.report()["fired"])
        watch.remove()
    finally:
        dist.destroy_process_group()
    assert [kind for kind, _ in later.messages] == ["keep_largest", "add"]
    names = first.bytes("gather")
    return [
        *(
            "FSDP2" if sharded else "DDP",
            f"{ranks:,}",
            f"{sites:,}",
            f"{names / 1e3:.1f}",
            f"{names * ranks / 1e6:.2f}",
        ),
        *(f"{len(later.messages)}", f"{later.bytes('add', 'keep_largest') / 1e3:.1f}"),
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
