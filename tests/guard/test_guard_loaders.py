"""Training of an intervention, and the data it reads: never by iterating the loader of the run."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers_guard import Run, context_of, small_context, small_loss
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from hookline.errors import LifecycleError
from hookline.guard.guard import Guard
from hookline.guard.model_context import ModelDataContext

# -- random streams and data ------------------------------------------------------------------------------------------


def test_a_sampler_without_end_is_read_as_far_as_it_says_or_refused():
    """Training by steps often has one."""

    class Endless(Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            return itertools.cycle(range(4))

    class Long(Endless):
        def __len__(self):
            return 6

    data = TensorDataset(torch.arange(4.0))
    with pytest.raises(LifecycleError, match="'Endless' has no length"):
        ModelDataContext(nn.ReLU(), loader=DataLoader(data, sampler=Endless())).get_shuffled_loader()
    batches = ModelDataContext(nn.ReLU(), loader=DataLoader(data, sampler=Long())).get_shuffled_loader()
    assert sorted(batch[0].item() for batch in batches) == [0.0, 0.0, 1.0, 1.0, 2.0, 3.0]


# -- training, weights, data ----------------------------------------------------------------------------------------


def test_an_epoch_without_steps_gives_the_mean_gradient_and_moves_nothing():
    """Over the whole training set; the run's loader is not iterated, no stream is drawn from."""
    model, context = small_context()
    state = torch.get_rng_state()
    before = [p.detach().clone() for p in model.parameters()]
    found = context.compute_gradients()
    data = context._loader.dataset.tensors[0]
    small_loss(model, [data]).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_to_look_at():
    """Device, groups and state of the optimizer, which cannot be assigned to."""
    run = Run()
    context = context_of(run)
    assert context.model is run.model
    assert context.device == torch.device("cpu")
    assert ModelDataContext(nn.ReLU()).device == torch.device("cpu")
    assert context.param_groups[0]["lr"] == 0.01
    assert set(context.optimizer_state("head.weight")) == {"step", "exp_avg", "exp_avg_sq"}
    assert context.optimizer_state("out.weight") == context.optimizer_state("embed.weight")  # shared
    with pytest.raises(TypeError):
        context.param_groups[0]["lr"] = 3
    with pytest.raises(TypeError):
        context.optimizer_state("head.weight")["step"] = 3
    assert dict(ModelDataContext(run.model).optimizer_state("head.weight")) == {}
    assert ModelDataContext(run.model).param_groups == ()
    assert isinstance(ModelDataContext(run.model).guard, Guard)


SAMPLERS = {
    "subset": lambda: {"sampler": torch.utils.data.SubsetRandomSampler([1, 3, 5])},
    "weighted": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([0.0, 1.0, 0.0, 1.0, 0, 1, 0, 0, 0, 0], 3)},
    "distributed": lambda: {"sampler": torch.utils.data.DistributedSampler(range(10), 2, 0, shuffle=True)},
    "batches": lambda: {"batch_sampler": [[1, 3], [5]]},
    "replacement": lambda: {"sampler": torch.utils.data.RandomSampler(range(10), replacement=True, num_samples=3)},
}


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_shuffle_is_of_what_the_run_reads(sampler):
    """Of the samples that its sampler gives, and the sampler stays where it is."""
    options = SAMPLERS[sampler]()
    loader = DataLoader(range(10), **({"batch_size": 2} if "sampler" in options else {}), **options)
    state = torch.get_rng_state()
    context = ModelDataContext(nn.ReLU(), loader=loader)
    found = [int(x) for batch in context.get_shuffled_loader() for x in batch]
    expected = {"subset": 3, "weighted": 3, "distributed": 5, "batches": 3, "replacement": 3}[sampler]
    assert len(found) == expected
    if sampler in ("subset", "batches"):
        assert sorted(found) == [1, 3, 5]
    if sampler == "weighted":
        assert set(found) <= {1, 3, 5}
    assert torch.equal(torch.get_rng_state(), state)


def test_an_epoch_that_is_running_goes_on_where_it_was():
    """An intervention goes through the data in the middle of it, with workers that persist."""
    data = TensorDataset(torch.arange(12.0).view(12, 1))
    orders = []
    for intervening in (False, True):
        generator = torch.Generator().manual_seed(4)
        loader = DataLoader(data, 2, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)
        context = ModelDataContext(nn.Linear(1, 1), loader=loader, loss_fn=small_loss)
        seen = []
        for _ in range(2):
            for number, (batch,) in enumerate(loader):
                seen += batch.flatten().tolist()
                if intervening and number == 1:
                    context.compute_gradients()
                    list(context.get_shuffled_loader())
        orders.append(seen)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 24


def test_a_loader_of_the_experiments_own_making_draws_from_ours():
    """Each call another order, no stream of the run moved."""
    make = lambda generator: DataLoader(range(9), shuffle=True, generator=generator)  # noqa: E731
    context = ModelDataContext(nn.ReLU(), shuffled_loader=make)
    state = torch.get_rng_state()
    orders = {tuple(int(x) for x in context.get_shuffled_loader()) for _ in range(3)}
    assert len(orders) == 3
    assert torch.equal(torch.get_rng_state(), state)
