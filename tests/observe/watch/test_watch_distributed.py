"""A watch in two real processes: DDP and FSDP2, with and without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


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


CASES = [f"{wrapper} {with_optimizer}" for wrapper in ("ddp", "fsdp2") for with_optimizer in (True, False)]


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """What rank 0 of `all_watched` has seen."""
    first, _ = run_ranks(all_watched)
    return first


@pytest.mark.parametrize("case", CASES)
def test_a_watched_distributed_run_ends_with_the_same_bits_and_every_due_step_is_seen(
    outcome: dict[str, Any], case: str
) -> None:
    """Twenty steps of AdamW with dropout, every second one watched, under names without prefixes.

    Gradients of parameters are those that DDP has averaged, with an optimizer and without one.
    """
    assert outcome[case]["same"]
    assert outcome[case]["fired"] == [10]
    assert {"4/forward", "4/backward", "4.weight/param_grad"} <= set(outcome[case]["places"])
    if case.startswith("ddp"):
        told, true = outcome[case]["norm"]
        assert told == pytest.approx(true, rel=1e-4)
