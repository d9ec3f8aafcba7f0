"""What two processes see of a watched DDP and FSDP2 model; run by `test_watch_distributed` through torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def shard(model: nn.Sequential) -> nn.Module:
    model[1] = nn.LayerNorm(8)  # BatchNorm's statistics are each rank's own, which is beside the point
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(wrap: Callable[[nn.Module], nn.Module], watched: bool, with_optimizer: bool = True) -> dict[str, Any]:
    """Twenty steps; what they leave behind, and what the watch has seen."""
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"optimizer": optimizer} if with_optimizer else {}
    watch = hl.watch(model, "*", every=2, **options) if watched else None
    data = torch.Generator().manual_seed(dist.get_rank())
    norms: list[float] = []
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=data)).square().sum().backward()
        if wrap is not shard:
            norms.append(list(model.parameters())[-1].grad.norm().item())
        optimizer.step()
    left = [whole(parameter).detach().clone() for parameter in model.parameters()]
    if watch is None:
        return {"left": left}
    report, metrics = watch.report(), watch.to_metrics()
    watch.remove()
    hl.assert_no_hooks(model)
    due = norms[::2]
    rms = (sum(norm * norm for norm in due) / len(due)) ** 0.5 if due else None
    fired = {place: count for place, count in report["fired"].items() if not place.endswith("/param")}
    return {
        "left": left,
        "fired": sorted(set(fired.values())),
        "places": sorted(fired),
        "norm": [metrics["4.bias/param_grad/norm"], rms],
    }


def all_watched() -> dict[str, Any]:
    """Run every case; what the watch has seen, and whether it changed the run."""
    found: dict[str, Any] = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp2", shard)):
        plain = run(wrap, False)["left"]
        for with_optimizer in (True, False):
            seen = run(wrap, True, with_optimizer)
            left = seen.pop("left")
            seen["same"] = all(torch.equal(one, other) for one, other in zip(plain, left, strict=True))
            found[f"{name} {with_optimizer}"] = seen
    return found
