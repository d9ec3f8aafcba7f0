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


def test_sparse_gradients_come_back():
    """They have no memory of the usual kind."""
    model = nn.Embedding(6, 3, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    grad, numbers = model.weight.grad, model.weight.grad.to_dense()
    with rollback(model):
        model(torch.tensor([1, 4])).sum().backward()
    assert model.weight.grad is grad
    assert torch.equal(grad.to_dense(), numbers)


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
