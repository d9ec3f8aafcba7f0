"""Traces of real ranks (DDP, FSDP2, tensor parallelism) beside one process; a bad step on one of two ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations, read_flight

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder with all traces, and what each of two ranks found; one launch for all."""
    folder = tmp_path_factory.mktemp("ranks")
    found = run_ranks(all_traced, str(folder), timeout=180)
    train(made(), data(), folder / "one")
    raised = [text for each in found for text in each.values() if isinstance(text, str)]
    assert not raised, raised[0]
    return folder, found


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_right_ranks_are_the_same_as_one_process(ranks: Any, name: str) -> None:
    """Parts of the batch, shards of parameters and gradients, and split layers are put together; all is compared."""
    folder, _ = ranks
    found = hl.compare(folder / "one", folder / name, dims=None if name == "tp" else DIMS)
    assert found.ok, found.summary
    assert found.only_a == found.unpaired == []
    assert {"output", "parameter", "param_grad"} == {value.kind for value in found.values}
    # Copies are compared by rank; under DDP the parameters are, and what is sharded is one value.
    assert {value.rank for value in found.values} == ({0, 1} if name == "ddp" or name == "tp" else {0})
    joined = [value for value in found.values if "put together from 2 ranks" in value.how]
    assert {value.site for value in joined} >= {"ddp": {"up", "head"}, "fsdp": {"up", "up.weight"}, "tp": {"up"}}[name]


def test_shards_of_what_tensor_parallelism_has_split_are_joined_in_the_order_they_were_cut(tmp_path: Path) -> None:
    """FSDP2 cuts the parts of ``up`` once more along the same dimension: a strided shard."""
    run_ranks(fsdp_over_tp, str(tmp_path / "four"), ranks=4, timeout=180)
    train(made(), data(), tmp_path / "one", kinds=("parameter", "param_grad"))
    laid = {each.site: each.placements for each in hl.debug.read_trace(tmp_path / "four").records}
    assert laid["up.weight"] is not None
    assert laid["up.weight"].placements == ("StridedShard(0, 2)", "Shard(0)")
    found = hl.compare(tmp_path / "one", tmp_path / "four")
    assert found.ok, found.summary
    assert found.only_a == found.unpaired == []
    assert {value.shape for value in found.values if value.site == "up.weight"} == {(16, 8)}


@pytest.mark.parametrize(("right", "wrong", "module", "rank"), [
    ("ddp", "other", "down", 1), ("fsdp", "shard", "head", 0), ("tp", "split", "down", 0),
])  # fmt: skip
def test_one_rank_with_other_weights_is_found(ranks: Any, right: str, wrong: str, module: str, rank: int) -> None:
    """Beside the right ranks and beside one process: the module alone, of copies with its rank, of shards the place."""
    folder, _ = ranks
    for reference in (right, "one"):
        found = hl.compare(folder / reference, folder / wrong, dims=None if right == "tp" else DIMS)
        assert [each.module for each in found.blamed] == [module], found.summary
        assert found.first is not None
        assert (found.first.site, found.first.kind, found.first.step) == (f"{module}.weight", "parameter", 0)
        assert found.first.rank == rank
    # Rank 1 has rows 2 and 3 of the head, and columns 8 to 15 of the other.
    assert found.first.where == {"other": "[2, 3]", "shard": "[2, 0]", "split": "[0, 8]"}[wrong]


def test_a_bad_step_of_one_rank_is_named_and_not_run_again(ranks: Any) -> None:
    """Rank 1 names its batch; rank 0 sees it one step later, in its weights. Nobody waits, and nothing is changed."""
    folder, (first, second) = ranks
    (step, verdict, batch, (why,)), count = second["bad_step"]
    assert (step, verdict, batch, count) == (1, "not run again", "ids [1]", 3)
    assert why.startswith("there are other ranks")
    (step, verdict, batch, _), count = first["bad_step"]
    assert (step, verdict, batch, count) == (2, "not run again", "ids [2]", 2)
    # The recorders of both have a file each, and the first bad step of each is in its own.
    reasons = [read_flight(folder / name).reason for name in ("flight.json", "flight.rank_1.json")]
    assert [reason.rpartition(" ")[2] for reason in reasons] == ["2", "1"]
    assert all(all(each["changes_nothing"]) for each in (first, second))


