"""What the guard leans on in torch, and models that torch has wrapped: sharded, compiled, scripted, averaged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hookline.errors import GuardError
from hookline.guard.guard import Guard, rollback
from hookline.guard.model_context import ModelDataContext
from hookline.sites import _torch


def test_counters_can_be_set_back_and_a_write_moves_them():
    """For several tensors at once; ``.data`` has a counter of its own."""
    one, other = torch.zeros(2), torch.zeros(2)
    before = one._version, other._version
    one.add_(1)
    other.add_(1)
    assert (one._version, other._version) != before
    _torch.set_versions((one, other), before)
    assert (one._version, other._version) == before
    one.data.add_(1)
    assert one._version == before[0]
    _torch.set_versions((), ())


def test_many_tensors_are_copied_in_one_call():
    """Into tensors that are there."""
    sources, targets = [torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.zeros(3)]
    _torch.copy_all(targets, sources, non_blocking=True)
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


def test_hooks_of_a_tensor_are_where_they_are_looked_for():
    """None before the first."""
    parameter = nn.Parameter(torch.ones(1))
    assert [getattr(parameter, name) for name in _torch.TENSOR_HOOKS] == [None, None]
    parameter.register_hook(print)
    parameter.register_post_accumulate_grad_hook(print)
    assert [list(getattr(parameter, name).values()) for name in _torch.TENSOR_HOOKS] == [[print], [print]]


def test_an_object_can_be_told_from_its_insides_and_get_others():
    """What ``swap_tensors`` does, and how it is undone, graph or no graph."""
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))
    insides = _torch.identity_of(one)
    assert _torch.use_count(one) == 1
    graph = (one * 2).sum()
    assert _torch.use_count(one) == 2
    torch.utils.swap_tensors(one, other)
    assert _torch.identity_of(other) == insides
    _torch.swap_insides(one, other)
    assert _torch.identity_of(one) == insides
    with pytest.raises(RuntimeError, match="poisoned"):
        graph.backward(retain_graph=True)
    _torch.allow_accumulator(_torch.accumulator_of(one))
    graph.backward()
    assert one.grad.tolist() == [2.0, 2.0]


def test_a_node_that_expects_another_shape_can_be_forgotten():
    """As long as a graph keeps it, torch would use it for the next."""
    parameter = nn.Parameter(torch.zeros(2))
    graph = (parameter * 2).sum()
    parameter.data = torch.zeros(3)
    node = _torch.accumulator_of(parameter)
    assert not _torch.is_right_accumulator(node, parameter)
    _torch.forget_accumulator(parameter)
    assert _torch.is_right_accumulator(_torch.accumulator_of(parameter), parameter)
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [2.0] * 3
    del graph


def test_switches_that_are_asked_for_in_private_can_be_set_back():
    """Precision of float32 in every place, the default device, blocks of autocast."""
    before = _torch.precision(), _torch.default_device(), _torch.autocast_nesting(), _torch.reductions()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_device("meta")
        torch.autocast_increment_nesting()
        assert _torch.precision() != before[0]
        assert _torch.default_device() == torch.device("meta")
        assert _torch.autocast_nesting() == before[2] + 1
    finally:
        _torch.set_precision(before[0])
        torch.set_default_device(before[1])
        _torch.set_autocast_nesting(before[2])
        _torch.set_reductions(before[3])
    assert (_torch.precision(), _torch.default_device(), _torch.autocast_nesting(), _torch.reductions()) == before
    assert {"cudnn.benchmark", "mkldnn.enabled", "flash attention"} <= _torch.KERNEL_SWITCHES.keys()


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


def test_gradients_that_are_put_away_and_written_all_the_same_are_named():
    """Whoever kept a reference from before can."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, torch.ones(2, 4))
    grad = model.weight.grad
    with pytest.raises(GuardError, match=r"changed model\.weight\.grad. No copy"), rollback(model, scope="grads"):
        grad.zero_()
    assert model.weight.grad is grad


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


def test_weights_that_are_computed_come_back_too():
    """Weight norm keeps the original in a parametrization; an averaged model keeps a copy."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    average = torch.optim.swa_utils.AveragedModel(layer)
    weight = layer.weight.detach().clone()
    with rollback(average), torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(3)
        average.update_parameters(layer)
    assert torch.equal(layer.weight, weight)
    assert int(average.n_averaged) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_refused_by_name_if_they_have_anything_to_lose():
    """Their parameters are not where Python could put them back."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(GuardError, match=r"^model is a RecursiveScriptModule"), rollback(scripted):
        pytest.fail("it ran")
    with pytest.raises(GuardError, match=r"^model\.1 is a"), rollback(nn.Sequential(nn.ReLU(), scripted)):
        pytest.fail("it ran")
    with rollback(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))):
        pass


def test_tensors_that_wrap_others_are_refused_by_name():
    """What is in them would not be saved."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(2, 2)
    model.register_buffer("pair", TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(GuardError, match=r"model\.pair is a TwoTensor"), rollback(model):
        pytest.fail("it ran")


def test_a_guard_of_a_model_that_changes_between_firings_learns_it_anew():
    """More layers, another dtype, another optimizer state."""
    model = nn.Sequential(nn.Linear(2, 2))
    guard = Guard(model)
    for change in (lambda: model.append(nn.Linear(2, 2)), model.double, lambda: model.pop(0), lambda: None):
        change()
        before = [p.detach().clone() for p in model.parameters()]
        guard.save()
        with guard.protecting("any"), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        guard.release()


def test_a_version_that_misses_attributes_is_not_gone_by() -> None:
    """That of CPython 3.13.0 stays the same when an attribute is set; a guard that went by it would restore nothing."""
    versions = _torch.which_dict_version(lambda attributes: hash(tuple(attributes.values())))
    assert versions is not None
    assert _torch.which_dict_version(lambda attributes: len(attributes)) is None
    assert _torch.which_dict_version(None) is None
