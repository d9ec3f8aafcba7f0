"""DDP and FSDP2 in two real processes: clean names, every kind fires, nothing is changed, parameters are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers_ranks import RankTests
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hookline as hl

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
on_ranks = RankTests(__file__)

LAYERS = ("layers.0", "layers.1")
WATCHED = ["head.bias", "head.weight", "layers.0.module.weight", "layers.1.module.weight"]


class Block(nn.Module):
    """A residual layer with dropout, and an attribute that happens to be called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(self.module(x)).relu())


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net().train()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Other data on each rank."""
    data = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 8, generator=data), torch.randint(3, (6,), generator=data)


def train(model: nn.Module, steps: int, parameters: Iterable[Tensor]) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(steps):
        inputs, target = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()


# -- DDP ---------------------------------------------------------------------------------------------------------


@on_ranks.case
def test_names_in_a_ddp_model_carry_no_prefix():
    """A child of one's own that is called ``module`` keeps its name; raw names are taken too."""
    model = DistributedDataParallel(make())
    names = hl.find(model).names
    assert names[:4] == ["", "layers", "layers.0", "layers.0.module"]
    assert not [name for name in names if name.startswith("module")]
    linear = ["layers.0.module", "layers.1.module"]
    assert hl.find(model, "module.layers.#.module").names == hl.find(model, "layers.#.module").names == linear
    assert hl.find(model, lambda name, module: isinstance(module, nn.Linear)).names == [*linear, "head"]
    assert "module.layers" not in repr(hl.find(model))


@on_ranks.case
def test_every_kind_fires_in_ddp_training():
    """Three steps of two layers; the model itself once a step, and once more when it is called without DDP."""
    inner = make()
    model = DistributedDataParallel(inner)
    sites: list[str] = []

    def note(*args: Any, site: hl.Site) -> None:
        sites.append(site.name)

    kinds = {kind: hl.attach(model, "layers.#", note, on=kind) for kind in ("forward_pre", "forward", "backward")}
    kinds["param_grad"] = hl.attach(model, "layers.#.module.weight", note, on="param_grad")
    kinds["model"] = hl.attach(model, note)
    train(model, 3, model.parameters())
    fired = {kind: handle.report().fired for kind, handle in kinds.items()}
    assert fired == {"forward_pre": 6, "forward": 6, "backward": 6, "param_grad": 6, "model": 3}
    inner(batch(0)[0])
    assert kinds["model"].report().last_step == 3
    assert (kinds["backward"].names, kinds["model"].names) == (LAYERS, ("",))
    assert kinds["param_grad"].names == ("layers.0.module.weight", "layers.1.module.weight")
    assert set(sites) == {"", *LAYERS, *kinds["param_grad"].names}
    assert len(hl.attached(model)) == len(hl.attached(inner)) == 5
    for handle in kinds.values():
        handle.remove()
    hl.assert_no_hooks(model)


def ddp_weights(hook_up: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """What 20 steps leave behind: weights, statistics, random stream."""
    model = DistributedDataParallel(make())
    handles = hook_up(model)
    train(model, 20, model.parameters())
    handles.remove(quiet=True)
    return {**{name: value.clone() for name, value in model.state_dict().items()}, "random": torch.get_rng_state()}


def observers(model: nn.Module) -> hl.HandleSet:
    total = torch.zeros(())

    def observe(module: nn.Module, *args: Any) -> None:
        total.add_(sum(arg.detach().sum() for arg in args if isinstance(arg, Tensor)))

    handles = hl.HandleSet(
        hl.attach(model, "*", observe, on=kind, observe=True)
        for kind in ("forward_pre", "forward", "backward_pre", "backward")
    )
    handles.add(hl.attach(model, lambda p: total.add_(p.grad.sum()) and None, on="param_grad"))
    return handles


def draws_a_number(model: nn.Module) -> hl.HandleSet:
    def draw(module: nn.Module, args: Any, output: Any) -> None:
        torch.rand(())

    return hl.HandleSet([hl.attach(model, "layers.0", draw, observe=True)])


@on_ranks.case
def test_observers_leave_ddp_training_as_it_is_to_the_last_bit():
    """Twenty steps with dropout, BatchNorm and AdamW; the control, a hook that draws a number, leaves other weights."""
    plain, observed, disturbed = map(ddp_weights, (lambda model: hl.HandleSet(), observers, draws_a_number))
    assert [key for key in plain if not torch.equal(plain[key], observed[key])] == []
    assert {"random", "module.head.weight"} <= {key for key in plain if not torch.equal(plain[key], disturbed[key])}


WAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP(compile)": (
        lambda: DistributedDataParallel(torch.compile(make(), backend="aot_eager")),
        "module._orig_mod.layers.0",
    ),
    "compile(DDP)": (
        lambda: torch.compile(DistributedDataParallel(make()), backend="aot_eager"),
        "_orig_mod.module.layers.0",
    ),
}


