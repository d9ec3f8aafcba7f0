"""What the guard leans on in torch, and models that torch has wrapped: sharded, compiled, scripted, averaged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hookline.errors import GuardError
from hookline.guard.guard import rollback
from hookline.guard.model_context import ModelDataContext


@pytest.fixture
def alone(tmp_path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_is_guarded_by_its_shards():
    """FSDP2 on the CPU: parameters, gradients and state are distributed tensors; training goes on to the last bit."""
    from torch.distributed.fsdp import fully_shard

    ends = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        batches = torch.randn(4, 3, 4)
        for batch in batches:
            if guarded:
                with rollback(model, optimizer) as receipt:
                    _step(model, optimizer, batch * 2)
                assert "model.0.weight" in receipt.touched
            _step(model, optimizer, batch)
        ends.append([p.to_local().detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.usefixtures("alone")
def test_a_data_parallel_model_keeps_its_gradient_buckets():
    """Gradients may be views of memory that a backward pass writes; it is the memory that comes back."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, torch.ones(2, 4))
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    for scope in ("trains", "grads"):
        with rollback(model, optimizer, scope=scope):
            model(torch.randn(2, 4)).sum().backward()
        for parameter, (grad, numbers) in zip(model.parameters(), grads, strict=True):
            assert parameter.grad is grad
            assert torch.equal(grad, numbers)


@pytest.mark.usefixtures("alone")
def test_a_data_parallel_model_that_would_lose_gradients_is_named():
    """torch makes new nodes for data of another dtype, and the hooks of DistributedDataParallel are on the old."""
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with rollback(parallel):
        parallel.module.weight.data = parallel.module.weight.data.clone()
    says = r"weight \(DistributedDataParallel would not see"
    with pytest.raises(GuardError, match=says), rollback(parallel):
        parallel.module.weight.data = parallel.module.weight.data.double()


def _step(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def test_a_compiled_model_is_guarded_and_not_compiled_again():
    """Its parameters are those of the model inside; restoring them changes nothing that the code was made for."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(model, backend=counter)
    optimizer = torch.optim.Adam(compiled.parameters())
    _step(compiled, optimizer, torch.randn(3, 4))
    frames = counter.frame_count
    before = [value.clone() for value in model.state_dict().values()]
    for _ in range(2):
        with rollback(compiled, optimizer):
            _step(compiled, optimizer, torch.randn(3, 4))
        compiled(torch.randn(3, 4))
        model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
    assert counter.frame_count == frames
    names = ModelDataContext(
        compiled, loss_fn=lambda m, b: m(b).sum(), batch=torch.randn(3, 4)
    ).compute_batch_gradients()
    assert list(names) == ["0.weight", "0.bias", "1.weight", "1.bias"]
