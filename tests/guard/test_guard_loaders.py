"""Training of an intervention, and the data it reads: never by iterating the loader of the run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers_guard import Run, context_of, small_context, small_loss
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from hookline.errors import LifecycleError, NoMatchError, OptionError
from hookline.guard.guard import Guard, rollback
from hookline.guard.model_context import ModelDataContext

# -- random streams and data ------------------------------------------------------------------------------------------


class _Noisy:
    """Adds noise from a generator of its own as it is read."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index + self.generator.normal()], dtype=torch.float32)


def test_generators_of_the_dataset_come_back():
    """An intervention reads the same dataset; also inside a subset and a concatenation."""
    noisy = _Noisy()
    loader = DataLoader(ConcatDataset([Subset(noisy, [0, 1]), Subset(noisy, [2])]), batch_size=2)
    model, state = nn.Linear(1, 1), noisy.generator.bit_generator.state
    context = ModelDataContext(model, loader=loader, loss_fn=lambda model, batch: model(batch).sum())
    with rollback(model, loader=loader):
        context.compute_gradients()
        assert noisy.generator.bit_generator.state != state
    assert noisy.generator.bit_generator.state == state


@pytest.mark.parametrize("data", [torch.zeros(1000, 10), np.zeros((1000, 10)), [torch.zeros(1000, 10)]])
def test_the_data_is_not_copied(data):
    """Whatever kind of thing it is; an attribute of the model is part of it, whatever it is called."""
    model = nn.ReLU()
    model.dataset = [torch.ones(2)]
    guard = Guard(model, loader=DataLoader(data, shuffle=True))
    guard.save()
    assert guard.last_bytes == 8
    with guard.protecting("any"):
        model.dataset.pop().zero_()
    assert model.dataset[0].tolist() == [1.0, 1.0]


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


def test_batches_of_many_sizes_keep_them():
    """A batch sampler may make them by length."""

    class Batches:
        def __iter__(self):
            return iter([[0], [1, 2, 3], [4, 5]])

        def __len__(self):
            return 3

    loader = DataLoader(TensorDataset(torch.arange(6.0)[:, None]), batch_sampler=Batches())
    seen = []

    def loss(model, batch):
        seen.append(batch[0].flatten().tolist())
        return model(batch[0]).sum()

    context = ModelDataContext(nn.Linear(1, 1), loader=loader, loss_fn=loss)
    context.compute_gradients()
    assert seen == [[0.0], [1.0, 2.0, 3.0], [4.0, 5.0]]
    assert [len(batch[0]) for batch in context.get_shuffled_loader()] == [1, 3, 2]


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


def test_an_epoch_with_steps_is_an_epoch():
    """The same as by hand, over the loader one gives."""
    model, context = small_context()
    twin, _ = small_context()
    batches = [[torch.randn(4, 3)] for _ in range(3)]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    mean = torch.zeros(2, 4)
    for batch in batches:
        optimizer.zero_grad()
        small_loss(twin, batch).backward()
        mean += twin[2].weight.grad / 3
        optimizer.step()
    found = context.run_training_epoch(batches)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.allclose(found["2.weight"], mean, atol=1e-7)


def test_a_perturbation_adds_what_it_names_or_nothing_at_all():
    """A wrong name or shape is found before the first parameter is touched."""
    model, context = small_context()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NoMatchError, match=r"No parameter is called '0.wieght'; nearest: '0.weight'"):
        context.apply_perturbation({"0.bias": torch.ones(4), "0.wieght": torch.ones(4, 3)}, 1.0)
    with pytest.raises(OptionError, match=r"the shape of its parameter, \(4,\); got \(3,\)"):
        context.apply_perturbation({"2.bias": torch.ones(2), "0.bias": torch.ones(3)}, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    context.apply_perturbation({"0.bias": torch.ones(4, dtype=torch.float64)}, 0.5)
    assert torch.allclose(model[0].bias, before[1] + 0.5)


def test_names_are_without_wrappers_and_with_them():
    """Under DataParallel, say."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    context = ModelDataContext(model, loss_fn=small_loss, batch=[torch.ones(1, 2)])
    assert list(context.compute_batch_gradients()) == ["0.weight", "0.bias"]
    before = model.module[0].bias.detach().clone()
    context.apply_perturbation({"0.bias": torch.ones(2)}, 1.0)
    context.apply_perturbation({"module.0.bias": torch.ones(2)}, 1.0)
    assert torch.allclose(model.module[0].bias, before + 2)


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


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    "loader", [iter([1]), (n for n in range(3)), DataLoader(_Stream())], ids=["iter", "gen", "stream"]
)
def test_what_can_only_be_iterated_is_refused_by_name(loader):
    """It would be used up, or go on elsewhere."""
    name = type(getattr(loader, "dataset", loader)).__name__
    with pytest.raises(LifecycleError, match=f"'{name}' can only be iterated"):
        context_of(Run(), loader=loader).compute_gradients()
    assert next(iter(loader)) is not None


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
    """Whether it takes a generator or not; each call another order, no stream of the run moved."""
    takes = lambda generator: DataLoader(range(9), shuffle=True, generator=generator)  # noqa: E731
    takes_none = lambda: DataLoader(range(9), shuffle=True)  # noqa: E731
    draws = lambda: torch.randperm(9).tolist()  # noqa: E731
    for make in (takes, takes_none, draws):
        context = ModelDataContext(nn.ReLU(), shuffled_loader=make)
        state = torch.get_rng_state()
        orders = {tuple(int(x) for x in context.get_shuffled_loader()) for _ in range(3)}
        assert len(orders) == 3
        assert torch.equal(torch.get_rng_state(), state)


def test_a_list_of_batches_is_data_too():
    """It can be read again without harm."""
    context = ModelDataContext(nn.ReLU(), loader=list(range(20)))
    assert sorted(context.get_shuffled_loader()) == list(range(20))
    assert list(context.get_shuffled_loader()) != list(range(20))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_that_was_handed_a_batch_sampler_is_read_in_batches(drop_last):
    """Such a loader has no batch size of its own; the generator of the sampler inside stays where it is."""
    data = TensorDataset(torch.arange(10.0).reshape(10, 1))
    generator = torch.Generator().manual_seed(4)
    batches = BatchSampler(RandomSampler(data, generator=generator), 4, drop_last)
    before = generator.get_state()
    _, context = small_context(loader=DataLoader(data, batch_sampler=batches))
    read = [batch[0].flatten().tolist() for batch in context.get_shuffled_loader()]
    assert [len(batch) for batch in read] == ([4, 4] if drop_last else [4, 4, 2])
    assert len({value for batch in read for value in batch}) == sum(map(len, read))
    assert torch.equal(generator.get_state(), before)