@on_ranks.case(way=list(WAYS))
def test_ddp_and_compile_go_together_either_way_round(way):
    """Clean names, two forwards of two layers, and any of the prefixes in a raw name."""
    torch.compiler.reset()
    make_model, whole_name = WAYS[way]
    model = make_model()
    for name in ("module.layers.0", "_orig_mod.layers.0", whole_name):
        assert hl.find(model, name).names == ["layers.0"]
    with hl.attach(model, "layers.#", lambda *args: None) as handle, hl.attach(model, lambda *args: None) as whole:
        for step in range(2):
            model(batch(step)[0]).sum().backward()
        report = handle.report()
        assert (handle.names, report.fired, whole.report().fired, report.last_step) == (LAYERS, 4, 2, 1)


# -- FSDP2 -------------------------------------------------------------------------------------------------------


class Rows:
    """Which parameters a param_grad hook was shown, and what kind of gradient they had."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, int]] = []

    def __call__(self, parameter: Tensor, *, site: hl.Site) -> None:
        self.seen.append((site.name, isinstance(parameter.grad, DTensor), site.step))


def shard(model: Net, reshard: bool) -> Net:
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def plain_net() -> Net:
    """BatchNorm's buffers are not sharded and its statistics are each rank's own, which is beside the point."""
    model = make()
    for layer in model.layers:
        layer.norm = nn.LayerNorm(8)
    return model


def weak_hooks(parameter: Tensor) -> dict[int, Any]:
    """The parameter's post-accumulate hooks, filled and emptied as they come and go."""
    parameter.register_post_accumulate_grad_hook(lambda p: None).remove()
    return parameter._post_accumulate_grad_hooks


@on_ranks.case(reshard=[True, False])
def test_hooks_follow_the_parameters_onto_their_shards(reshard):
    """Attached before sharding, afterwards, and while parameters are gathered, which are then not what gets gradients.

    Once per parameter and step, with the gradient of the shard; names and receipts stay those of the model. What was
    frozen before is not moved by three steps of AdamW. Parameters are given back after the forward, or kept.
    """
    model, early, late, gathered = plain_net(), Rows(), Rows(), Rows()
    before = [weak_hooks(parameter) for parameter in model.parameters()]
    handle = hl.attach(model, ["layers.#.module.weight", "head"], early, on="param_grad")
    frozen = hl.freeze(model, "layers.1.norm")
    shard(model, reshard)
    handles = hl.HandleSet(
        [handle, frozen, hl.attach(model, ["layers.#.module.weight", "head"], late, on="param_grad")]
    )
    start = model.layers[1].norm.weight.full_tensor().clone()
    train(model, 2, model.parameters())
    if not reshard:
        with torch.no_grad():
            model(batch(0)[0])  # which leaves parameters gathered
    handles.add(hl.attach(model, "head.weight", gathered, on="param_grad"))
    train(model, 1, model.parameters())
    assert [name for name, _, _ in sorted(early.seen)] == sorted(WATCHED * 3)
    assert all(is_shard for _, is_shard, _ in early.seen)
    assert sorted(early.seen) == sorted(late.seen)
    assert [row[:2] for row in gathered.seen] == [("head.weight", True)]
    assert sum(map(len, before)) == 0  # on the parameters that there were before
    assert sorted(handle.names) == WATCHED
    assert (handle.report().matched, handle.report().attached) == (4, 4)
    assert hl.find(model, "layers.#").names == list(LAYERS)
    assert torch.equal(start, model.layers[1].norm.weight.full_tensor())
    handles.remove()
    hl.assert_no_hooks(model)


@on_ranks.case(use_orig_params=[True, False])
def test_fsdp_of_old_is_a_wrapper_like_any_other(use_orig_params):
    """Clean names of modules and of the parameters it shows; hooks fire on what is inside."""
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        plain_net(), auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    kinds = {kind: hl.attach(model, "layers.#", lambda *args: None, on=kind) for kind in ("forward", "backward")}
    kinds["model"] = hl.attach(model, lambda *args: None)
    kinds["param_grad"] = hl.attach(model, lambda p: None, on="param_grad")
    train(model, 2, model.parameters())
    assert {kind: handle.report().fired for kind, handle in kinds.items() if kind != "param_grad"} == {
        "forward": 4, "backward": 4, "model": 2
    }  # fmt: skip
    assert hl.find(model).names[:4] == ["", "layers", "layers.0", "layers.0.module"]
    raw = "_fsdp_wrapped_module.layers.#._fsdp_wrapped_module.module"
    assert hl.find(model, raw).names == ["layers.0.module", "layers.1.module"]
    expected = {"layers.0.module.weight", "head.bias"} if use_orig_params else {"layers.0._flat_param"}
    assert expected <= set(kinds["param_grad"].names)
    for handle in kinds.values():
        handle.remove()
    hl.assert_no_hooks(model)