# -- what ranks do -------------------------------------------------------------------------------------------


KINDS = ("output", "parameter", "param_grad")
DIMS = dict.fromkeys(("", "up", "act", "down", "head"), "b[dp] f")
"""Each rank has a part of the batch; parameters are copies, or say themselves how they lie."""


class Net(nn.Module):
    """A feed-forward part and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.act(self.up(x))))
        return out


def made() -> Net:
    """Return the model, the same everywhere."""
    torch.manual_seed(0)
    return Net()


def data() -> Tensor:
    """Return the batch of all ranks."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, batch: Tensor, to: Path, *, steps: int = 2, kinds: Any = KINDS, **options: Any) -> None:
    """Trace two steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.trace(model, to=to, kinds=kinds, tensors=True, step=optimizer, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def all_traced(folder: str) -> dict[str, Any]:
    """Write the traces of every case, and return what this rank found of the first bad operation."""
    root, rank = Path(folder), dist.get_rank()
    part = data().chunk(2)[rank]

    def ddp() -> None:
        train(DistributedDataParallel(made()), part, root / "ddp")

    def ddp_with_other_weights() -> None:
        model = DistributedDataParallel(made())
        if rank == 1:
            model.module.down.weight.data[2, 3] += 0.5
        train(model, part, root / "other")

    def fsdp() -> None:
        train(sharded(), part, root / "fsdp")

    def fsdp_with_another_shard() -> None:
        model = sharded()
        if rank == 1:
            spoil(model.head.weight)
        train(model, part, root / "shard")

    def tensor_parallel() -> None:
        train(split(), data(), root / "tp")

    def tensor_parallel_with_another_shard() -> None:
        model = split()
        if rank == 1:
            spoil(model.down.weight)
        train(model, data(), root / "split")

    def bad_step() -> list[Any]:
        return bad_steps(part, rank, root / "flight.json")

    def changes_nothing() -> list[bool]:
        ends = [trained_bits(part, watched) for watched in (False, True)]
        return [torch.equal(one, other) for one, other in zip(*ends, strict=True)]

    cases = (ddp, ddp_with_other_weights, fsdp, fsdp_with_another_shard, tensor_parallel)
    return run_cases([*cases, tensor_parallel_with_another_shard, bad_step, changes_nothing])


def fsdp_over_tp(folder: str) -> None:
    """Trace four ranks that shard, over two halves of the batch, what tensor parallelism has split before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model: Any = parallelize_module(made(), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    train(model, data().chunk(2)[dist.get_rank() // 2], Path(folder), kinds=("parameter", "param_grad"))


def spoil(weight: Any) -> None:
    """Change one number of this rank's part."""
    with torch.no_grad():
        weight.to_local()[0, 0] += 0.5


def sharded() -> Net:
    """Return the model under FSDP2, in two groups."""
    model = made()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split() -> Net:
    """Return the model under tensor parallelism, with outputs that say how they lie."""
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    found: Any = parallelize_module(made(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    return found


def bad_steps(part: Tensor, rank: int, to: Path) -> list[Any]:
    """Train with an infinite number in the batch of rank 1 in step 1; return what each report says."""
    model = DistributedDataParallel(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Any]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    recorder = FlightRecorder(to=to)
    with hl.follow(model, optimizer, [recorder]), find_bad_operations(model, optimizer, step_fn=step) as check:
        for number in range(4):
            check.step({"x": part * (float("inf") if (rank, number) == (1, 1) else 1.0), "ids": [number]})
    return [(each.step, each.verdict, each.batch, each.notes) for each in check.reports] + [check.bad_steps]


def trained_bits(part: Tensor, watched: bool) -> list[Tensor]:
    """Train three steps, with the check or without, and return the parameters."""
    model = DistributedDataParallel(made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    hooked: AbstractContextManager[Any] = find_bad_operations(model, optimizer) if watched else nullcontext()
    with hooked:
        for _ in range(3):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]
