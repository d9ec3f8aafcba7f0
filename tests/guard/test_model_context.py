"""What an intervention can do to a run: each operation, what it leaves alone, and what it says when it cannot."""

from __future__ import annotations

import pytest
import torch
from helpers_guard import Run, differing, portrait
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from hookline.errors import GuardError, NoMatchError, OptionError
from hookline.guard.guard import Guard
from hookline.guard.model_context import ModelDataContext
from hookline.guard.snapshot import PreEpochState


def _context(run: Run, **options) -> ModelDataContext:
    given = {
        "scheduler": run.scheduler,
        "scaler": run.scaler,
        "loader": run.loader,
        "loss_fn": run.loss,
        "batch": [torch.ones(6, 5)],
    }
    return ModelDataContext(run.model, run.optimizer, **(given | options))


def _small(**options) -> tuple[nn.Module, ModelDataContext]:
    """A model without randomness, so that gradients can be compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loader": loader, "loss_fn": _loss, "batch": next(iter(loader))}
    return model, ModelDataContext(model, optimizer, **(given | options))


def _loss(model: nn.Module, batch) -> torch.Tensor:
    return model(batch[0]).square().mean()


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_brings_everything_back_as_often_as_one_likes():
    """Model, optimizer, scheduler, scaler, gradients, random streams."""
    run = Run()
    context = _context(run)
    before = portrait(run)
    token = context.save_checkpoint()
    for _ in range(2):
        run.step()
        run.model.eval()
        context.restore_checkpoint(token)
        assert differing(before, portrait(run)) == []


def test_a_light_checkpoint_brings_the_parameters_back():
    """Buffers and the optimizer's numbers stay as they have become."""
    run = Run()
    context = _context(run)
    token = context.save_checkpoint(full=False)
    parameters = [p.detach().clone() for p in run.model.parameters()]
    run.step()
    moved = run.model.norm.running_mean.clone()
    context.restore_checkpoint(token)
    assert all(torch.equal(a, b) for a, b in zip(parameters, run.model.parameters(), strict=True))
    assert torch.equal(run.model.norm.running_mean, moved)


def test_tokens_that_are_unknown_or_discarded_are_named():
    """To restore is an error, to discard twice is harmless."""
    run = Run()
    context = _context(run)
    first, second = context.save_checkpoint(), context.save_checkpoint(full=False)
    assert first != second
    context.discard_checkpoint(first)
    context.discard_checkpoint(first)
    with pytest.raises(ValueError, match=f"Unknown checkpoint token: '{first}'. .*: {second}"):
        context.restore_checkpoint(first)
    with pytest.raises(OptionError, match="Unknown checkpoint token: 'nonsense'"):
        context.restore_checkpoint("nonsense")


def test_a_light_checkpoint_cannot_hide_what_a_reader_changed():
    """Counters are set back only where numbers are."""
    run = Run()
    guard = Guard(*run.guarded)
    context = _context(run, guard=guard)
    guard.save(["reads"])

    def intervene():
        token = context.save_checkpoint(full=False)
        run.optimizer.step()
        context.restore_checkpoint(token)

    with pytest.raises(GuardError, match=r"optimizer\.state"), guard.protecting("sly", "reads"):
        intervene()


# -- before the epoch -----------------------------------------------------------------------------------------------


def test_going_back_to_before_the_epoch_and_forth_again():
    """The state before it, inside a guard; after the guard the state after it."""
    run = Run("adam", steps=0)
    model_before = {name: value.clone() for name, value in run.model.state_dict().items()}
    pre_epoch = PreEpochState.take(*run.guarded)
    for _ in range(3):
        run.step()
    guard = Guard(*run.guarded)
    context = _context(run, pre_epoch=pre_epoch, guard=guard)
    after = portrait(run)
    guard.save()
    with guard.protecting("counterfactual"):
        context.restore_pre_epoch()
        assert not run.optimizer.state
        assert run.scheduler.last_epoch == 0
        state = run.model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model_before.items())
    assert differing(after, portrait(run)) == []


def test_without_a_saved_epoch_it_says_what_to_declare():
    """The hook has to ask for it."""
    with pytest.raises(RuntimeError, match="needs_pre_epoch_state = True"):
        _context(Run()).restore_pre_epoch()


