"""Two processes train one policy under DDP, FSDP2 or neither, with trackers; run by test_trackers_distributed.py.

python trackers_distributed.py FILE: each process writes, as JSON, its metrics by wrapper to FILE.0 and FILE.1.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import hookline as hl


def shard(policy: hl.metta.PolicyAutoBuilder) -> hl.metta.PolicyAutoBuilder:
    """FSDP2 on each component and on the whole."""
    for module in (*policy.components.values(), policy):
        fully_shard(module)
    return policy


WRAPPERS = {"plain": lambda policy: policy, "ddp": nn.parallel.DistributedDataParallel, "fsdp2": shard}


def train(wrapper: str, rank: int) -> dict[str, float]:
    """Two micro-batches, another for each process; the metrics."""
    torch.manual_seed(0)
    policy = hl.metta.PolicyAutoBuilder(
        OrderedDict(body=nn.Sequential(nn.Linear(3, 4), nn.ReLU()), head=nn.Linear(4, 2))
    )
    model, trainer, tool = (
        WRAPPERS[wrapper](policy),
        SimpleNamespace(context=hl.metta.ComponentContext()),
        hl.metta.TrainTool(),
    )
    tool.add_training_hook("body", hl.metta.attach_relu_activation_hooks())
    for component in policy.components:
        tool.add_training_backward_hook(component, hl.metta.attach_fisher_information_hooks())
        tool.add_training_backward_hook(component, hl.metta.attach_gradient_flow_hooks())
        tool.add_training_backward_hook(component, hl.metta.attach_relu_gradient_flow_hooks())
    with tool.attached(policy=model, trainer=trainer):
        for part in (1.0, 2.0):
            model(torch.full((2, 3), part + rank)).square().sum().backward()
        return hl.metta.StatsReporter(trainer.context).on_epoch_end()


def work(rank: int, file: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    found = {wrapper: train(wrapper, rank) for wrapper in WRAPPERS}
    Path(f"{file}.{rank}").write_text(json.dumps(found))  # two that print at once may cut into each other's lines
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # Once in some fifty runs torch aborts while its threads are taken down; what was to be told has been told.
    os._exit(0)


if __name__ == "__main__":
    # Forked, so that torch and hookline are imported once, not three times, which was most of what this took.
    hl.metta.StatsReporter, torch._dynamo  # both come when they are asked for
    mp.start_processes(work, args=(sys.argv[1],), nprocs=2, start_method="fork")
