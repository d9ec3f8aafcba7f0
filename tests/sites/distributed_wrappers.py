"""What two processes see of hooks on DDP and FSDP2 models; run by `test_wrappers_distributed` through torchrun.

Rank 0 prints one JSON object; both ranks have to have seen the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hookline as hl

warnings.simplefilter("ignore")


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


def ddp_names() -> dict[str, Any]:
    model = DistributedDataParallel(make())
    predicate = hl.find(model, lambda name, module: isinstance(module, nn.Linear))
    return {
        "all": hl.find(model).names,
        "raw": hl.find(model, "module.layers.#.module").names,
        "own attribute": hl.find(model, "layers.#.module").names,
        "predicate": predicate.names,
        "table": "module.layers" in repr(hl.find(model)),
    }


def ddp_run() -> dict[str, Any]:
    """Three steps under hooks of three kinds, and one forward each way."""
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
    inner(batch(0)[0])
    found = {
        "fired": fired,
        "names": {kind: handle.names for kind, handle in kinds.items()},
        "last step": kinds["model"].report().last_step,
        "sites": sorted(set(sites)),
        "attached": len(hl.attached(model)),
        "attached to the inner one": len(hl.attached(inner)),
    }
    for handle in kinds.values():
        handle.remove()
    hl.assert_no_hooks(model)
    return found


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


def ddp_inert() -> dict[str, list[str]]:
    plain = ddp_weights(lambda model: hl.HandleSet())
    runs = {"observed": ddp_weights(observers), "disturbed": ddp_weights(draws_a_number)}
    return {name: [key for key in plain if not torch.equal(plain[key], run[key])] for name, run in runs.items()}


def ddp_compiled() -> dict[str, Any]:
    """Both ways round: names, firings, and raw names with some or all of the prefixes."""
    inside = DistributedDataParallel(torch.compile(make(), backend="aot_eager"))
    outside = torch.compile(DistributedDataParallel(make()), backend="aot_eager")
    some = ["module.layers.0", "_orig_mod.layers.0"]
    return {
        "DDP(compile)": compiled_run(inside, [*some, "module._orig_mod.layers.0"]),
        "compile(DDP)": compiled_run(outside, [*some, "_orig_mod.module.layers.0"]),
    }


def compiled_run(model: nn.Module, spellings: list[str]) -> dict[str, Any]:
    torch.compiler.reset()
    with hl.attach(model, "layers.#", lambda *args: None) as handle, hl.attach(model, lambda *args: None) as whole:
        for step in range(2):
            model(batch(step)[0]).sum().backward()
        report = handle.report()
        fired = [report.fired, whole.report().fired, report.last_step]
    return {"names": handle.names, "fired": fired, "raw": [hl.find(model, name).names for name in spellings]}


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


def fsdp_run(reshard: bool) -> dict[str, Any]:
    """Two steps; one hook attached before sharding, one after, one while parameters are gathered."""
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
    report = handle.report()
    found = {
        "early": sorted(early.seen),
        "late": sorted(late.seen),
        "gathered": [row[:2] for row in gathered.seen],
        "names": handle.names,
        "matched, attached": [report.matched, report.attached],
        "frozen": torch.equal(start, model.layers[1].norm.weight.full_tensor()),
        "names found": hl.find(model, "layers.#").names,
        "left on the old ones": sum(map(len, before)),
    }
    handles.remove()
    hl.assert_no_hooks(model)
    return found


def fsdp1_run(use_orig_params: bool) -> dict[str, Any]:
    """FSDP of old, which wraps the model and each block."""
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        plain_net(), auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    kinds = {kind: hl.attach(model, "layers.#", lambda *args: None, on=kind) for kind in ("forward", "backward")}
    kinds["model"] = hl.attach(model, lambda *args: None)
    kinds["param_grad"] = hl.attach(model, lambda p: None, on="param_grad")
    train(model, 2, model.parameters())
    found = {
        "fired": {kind: handle.report().fired for kind, handle in kinds.items() if kind != "param_grad"},
        "names": hl.find(model).names,
        "parameters": kinds["param_grad"].names,
        "raw": hl.find(model, "_fsdp_wrapped_module.layers.#._fsdp_wrapped_module.module").names,
    }
    for handle in kinds.values():
        handle.remove()
    hl.assert_no_hooks(model)
    return found


def weak_hooks(parameter: Tensor) -> dict[int, Any]:
    """The parameter's post-accumulate hooks, filled and emptied as they come and go."""
    parameter.register_post_accumulate_grad_hook(lambda p: None).remove()
    return parameter._post_accumulate_grad_hooks


def all_wrapped() -> dict[str, Any]:
    """Run every case; what this rank has seen, and of what differs, what each has seen."""
    found = {
        "ddp names": ddp_names(),
        "ddp run": ddp_run(),
        "ddp inert": ddp_inert(),
        "ddp compiled": ddp_compiled(),
        "fsdp reshard": fsdp_run(True),
        "fsdp keep": fsdp_run(False),
        "fsdp1": [fsdp1_run(use_orig_params) for use_orig_params in (True, False)],
    }
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, found)
    differ = {part: [rank[part] for rank in everybody] for part in found if everybody[0][part] != everybody[1][part]}
    return {**found, "differ": differ}