def test_the_next_epoch_uses_the_memory_of_the_last():
    """If it is about the same objects."""
    run = Run()
    first = PreEpochState.take(*run.guarded)
    second = PreEpochState.take(*run.guarded, into=first)
    other = PreEpochState.take(run.model, into=first)
    assert second._snapshot is first._snapshot
    assert other._snapshot is not first._snapshot
    assert second.saved_bytes > other.saved_bytes > 0


def test_k_shuffles_after_going_back_differ_and_move_no_stream_of_the_run():
    """Each from a stream of its own, also if each starts from the same state, and from one firing to the next."""
    run = Run()
    pre_epoch = PreEpochState.take(*run.guarded)
    orders = []
    for _ in range(2):
        context = _context(run, pre_epoch=pre_epoch)
        for _ in range(3):
            context.restore_pre_epoch()
            before = portrait(run)
            orders.append(tuple(torch.cat([y for _, y in context.get_shuffled_loader()]).tolist()))
            assert differing(before, portrait(run)) == []
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(24)) for order in orders)


# -- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_of_a_batch_are_autograds_and_leave_grad_alone():
    """Values, objects and modes; in training mode, whatever mode the model is in."""
    model, context = _small()
    batch = [torch.ones(2, 3)]
    _loss(model, batch).backward()
    kept = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    model.eval()
    found = context.compute_batch_gradients(batch)
    assert not model.training
    assert found.keys() == kept.keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name][0]
        assert torch.equal(parameter.grad, kept[name][1])
        assert torch.equal(found[name], kept[name][1])
        assert found[name] is not parameter.grad


def test_a_loss_that_raises_leaves_grad_alone():
    """And the modes."""

    def bad(model, batch):
        _loss(model, batch).backward()
        raise ValueError("bad loss")

    model, context = _small(loss_fn=bad)
    model.eval()
    model[0].weight.grad = grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="bad loss"):
        context.compute_batch_gradients()
    assert model[0].weight.grad is grad
    assert torch.equal(grad, torch.ones(4, 3))
    assert model[2].weight.grad is None
    assert not model.training


def test_a_scaler_scales_and_is_taken_out_again():
    """The gradients are those without one; a step through it is a step."""
    model, context = _small()
    plain = context.compute_batch_gradients()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    handle = model[2].weight.register_hook(lambda grad: seen.append(grad.clone()))
    scaled = ModelDataContext(model, context._optimizer, scaler=scaler, loss_fn=_loss, batch=context._batch)
    found = scaled.compute_batch_gradients()
    handle.remove()
    assert torch.allclose(seen[0], plain["2.weight"] * 1024)
    assert all(torch.allclose(found[name], plain[name]) for name in plain)
    before = model[2].weight.detach().clone()
    mean = scaled.run_training_epoch([context._batch])
    assert torch.allclose(model[2].weight, before - 0.1 * plain["2.weight"])
    assert torch.allclose(mean["2.weight"], plain["2.weight"])


def test_what_is_missing_is_named():
    """A batch, a loss, an optimizer, a loader, a tensor."""
    run = Run()
    with pytest.raises(RuntimeError, match=r"compute_batch_gradients\(\) requires a batch"):
        _context(run, batch=None).compute_batch_gradients()
    with pytest.raises(RuntimeError, match=r"requires a loss_fn"):
        _context(run, loss_fn=None).compute_batch_gradients()
    with pytest.raises(RuntimeError, match=r"step=True\) needs an optimizer"):
        ModelDataContext(run.model, loader=run.loader, loss_fn=run.loss).run_training_epoch()
    with pytest.raises(RuntimeError, match="there is no loader"):
        _context(run, loader=None).get_shuffled_loader()
    with pytest.raises(RuntimeError, match="returns a tensor to differentiate; got float"):
        _context(run, loss_fn=lambda model, batch: 1.0).compute_batch_gradients()
    with pytest.raises(RuntimeError, match="no batch to go through"):
        _context(run).run_training_epoch([])


