"""What an intervention can do to a run: each operation, what it leaves alone, and what it says when it cannot."""

from __future__ import annotations

import pytest
import torch
from helpers_guard import Run, context_of, differing, portrait, small_context, small_loss
from torch import nn

from hookline.errors import GuardError
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


# -- gradients ------------------------------------------------------------------------------------------------------


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
