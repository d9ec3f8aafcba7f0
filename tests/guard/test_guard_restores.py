"""Everything comes back: parameters, gradients, hooks, switches, samplers, each the same object."""

from __future__ import annotations

import pytest
import torch
from helpers_guard import OPTIMIZERS, Run, Stop, differing, guard_of, portrait, ruin
from torch import nn

import hookline as hl
from hookline.guard.guard import rollback

# -- everything comes back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [0, 3])
def test_everything_is_as_before(optimizer, steps):
    """Also state that the optimizer made only in the block, and for each of several interventions."""
    run = Run(optimizer, steps=steps)
    before = portrait(run)
    guard = guard_of(run)
    guard.save()
    for _ in range(3):
        with guard.protecting("ruin"):
            ruin(run)
        assert differing(before, portrait(run)) == []
    assert guard.num_saves == 1


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_block_goes_on_after_the_restore(error):
    """Whatever it is."""
    run = Run()
    before = portrait(run)

    def block():
        with rollback(*run.guarded, loader=run.loader):
            ruin(run)
            raise error

    with pytest.raises(error):
        block()
    assert differing(before, portrait(run)) == []


def test_a_backward_whose_forward_is_over_works_as_without_the_block():
    """The counters by which autograd tells that a tensor was overwritten are set back, too."""
    grads = []
    for guarded in (False, True):
        run = Run()
        torch.manual_seed(5)
        run.optimizer.zero_grad()
        loss = run.loss(run.model, [torch.randn(6, 5)])
        if guarded:
            with rollback(*run.guarded):
                run.step()
                run.model.head.weight.data = torch.zeros(1)
        loss.backward()
        grads.append([p.grad for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_without_the_guard_that_backward_fails():
    """The control for the test above."""
    run = Run()
    loss = run.loss(run.model, [torch.randn(6, 5)])
    run.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_autocast_has_cast_is_cast_again():
    """Inside one autocast block, a weight is cast once; after the restore the cast must be of the old numbers."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        with rollback(model):
            with torch.no_grad():
                model.weight.fill_(3)
            torch.clear_autocast_cache()
            model(x)
        assert torch.equal(model(x), before)


def test_gradients_come_and_go_and_stay_the_same_objects():
    """From None to a tensor, from a tensor to None, written in place."""
    run = Run()
    first, second, *_ = run.model.parameters()
    first.grad, kept = None, second.grad
    numbers = kept.clone()
    with rollback(*run.guarded):
        first.grad = torch.ones_like(first)
        kept.zero_()
        second.grad = None
    assert first.grad is None
    assert second.grad is kept
    assert torch.equal(kept, numbers)


def test_sparse_gradients_come_back():
    """They have no memory of the usual kind."""
    model = nn.Embedding(6, 3, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    grad, numbers = model.weight.grad, model.weight.grad.to_dense()
    with rollback(model):
        model(torch.tensor([1, 4])).sum().backward()
    assert model.weight.grad is grad
    assert torch.equal(grad.to_dense(), numbers)


def test_hooks_of_torch_and_of_hookline_that_stay_behind_come_off():
    """And those that were there before still fire."""
    model, fired = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    with hl.attach(model, "0", lambda module, args, output: fired.append("ours")):
        model[1].register_forward_hook(lambda *args: fired.append("torch's"))
        with rollback(model):
            hl.attach(model, "*", lambda module, args, output: fired.append("new"))
            hl.attach(model, "0", lambda parameter: fired.append("new"), on="param_grad")
            model[0].weight.register_hook(lambda grad: fired.append("new"))
            model[0].register_forward_hook(lambda *args: fired.append("new"))
        model(torch.ones(1, 2)).sum().backward()
        assert fired == ["ours", "torch's"]
        assert len(hl.attached(model)) == 1
        hl.attach(model, "1", lambda module, args, output: fired.append("later"))
        model(torch.ones(1, 2))
        assert fired[2:] == ["ours", "later", "torch's"]  # our edits go before hooks of others


HOOKS = {
    "forward": ({}, lambda fired: lambda module, args, output: fired.append(1)),
    "always": ({"always_call": True}, lambda fired: lambda module, args, output: fired.append(1)),
    "observer": ({"observe": True}, lambda fired: lambda module, args, output: fired.append(1)),
    "backward": ({"on": "backward"}, lambda fired: lambda module, grad_input, grad_output: fired.append(1)),
    "param_grad": ({"on": "param_grad"}, lambda fired: lambda parameter: fired.append(1)),
}


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("kind", sorted(HOOKS))
def test_hooks_of_ours_stay_whole_whatever_a_block_does_with_them(kind):
    """Those it attaches are off afterwards; one of before fires on; one it removes by its handle stays off."""
    options, make = HOOKS[kind]
    model, fired = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    def attached():
        return hl.attach(model, "0", make(fired), **options)

    def fires() -> bool:
        before = len(fired)
        model(torch.ones(1, 2)).sum().backward()
        return len(fired) > before

    with rollback(model):
        handle = attached()
        assert fires()
    assert handle.removed
    assert not fires()
    hl.assert_no_hooks(model, foreign=True)
    handle = attached()
    with rollback(model):
        assert fires()
    assert fires()
    with rollback(model):
        handle.remove()
    assert not fires()
    hl.assert_no_hooks(model, foreign=True)
    assert "_call_impl" not in vars(model[0])
    with attached():
        assert fires()


def test_a_storage_that_was_freed_is_there_again():
    """As sharding does between uses."""
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    with rollback(model):
        model.weight.untyped_storage().resize_(0)
    assert torch.equal(model.weight, before)


def test_tensors_made_in_inference_mode_come_back():
    """They have no counter, and may be written only there."""
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("made", torch.arange(3.0))
    with rollback(model), torch.inference_mode():
        model.made.zero_()
    assert model.made.tolist() == [0.0, 1.0, 2.0]


def test_it_works_in_inference_mode_and_where_gradients_are_off():
    """And leaves the switches alone."""
    run = Run()
    for switch in (torch.inference_mode, torch.no_grad):
        before = portrait(run)
        with switch(), rollback(*run.guarded):
            run.model.head.weight.add_(1)
            run.model(torch.randn(2, 5))
        assert differing(before, portrait(run)) == []
        assert torch.is_grad_enabled()


def test_switches_of_the_process_that_were_left_on_are_switched_back():
    """Whether gradients are recorded, and the type of new tensors."""
    model = nn.Linear(2, 2)
    with torch.no_grad(), rollback(model) as receipt:
        torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()
    assert receipt.touched == ("grad mode",)
    with rollback(model) as receipt:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert receipt.touched == receipt.restored == ("grad mode", "default dtype")


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.BatchNorm1d(2, affine=False)], ids=str)
def test_models_without_parameters_are_guarded_too(model):
    """Their modes, buffers and random streams are there to be changed."""
    state = torch.get_rng_state()
    with rollback(model) as receipt:
        model.eval()
        torch.rand(1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert "model.training" in receipt.touched


def test_an_optimizer_without_state_has_none_afterwards():
    """Entries that a step makes are gone; the dictionary is the same."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = optimizer.state
    with rollback(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 2
    assert optimizer.state is state
    assert not state
    assert model.weight.grad is None


def test_samplers_of_any_kind_come_back():
    """Generators and attributes of batch samplers, generators of loaders that are none of torch's."""

    class Batches:
        def __init__(self):
            self.generator, self.served = torch.Generator().manual_seed(1), []

        def __iter__(self):
            self.served.append(int(torch.randint(9, (1,), generator=self.generator)))
            return iter([[0, 1], [2]])

    class Loader:
        def __init__(self):
            self.generator, self.data = torch.Generator().manual_seed(2), list(range(9))

    batches, mine = Batches(), Loader()
    loader = torch.utils.data.DataLoader([1.0, 2.0, 3.0], batch_sampler=batches)
    states = [batches.generator.get_state(), mine.generator.get_state()]
    with rollback(nn.ReLU(), loader=loader) as receipt:
        list(loader)
    with rollback(nn.ReLU(), loader=mine):
        torch.rand(1, generator=mine.generator)
    assert "loader.batch_sampler.served" in receipt.touched
    assert batches.served == []
    assert torch.equal(batches.generator.get_state(), states[0])
    assert torch.equal(mine.generator.get_state(), states[1])


def test_the_epoch_of_a_distributed_sampler_comes_back():
    """`set_epoch` decides the order of the next epoch."""
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(range(8), sampler=sampler)
    with rollback(nn.ReLU(), loader=loader):
        sampler.set_epoch(7)
    assert sampler.epoch == 0


def test_every_bit_of_a_nan_comes_back():
    """Of signalling NaNs, which a copy as floats may make quiet."""
    kinds = ((torch.float32, torch.int32, 0x7F800001), (torch.bfloat16, torch.int16, 0x7F81))
    kinds += ((torch.float16, torch.int16, 0x7C01), (torch.float64, torch.int64, 0x7FF0000000000001))
    model = nn.Module()
    for number, (dtype, integers, pattern) in enumerate(kinds):
        model.register_buffer(f"b{number}", torch.full((5,), pattern, dtype=integers).view(dtype))
    with rollback(model):
        for buffer in model.buffers():
            buffer.zero_()
    for buffer, (_, integers, pattern) in zip(model.buffers(), kinds, strict=True):
        assert (buffer.view(integers) == pattern).all()
