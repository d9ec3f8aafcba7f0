"""What an intervention can do to a run: each operation, what it leaves alone, and what it says when it cannot."""

from __future__ import annotations

import pytest
import torch
from helpers_guard import Run, context_of, differing, portrait, small_context, small_loss
from torch import nn

from hookline.errors import GuardError, LifecycleError, OptionError
from hookline.guard.guard import Guard
from hookline.guard.model_context import ModelDataContext
from hookline.guard.snapshot import Snapshot, roots_of

# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_brings_everything_back_as_often_as_one_likes():
    """Model, optimizer, scheduler, scaler, gradients, random streams."""
    run = Run()
    context = context_of(run)
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
    context = context_of(run)
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
    context = context_of(run)
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
    context = context_of(run, guard=guard)
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
    pre_epoch = Snapshot.of(roots_of(*run.guarded), gradients=False)
    for _ in range(3):
        run.step()
    guard = Guard(*run.guarded)
    context = context_of(run, pre_epoch=pre_epoch, guard=guard)
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
        context_of(Run()).restore_pre_epoch()


def test_the_next_epoch_uses_the_memory_of_the_last():
    """If it is about the same objects."""
    run = Run()
    first = Snapshot.of(roots_of(*run.guarded), gradients=False)
    second = Snapshot.of(roots_of(*run.guarded), first, gradients=False)
    other = Snapshot.of(roots_of(run.model), first, gradients=False)
    assert second is first
    assert other is not first
    assert second.nbytes > other.nbytes > 0


def test_k_shuffles_after_going_back_differ_and_move_no_stream_of_the_run():
    """Each from a stream of its own, also if each starts from the same state, and from one firing to the next."""
    run = Run()
    pre_epoch = Snapshot.of(roots_of(*run.guarded), gradients=False)
    orders = []
    for _ in range(2):
        context = context_of(run, pre_epoch=pre_epoch)
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
    model, context = small_context()
    batch = [torch.ones(2, 3)]
    small_loss(model, batch).backward()
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
        small_loss(model, batch).backward()
        raise ValueError("bad loss")

    model, context = small_context(loss_fn=bad)
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
    model, context = small_context()
    plain = context.compute_batch_gradients()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    handle = model[2].weight.register_hook(lambda grad: seen.append(grad.clone()))
    scaled = ModelDataContext(model, context._optimizer, scaler=scaler, loss_fn=small_loss, batch=context._batch)
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
        context_of(run, batch=None).compute_batch_gradients()
    with pytest.raises(RuntimeError, match=r"requires a loss_fn"):
        context_of(run, loss_fn=None).compute_batch_gradients()
    with pytest.raises(RuntimeError, match=r"step=True\) needs an optimizer"):
        ModelDataContext(run.model, loader=run.loader, loss_fn=run.loss).run_training_epoch()
    with pytest.raises(RuntimeError, match="there is no loader"):
        context_of(run, loader=None).get_shuffled_loader()
    with pytest.raises(RuntimeError, match="returns a tensor to differentiate; got float"):
        context_of(run, loss_fn=lambda model, batch: 1.0).compute_batch_gradients()
    with pytest.raises(RuntimeError, match="no batch to go through"):
        context_of(run).run_training_epoch([])


def test_the_gradients_of_the_run_can_be_read_also_while_they_are_put_away():
    """By the names of parameters."""
    run = Run()
    guard = Guard(*run.guarded)
    context = context_of(run, guard=guard)
    grads = {name: p.grad for name, p in run.model.named_parameters()}
    guard.save(["grads"])
    with guard.protecting("reader", "grads"):
        assert run.model.head.weight.grad is None
        found = context.gradients
    assert found.keys() == grads.keys()
    assert all(found[name] is grads[name] for name in grads)


def test_the_hessian_times_a_vector_is_the_hessian_times_the_vector():
    """Against the whole Hessian."""
    model, context = small_context()
    names = [name for name, _ in model.named_parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]

    def of_flat(vector):
        parts = dict(zip(names, torch.split(vector, sizes), strict=True))
        shaped = {name: parts[name].view_as(p) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, shaped, context._batch[0]).square().mean()

    hessian = torch.autograd.functional.hessian(of_flat, flat)
    vector = torch.randn(len(flat))
    parts = torch.split(vector, sizes)
    found = context.hvp(
        {name: part.view_as(p) for part, (name, p) in zip(parts, model.named_parameters(), strict=True)}
    )
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


# -- what cannot be differentiated, and what is frozen ---------------------------------------------------------------


def test_what_is_frozen_in_a_model_that_trains_stays_frozen():
    """Gradients are taken as training takes them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen = []

    def loss(model, batch):
        seen.append((model.training, model[1].training))
        return model(batch).sum()

    context = ModelDataContext(model, loss_fn=loss, batch=torch.randn(3, 2))
    model[1].eval()
    context.compute_batch_gradients()
    model.eval()
    context.compute_batch_gradients()
    assert seen == [(True, False), (True, True)]


def test_without_anything_to_differentiate_by_it_says_so():
    """A model without parameters, or with frozen ones."""
    for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        context = ModelDataContext(model, loss_fn=lambda model, batch: model(batch).sum(), batch=torch.ones(1, 2))
        with pytest.raises(LifecycleError, match="depends on no parameter"):
            context.hvp({})
        with pytest.raises(LifecycleError, match="depends on no parameter"):
            context.compute_batch_gradients()


def test_the_hessian_by_complex_parameters_is_that_of_their_parts():
    """Of |sum of w|² it is 2 everywhere, for the real and the imaginary parts alike."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    context = ModelDataContext(
        model, loss_fn=lambda model, batch: model(batch).abs().square().sum(), batch=torch.ones(1, 2) + 0j
    )
    product = context.hvp({"weight": torch.tensor([[1 + 2j, 3 - 1j]])})["weight"]
    assert torch.allclose(product, torch.tensor([[8 + 2j, 8 + 2j]]))