def test_the_gradients_of_the_run_can_be_read_also_while_they_are_put_away():
    """By the names of parameters."""
    run = Run()
    guard = Guard(*run.guarded)
    context = _context(run, guard=guard)
    grads = {name: p.grad for name, p in run.model.named_parameters()}
    guard.save(["grads"])
    with guard.protecting("reader", "grads"):
        assert run.model.head.weight.grad is None
        found = context.gradients
    assert found.keys() == grads.keys()
    assert all(found[name] is grads[name] for name in grads)


def test_the_hessian_times_a_vector_is_the_hessian_times_the_vector():
    """Against the whole Hessian, by names and as one long vector."""
    model, context = _small()
    names = [name for name, _ in model.named_parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]

    def of_flat(vector):
        parts = dict(zip(names, torch.split(vector, sizes), strict=True))
        shaped = {name: parts[name].view_as(p) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, shaped, context._batch[0]).square().mean()

    hessian = torch.autograd.functional.hessian(of_flat, flat)
    vector = torch.randn(len(flat))
    found = context.hvp(vector)
    assert list(found) == names
    assert torch.allclose(torch.cat([found[name].flatten() for name in names]), hessian @ vector, atol=1e-5)
    only_one = context.hvp({"2.bias": torch.ones(2)})
    vector = torch.zeros(len(flat))
    vector[-2:] = 1
    assert torch.allclose(torch.cat([only_one[name].flatten() for name in names]), hessian @ vector, atol=1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_second_derivatives_go_through_attention():
    """The fused kernels have none."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    context = ModelDataContext(layer, loss_fn=loss, batch=torch.randn(2, 4, 8))
    direction = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    found = context.hvp(direction)
    assert sum(float(part.abs().sum()) for part in found.values()) > 0


# -- training, weights, data ----------------------------------------------------------------------------------------


def test_an_epoch_without_steps_gives_the_mean_gradient_and_moves_nothing():
    """Over the whole training set; the run's loader is not iterated, no stream is drawn from."""
    model, context = _small()
    state = torch.get_rng_state()
    before = [p.detach().clone() for p in model.parameters()]
    found = context.compute_gradients()
    data = context._loader.dataset.tensors[0]
    _loss(model, [data]).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_epoch_with_steps_is_an_epoch():
    """The same as by hand, over the loader one gives."""
    model, context = _small()
    twin, _ = _small()
    batches = [[torch.randn(4, 3)] for _ in range(3)]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    mean = torch.zeros(2, 4)
    for batch in batches:
        optimizer.zero_grad()
        _loss(twin, batch).backward()
        mean += twin[2].weight.grad / 3
        optimizer.step()
    found = context.run_training_epoch(batches)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.allclose(found["2.weight"], mean, atol=1e-7)


def test_the_runs_own_step_is_used_if_there_is_one():
    """``train_step(batch)``."""
    seen = []
    _, context = _small(train_step=seen.append)
    context.run_training_epoch([1, 2])
    assert seen == [1, 2]


def test_a_perturbation_adds_what_it_names_or_nothing_at_all():
    """A wrong name or shape is found before the first parameter is touched."""
    model, context = _small()
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
    context = ModelDataContext(model, loss_fn=_loss, batch=[torch.ones(1, 2)])
    assert list(context.compute_batch_gradients()) == ["0.weight", "0.bias"]
    before = model.module[0].bias.detach().clone()
    context.apply_perturbation({"0.bias": torch.ones(2)}, 1.0)
    context.apply_perturbation({"module.0.bias": torch.ones(2)}, 1.0)
    assert torch.allclose(model.module[0].bias, before + 2)


def test_what_is_to_look_at():
    """Device, groups and state of the optimizer, which cannot be assigned to."""
    run = Run()
    context = _context(run)
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
    with pytest.raises(GuardError, match=f"'{name}' can only be iterated"):
        _context(Run(), loader=loader).compute_gradients()
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
        context = ModelDataContext(nn.Linear(1, 1), loader=loader, loss_fn=_loss)
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
    _, context = _small(loader=DataLoader(data, batch_sampler=batches))
    read = [batch[0].flatten().tolist() for batch in context.get_shuffled_loader()]
    assert [len(batch) for batch in read] == ([4, 4] if drop_last else [4, 4, 2])
    assert len({value for batch in read for value in batch}) == sum(map(len, read))
    assert torch.equal(generator.get_state(), before)
