"""Train with two processes, and see one record of both.

Start it by ``torchrun --standalone --nproc-per-node 2 examples/torchrun_hooks.py``. The hooks are the same as in
one process. `reduce` says how the metrics of the ranks become one; rank 0 prints.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hookline as hl


class Samples(hl.TrainingHook):
    """Counts samples and shows the largest activation of any rank."""

    name = "samples"
    hook_points = frozenset({hl.HookPoint.POST_STEP})
    reduce = MappingProxyType({"seen": "sum", "largest": "max"})

    def compute(self, ctx: Any) -> dict[str, Any]:
        """Return the size of this rank's batch and its largest value."""
        inputs, _ = ctx.batch_data
        return {"seen": len(inputs), "largest": inputs.abs().max(), "loss": ctx.raw("loss")}


class Printer(hl.MetricSink):
    """Prints what all ranks have found, as the mean of the steps of an epoch."""

    def emit(self, metrics: Any, epoch: int, hook_point: Any) -> None:
        """Print one line for each record of steps."""
        means = {name: sum(values) / len(values) for name, values in metrics.items() if isinstance(values, list)}
        if means:
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()), flush=True)


def main() -> hl.training.LoopResult:
    """Train four epochs on random data; in one process if it was not started by torchrun."""
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    sampler = DistributedSampler(data, seed=0) if several else None
    loader = DataLoader(data, batch_size=16, sampler=sampler, shuffle=sampler is None)
    if several:
        model = DistributedDataParallel(model)
    experiment = hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    with hl.HookManager(["norms"], [Samples()], sinks=[Printer()]) as manager:
        result = hl.epoch_loop(experiment, epochs=4, manager=manager)
    if hl.distributed.this_rank() == 0:
        print(f"{hl.distributed.rank_count()} ranks, {result.steps} steps each, loss {result.loss:.3f}")
    if several:
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
