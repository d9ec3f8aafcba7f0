"""On an FSDP2 module our hooks run between its own: parameters are whole in every hook of ours."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import RankTests
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hookline as hl

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
on_ranks = RankTests(__file__, ranks=1)
GRADIENT = ("backward_pre", "backward")


class Seen:
    """Counts where hooks fire, and notes where the weight is a shard."""

    def __init__(self) -> None:
        self.fired: Counter[tuple[str, str]] = Counter()
        self.sharded: set[str] = set()

    def attach(self, model: nn.Module) -> hl.HandleSet:
        """Put hooks of all kinds and places in line on the linear layers."""
        styles: dict[str, dict[str, Any]] = {"edit": {}, "observe": {"observe": True}, "prepend": {"prepend": True}}
        return hl.HandleSet(
            hl.attach(model, nn.Linear, self.note(kind, style), on=kind, **options)
            for kind in ("forward_pre", "forward", *GRADIENT)
            for style, options in styles.items()
        )

    def note(self, kind: str, style: str) -> Any:
        def hook(module: nn.Module, *args: Any) -> None:
            self.fired[kind, style] += 1
            if isinstance(module.weight, DTensor):
                self.sharded.add(kind)

        return hook


@on_ranks.case(late=[False, True])
def test_hooks_attached_before_sharding_or_after_find_whole_parameters_and_change_nothing(late):
    """In two steps of two layers: forward hooks after its pre-forward and before its post-forward, edits and observers.

    Loss and gradients are those of the plain model. Removed, our hooks leave its own, one at each end, and the
    parameters are shards again.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plain.load_state_dict(model.state_dict())
    seen, mesh = Seen(), dist.init_device_mesh("cpu", (1,))
    handles = None if late else seen.attach(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    handles = handles or seen.attach(model)
    x = torch.randn(3, 4)
    for _ in range(2):
        seen.fired.clear()
        losses = [each(x).pow(2).sum() for each in (model, plain)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert len(seen.fired) == 12
        assert set(seen.fired.values()) == {2}
        assert seen.sharded <= set(GRADIENT)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)
    handles.remove()
    hl.assert_no_hooks(model)
    left = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert left[0] >= 1
    assert left[1:] == [2, 0, 2]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert torch.equal(model(x).pow(2).sum(), losses[1])


@on_ranks.case(way=["group", "replicate"])
def test_parameters_are_whole_where_modules_are_sharded_together_or_replicated(way):
    """Its hooks on a group of modules, and those of its other verb, are known too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    seen, mesh = Seen(), dist.init_device_mesh("cpu", (1,))
    handles = seen.attach(model)
    if way == "group":
        fully_shard([model[0], model[1]], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for layer in model:
            replicate(layer, mesh=mesh)
    model(torch.randn(3, 4)).sum().backward()
    assert seen.sharded <= set(GRADIENT)
    handles.remove()
